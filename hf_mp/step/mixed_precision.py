"""``MixedPrecision``: attaches a precision policy to a model and its optimizers, and detaches it again."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from hf_mp._warnings import warn_caller
from hf_mp.casting.kv_cache import cache_patches
from hf_mp.casting.replacements import install_replacements, remove_replacements
from hf_mp.casting.replacements.base import entry_points
from hf_mp.casting.rules import Rules
from hf_mp.casting.tables import TableName
from hf_mp.casting.torch_patches import PATCHES, acquire
from hf_mp.policy import PrecisionPolicy
from hf_mp.scaling.borders import accumulating
from hf_mp.scaling.events import (
    FREE_GRADIENTS,
    ON_OVERFLOW,
    FreeGradients,
    StepObserver,
    check_options,
    observers_for,
)
from hf_mp.scaling.rules import PrecisionStats, StepReport
from hf_mp.scaling.scalers import LossScaler, scaler_for
from hf_mp.step.forward import AttachedForward
from hf_mp.step.gradients import GradientCheck, Verdict
from hf_mp.step.update import StepGuard
from hf_mp.weights.accelerated import as_accelerated
from hf_mp.weights.attachable import RUNTIMES, check_attachable, check_optimizer, rules_for
from hf_mp.weights.early_state import state_to_fp32
from hf_mp.weights.layout import WeightLayout, too_large
from hf_mp.weights.layout_choice import make_layout, spread_layout
from hf_mp.weights.model_walk import Walk, optimizer_parameters
from hf_mp.weights.ranks.agreement import Ranks
from hf_mp.weights.ranks.gathered_slots import GatheredSlots
from hf_mp.weights.ranks.parallelism import (
    ALONE,
    Parallelism,
    check_updates,
    is_distributed,
    mesh_groups,
    parallelism_of,
)
from hf_mp.weights.region import Region
from hf_mp.weights.slots import Slots
from hf_mp.weights.value_clipping import VALUE_PATCHES

STATE_VERSION = 1  # of state_dict()


class MixedPrecision:
    """Mixed precision for one model and its optimizers: autocast, FP32 masters, loss scaling (arXiv 1710.03740).

    In the default layout the parameters become (or are) the FP32 masters; autocast reads FP16/BF16 working copies of
    them; when ``backward()`` returns, ``.grad`` is FP32 and unscaled. :mod:`hf_mp.step` goes through a step.

    Args:
        policy: a :class:`PrecisionPolicy` or what :meth:`PrecisionPolicy.parse` takes; default ``"fp16"``.
        loss_scaler: the scaler to use instead of the one that the policy names.
        tables, rules: as for :class:`hf_mp.autocast`; default ``"compact"`` and none.
        free_gradients: when the lean layouts free a gradient: ``"step"`` (default), or ``"backward"``: parameters are
            updated inside ``backward()`` (:mod:`hf_mp.weights.lean.optimizer_in_backward`).
        max_grad_norm: clip to this global 2-norm in ``optimizer.step()``, where a kernel multiplies what it reads
            anyway; ``inf`` only measures it (``grad_norm``); default None: neither. A gradient that is written
            through ``.data`` or NumPy after the backward is not seen then. For ``free_gradients="backward"``, with it
            and where the loss is scaled, the backward runs twice.
        layout: how the weights are stored; default: what the policy says.
        on_overflow: ``"skip"`` (default) or ``"heal"`` (:func:`hf_mp.heal_overflows`).
        switches: ``fp32_head=True``, ``exact_generation=True``, as in :class:`PrecisionPolicy`.

    Attributes:
        policy, scaler, stats: the :class:`PrecisionStats`; step_was_skipped: whether the last step was.
        grad_norm: that of the last step, with ``max_grad_norm``: before clipping, FP32 of shape (), not read yet.

    Raises TypeError or ValueError for an unknown policy, ``free_gradients`` without effect or a bad ``max_grad_norm``.
    """

    def __init__(
        self,
        policy: PrecisionPolicy | torch.dtype | str = "fp16",
        *,
        loss_scaler: LossScaler[Any] | None = None,
        tables: TableName = "compact",
        rules: Rules | None = None,
        free_gradients: FreeGradients = "step",
        max_grad_norm: float | None = None,
        layout: WeightLayout | None = None,
        on_overflow: str = "skip",
        **switches: bool,
    ) -> None:
        self.policy = PrecisionPolicy.parse(policy, **switches)
        check_options(self.policy, free_gradients, on_overflow, max_grad_norm)
        self.scaler = loss_scaler if loss_scaler is not None else scaler_for(self.policy)
        self.layout, self.ranks = layout or make_layout(self.policy), Ranks(self._settings)
        self.check = GradientCheck(self.backward_ended, self.layout, self.ranks, self._parameters_to_check)
        self._max_grad_norm, self.grad_norm = max_grad_norm, None if max_grad_norm is None else torch.zeros(())
        self.check.measures_norm = max_grad_norm is not None
        self._tables, self.rules, self.remedies = tables, rules or {}, dict[str, str]()
        self.region = self._make_region(None)
        # Whether a Trainer's session made it (is_of_session): then its next one takes the model over.
        self._step_was_skipped = self.is_of_session = False
        self._stats = PrecisionStats.before_first_step(self.scaler.get_scale())
        self._model: weakref.ref[nn.Module] | None = None
        self._patches: weakref.finalize[..., nn.Module] | None = None  # takes them off with the model
        self._forwards, self._guards = list[weakref.ref[AttachedForward]](), list[StepGuard]()
        # Whether gradients are used in the backward: nobody clips or reduces them afterwards.
        self.uses_up_gradients = free_gradients == "backward"
        self.observers: list[StepObserver] = observers_for(FREE_GRADIENTS, free_gradients, self, max_grad_norm)
        self.observers += observers_for(ON_OVERFLOW, on_overflow, self)
        # A library may put its own forward over ours; detach() then finds the runtime here.
        RUNTIMES.add(self)
        self.scaler.users.add(self)

    @property
    def model(self) -> nn.Module | None:
        """The attached model; None where none is, or where it is gone."""
        return None if self._model is None else self._model()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped."""
        self.scaler.finish_pending_step()
        return self._step_was_skipped

    @property
    def stats(self) -> PrecisionStats:
        """What mixed precision did so far."""
        self.scaler.finish_pending_step()
        return self._stats

    @stats.setter
    def stats(self, stats: PrecisionStats) -> None:
        self._stats = stats

    def attach(self, model: nn.Module) -> nn.Module:
        """Run ``model`` under this policy from now on; returns the same model, or raises ValueError with the way out.

        Trainable FP16/BF16 parameters are cast to FP32 in place (the Parameter objects stay); in the lean layouts they
        become :class:`SplitParameter`, whose saved values are FP32 all the same. Frozen ones stay as they are.
        """
        if not self.policy.is_mixed:
            return model
        if self.model is not None:
            raise ValueError("this MixedPrecision has a model already: detach() it, or make another one")
        parallelism = parallelism_of(model)
        # All that can be refused is refused before the model is touched.
        check_attachable(model, parallelism, self.policy, is_scaled=self.scaler.is_scaling)
        try:
            self._take_model(model)
            install_replacements(model, self._tables)  # before FSDP is told which weights travel in FP32
            self._use_layout_for(model.parameters(), parallelism)
            self.layout.make_masters(model)
            self.wrap_forwards()
        except BaseException:
            self.detach()
            raise
        return model

    def _take_model(self, model: nn.Module) -> None:
        # The model holds the runtime by its forward: held strongly here, the pair would wait for the garbage collector.
        self._model = weakref.ref(model)
        self.region, self.check.is_scaled = self._make_region(model), self.scaler.is_scaling
        self._patches = weakref.finalize(model, acquire(PATCHES, VALUE_PATCHES, *cache_patches()))

    def _make_region(self, model: nn.Module | None) -> Region:
        rules = rules_for(model, self.policy, self.rules)
        return Region(self.layout, model, rules=rules, tables=self._tables)

    def add_rules(self, rules: Mapping[str, str]) -> None:
        """Have rules by module (``remedies``) hold too, and be saved; a ValueError for names that match no module."""
        # The region refuses names that match no module; then nothing else has changed.
        self.region.add_rules(rules if self.model else {}, self.model)
        self.rules, self.remedies = {**self.rules, **rules}, {**self.remedies, **rules}
        self.stats = replace(self.stats, remedies=tuple(f"{name}: {rule}" for name, rule in self.remedies.items()))

    def wrap_forwards(self) -> None:
        """Put the attached forward (again) wherever it is missing: a library may have set one of its own."""
        for module in [] if self.model is None else entry_points(self.model):
            if not isinstance(module.__dict__.get("forward"), AttachedForward):
                vars(module)["forward"] = self.make_forward(module)  # Fabric's wrapper would set it inside

    def make_forward(self, module: nn.Module) -> AttachedForward:
        """The forward that ``module`` has while attached."""
        forward = AttachedForward(self, module)
        self._forwards.append(weakref.ref(forward))
        return forward

    def attach_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Guard ``optimizer.step()``: skip it when a gradient is inf or NaN, or 2**64 or larger.

        Returns:
            The same optimizer; in the lean layouts a :class:`MasterWeightOptimizer` around it, to be used from now on.

        Raises TypeError for anything but one optimizer; ValueError before attach(), for another model's, for a model
        without a trainable parameter, and for LBFGS.
        """
        if not self.policy.is_mixed:
            return optimizer
        if self._model is None:
            raise ValueError("attach a model before its optimizer: MixedPrecision(...).attach(model)")
        if (accelerated := as_accelerated(optimizer)) is not None:
            accelerated.optimizer = self.attach_optimizer(accelerated.optimizer)
            return optimizer
        check_optimizer(optimizer, self.model)
        self._use_layout_for(optimizer_parameters(optimizer), parallelism_of(self.model))
        optimizer = self.layout.wrap(optimizer)
        state_to_fp32(optimizer)
        for observer in self.observers:
            observer.take_optimizer(optimizer)
        # A copied optimizer has the guard of the one that it was copied from.
        guard = getattr(optimizer.step, "hf_mp_guard", None)
        if guard is None or not guard.runtimes or guard.optimizer is not optimizer:
            guard = StepGuard(optimizer)
        if guard not in self._guards:
            guard.runtimes.append(self)
            self._guards.append(guard)
        return optimizer

    def begin_forward(self, model: nn.Module, forward: AttachedForward) -> Slots | None:
        """Make the FP32 masters that are missing; gives the weights of ``forward``, which is about to run.

        It is that of the attached ``model``, or of a part of it. None in a transform of functorch.
        """
        if self._patches is None:  # a deep copy: by now all of its modules are there
            self._take_model(model)
        parallelism = parallelism_of(model)  # DDP or FSDP may have come after attach()
        if parallelism is not ALONE:
            self.ranks.note_forward(model, parallelism)
            self._use_layout_for(model.parameters(), parallelism)
        # Borders are autograd functions without rules for torch.func, which has no public way to ask whether it is at
        # work.
        if torch._C._are_functorch_transforms_active():
            return None
        if has_grad := torch.is_grad_enabled():
            self.region.refuse_other_threads()  # here: autograd's own threads recompute what was checkpointed
            self.check.forget_failed_backwards()
        # DDP takes a parameter for ready as soon as the border that it shares has run.
        elements = 1 if self.uses_up_gradients or parallelism.ddp is not None else None
        walk = Walk(model)
        if has_grad and walk != forward.walk:
            self._forget_borders()
            self.layout.make_masters(model)
            walk = forward.walk = Walk(model)
        region, kind = self.region, (id(forward), has_grad, model.training)
        make = Slots if self.layout.keeps_copies else GatheredSlots
        slots = make(
            self.layout, self, region.uses, region.made_earlier, has_grad, self.check.is_scaled, elements, kind
        )
        slots.bring_in_model(model, walk, forward.lasting)
        return slots

    def _forget_borders(self) -> None:
        for forward in filter(None, [reference() for reference in self._forwards]):
            forward.lasting.clear()

    def _use_layout_for(self, parameters: Iterable[Tensor], parallelism: Parallelism) -> None:
        model, before = self.model, self.layout
        if is_distributed() or parallelism.is_tensor_parallel:  # a mesh may be of one process
            parameters = list(parameters)
            self.ranks.compare(mesh_groups(parameters))
            self.layout = spread_layout(before, parameters, parallelism)
        if self.layout is not before:
            before.restore(model)  # of a lean one, what FSDP2 has left whole
            self.check.layout = self.region.layout = self.layout
        if model is not None:
            self.layout.join_ranks(model, parallelism, self, self.region.fp32_modules)

    def _settings(self) -> str:
        """What must match on all ranks that train one model."""
        return f"precision={self.policy}, loss_scaler={self.scaler.state}"

    def _parameters_to_check(self) -> list[nn.Parameter]:
        return self.layout.parameters_to_check(self.model, [guard.optimizer for guard in self._guards])

    # Backward: what the borders ask (hf_mp.scaling.borders.Crossings)
    def loss_scale_on(self, device: torch.device) -> Tensor | None:
        self.scaler.finish_pending_step()  # the last step sets this S
        return self.scaler.scale_and_inverse(device).scale if self.check.is_scaled else None

    def inverse_scale_on(self, device: torch.device, node: Any, places: Sequence[int]) -> Tensor | None:
        if not self.check.is_scaled:
            return None
        if self.check.open_backwards and not self.region.thread.is_recomputing:
            return self.scaler.scale_and_inverse(device).inverse
        if accumulating(node, places):
            self.check.warn_once(
                "gradients reached the parameters of an attached model, but none came in through its outputs, so the "
                "loss scale was not applied and small ones may be lost. The loss was computed from a tensor that "
                "forward() did not return (a hook, an attribute, a closure): return it, in a tuple, a mapping, a "
                "dataclass or an object"
            )
        return None

    def gradient_entered(self, node: Any, gradient: Tensor) -> None:
        is_asked_for = self.check.is_scaled or self.check.measures_norm or self.observers
        if is_asked_for or profiler._is_profiler_enabled:  # which shows the backward
            self.check.backward_began(getattr(node, "value", None))  # none where a second derivative begins
        for observer in self.observers:
            observer.gradient_entered(node, gradient)

    def keep_scaled(self, node: Any, uses: dict[int, list[Tensor]], inverse: Tensor | None) -> None:
        if self.layout.keeps_scaled_gradients:
            weights = {place: node.outside[place] for place in accumulating(node, uses)}
            self.layout.keep_scaled_gradients(weights, uses, inverse)

    def backward_ended(self, largest: Tensor | None) -> None:
        """Tell the observers; ``largest`` as for :meth:`StepObserver.backward_ended`."""
        for observer in self.observers:
            observer.backward_ended(largest)

    def verdict(self, optimizer: Optimizer) -> Verdict | StepReport:
        """Before an update: clip and judge the gradients of ``optimizer``; the report if the backward has used them."""
        self.scaler.finish_pending_step()  # where no backward has done so since the last step
        for observer in self.observers:
            if (report := observer.own_report()) is not None:
                return report
        model, parameters = self.model, optimizer_parameters(optimizer)
        parallelism = parallelism_of(model)  # FSDP may have come since, around the model too
        if model is not None and parallelism is not ALONE:
            if parallelism.fsdp:
                check_updates(optimizer, model)
            self._use_layout_for(parameters, parallelism)
        if self._max_grad_norm is not None:
            self.grad_norm = self.clip_grad_norm(optimizer, parameters, self._max_grad_norm)
            if self.grad_norm is None:  # written since, or of a part of the model
                self.grad_norm = get_total_norm([one.grad for one in parameters if one.grad is not None])
                self.check.clip(parameters, self._max_grad_norm, self.grad_norm)
        return self.check.verdict(parameters)

    def clip_grad_norm(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], max_norm: float
    ) -> Tensor | None:
        """Clip the gradients of ``parameters`` to this 2-norm in the next step; ``inf`` only measures.

        The norm before, FP32 of shape (), as the backward left it or the layout that keeps the optimizer's gradients
        knows it; None if torch's own function must do it.
        """
        # A lean layout has them still scaled in 16 bits, where nobody else can clip them.
        norm = self.layout.clip_grad_norm(optimizer_parameters(optimizer), max_norm)
        if norm is None and (norm := self.check.norm(parameters)) is not None:
            self.check.clip(parameters, max_norm, norm)
        return norm

    def before_next_scale(self) -> None:
        """The scaler is about to change S: gradients that are kept scaled keep the S that they have."""
        self.layout.before_next_scale(self.check.parameters)

    def finish_step(self, report: StepReport, *, was_skipped: bool) -> None:
        """Take in that a step was applied or skipped; sets the next loss scale."""
        self.check.forget()
        self._step_was_skipped = was_skipped
        # Read before update_scale() sets the next one.
        used_scale = self.scaler.get_scale()
        for observer in self.observers:
            observer.stepped(report)
        try:
            self.scaler.update_scale(report, lambda: too_large(self.layout, self.model), self._last_words)
        finally:
            # Also for the step that ends the training, so that the log has its numbers.
            self._stats = self._stats.with_step(used_scale, self.scaler.get_scale(), report)

    def _last_words(self) -> str:
        return "\n".join(words for observer in self.observers if (words := observer.last_words()))

    def detach(self) -> None:
        """Leave the model as an ordinary FP32 model and its optimizers as they were: no hook, wrapper or copy stays."""
        # In reverse: each forward restores the one that it replaced.
        for forward in filter(None, [reference() for reference in reversed(self._forwards)]):
            forward.remove()
        self._forget_borders()
        self.scaler.finish_pending_step()
        for guard in self._guards:
            guard.remove(self)
        self._forwards, self._guards = [], []
        model, self._model = self.model, None
        self.layout.restore(model)
        if model is not None:
            remove_replacements(model)
        for observer in self.observers:
            observer.detached()
        if self._patches is not None:
            self._patches()

    def copy_for(self, memo: dict[int, Any]) -> MixedPrecision:
        """The runtime of a deep copy of the model: same policy and scale, own working copies, no optimizer."""
        if id(self) not in memo:
            copied = MixedPrecision(self.policy, loss_scaler=self.scaler.copy(), tables=self._tables, rules=self.rules)
            memo[id(self)] = copied
            if (model := self.model) is not None and id(model) in memo:
                # Nothing is attached before its first forward: only then are the modules there that rules name.
                copied._model = weakref.ref(memo[id(model)])
        return memo[id(self)]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides model and optimizer, as plain values for JSON."""
        state = {"version": STATE_VERSION, "precision": str(self.policy), "loss_scaler": self.scaler.state_dict()}
        # A scaler may leave out of its own count what no scale would have prevented.
        others = {"remedies": self.remedies, "other_skips": self.stats.skipped_steps - self.scaler.state.skipped_steps}
        return {**state, **{name: value for name, value in others.items() if value}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, but for the scale of another kind of loss scaling.

        A warning says what changes where it was saved in another precision.

        Raises TypeError or ValueError for anything else.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"a mixed precision state is a mapping, not a {type(state_dict).__name__}")
        if state_dict.get("version") != STATE_VERSION or "loss_scaler" not in state_dict:
            raise ValueError(
                f"not a mixed precision state of version {STATE_VERSION}: version={state_dict.get('version')!r}, "
                f"keys {sorted(state_dict, key=str)}"
            )
        saved = PrecisionPolicy.parse(str(state_dict.get("precision", self.policy)))
        if saved != self.policy:
            warn_caller(self.policy.explain_change(saved))
        # Another rule would read the numbers of this one as its own.
        if saved.loss_scale == self.policy.loss_scale:
            self.scaler.load_state_dict(state_dict["loss_scaler"])
        stats = PrecisionStats.resumed(self.scaler.state)
        self.stats = replace(stats, skipped_steps=stats.skipped_steps + state_dict.get("other_skips", 0))
        self.add_rules(state_dict.get("remedies", {}))


def prepare(
    model: nn.Module, optimizer: Optimizer, precision: PrecisionPolicy | torch.dtype | str = "fp16", **settings: Any
) -> tuple[nn.Module, Optimizer]:
    """Mixed precision for a plain loop: attach a policy to a model and its optimizer.

    The loop stays as for FP32; ``optimizer.step_was_skipped`` tells an LR scheduler; :func:`hf_mp.detach` ends it.

    Args:
        model, optimizer: any ``nn.Module``, one loaded in FP16/BF16 is given FP32 masters; one over its parameters.
        precision, settings: as for :class:`MixedPrecision`; ``"fp32"`` changes nothing.

    Returns the same model, and the optimizer to use from now on: :meth:`MixedPrecision.attach_optimizer`'s.
    Raises TypeError for anything but a module and an optimizer, and as ``attach`` and ``attach_optimizer`` do."""
    runtime = MixedPrecision(precision, **settings)  # first: a misspelt precision is told whatever else is wrong
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"prepare takes a model and its optimizer, not {type(model).__name__} and {type(optimizer).__name__}; "
            "without an optimizer, or with several: MixedPrecision(...).attach(model), then "
            "attach_optimizer(optimizer) for each"
        )
    try:
        return runtime.attach(model), runtime.attach_optimizer(optimizer)
    except BaseException:
        runtime.detach()
        raise
