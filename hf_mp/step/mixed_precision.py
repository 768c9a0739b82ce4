"""``MixedPrecision``: attaches a precision policy to a model and its optimizers, and detaches it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from hf_mp._warnings import warn_caller
from hf_mp.casting.rules import Rules
from hf_mp.casting.tables import TableName
from hf_mp.models import install_replacements, remove_replacements
from hf_mp.policy import PrecisionPolicy
from hf_mp.ranks.parallelism import detect_parallelism
from hf_mp.scaling.rules import PrecisionStats
from hf_mp.scaling.scalers import LossScaler, make_loss_scaler
from hf_mp.step.forward import AttachedForward, entry_points, methods_of
from hf_mp.step.observers import (
    FREE_GRADIENTS,
    ON_OVERFLOW,
    FreeGradients,
    StepController,
    check_options,
    controller_for,
)
from hf_mp.step.runtime import StepRuntime
from hf_mp.step.unattached import STEP_HOOK
from hf_mp.step.update import AttachedOptimizer, guard_steps
from hf_mp.weights.attach_checks import RUNTIMES, check_attachable
from hf_mp.weights.weight_store import WeightLayout

STATE_VERSION = 1  # of state_dict()


class MixedPrecision(StepRuntime):
    """Mixed precision for one model and its optimizers: autocast, FP32 masters, loss scaling (arXiv 1710.03740).

    After ``backward()``, ``.grad`` is FP32 and unscaled. :mod:`hf_mp.step` describes a step.

    Args:
        policy: a :class:`PrecisionPolicy`, or an argument of :meth:`PrecisionPolicy.parse`; default ``"fp16"``.
        loss_scaler: replaces the scaler of the policy.
        tables, rules: as for :class:`hf_mp.autocast`; default ``"compact"`` and none.
        free_gradients: when the lean layouts free a gradient: ``"step"`` (default), or ``"backward"``, which updates
            parameters inside ``backward()`` (:mod:`hf_mp.step.optimizer_in_backward`).
        max_grad_norm: clip gradients to this global 2-norm inside ``optimizer.step()``; ``inf`` only measures the norm;
            default None: neither. Writes to gradients through ``.data`` or NumPy after the backward are then not
            detected. With ``free_gradients="backward"``, clipping (like a loss scale) runs the backward twice.
        layout: a weight layout; default: that of the policy.
        on_overflow: ``"skip"`` (default) or ``"heal"`` (:func:`hf_mp.heal_overflows`).
        offload: in a lean layout, store in host memory: ``"optimizer"``: optimizer state and remainders; ``"all"``:
            gradients too. Updates have the same bits. Default None: nothing.
        switches: ``fp32_head=True``, ``exact_generation=True``, as in :class:`PrecisionPolicy`.

    Attributes:
        stats: the :class:`PrecisionStats` of the run.
        step_was_skipped: whether the last step was skipped.
        grad_norm: with ``max_grad_norm``, the norm of the last step's gradients before clipping: FP32 of shape () on
            the device.

    Raises:
        TypeError, ValueError: for an unknown policy, and for options that it does not support.
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
        offload: str | None = None,
        **switches: bool,
    ) -> None:
        policy = PrecisionPolicy.parse(policy, **switches)
        check_options(policy, free_gradients, on_overflow, max_grad_norm, offload)
        if loss_scaler is not None and not policy.is_mixed:
            warn_caller(f"loss_scaler has no effect with precision={str(policy)!r}, where nothing is attached")
        super().__init__(
            policy,
            loss_scaler or make_loss_scaler(policy.loss_scale, policy.compute),
            layout,
            tables=tables,
            rules=rules or {},
            max_grad_norm=max_grad_norm,
            offload=offload,
        )
        self.offload = offload
        self.remedies: dict[str, str] = {}
        self._methods: tuple[str, ...] = ()  # attached besides ``forward``
        self.made_by_trainer = False  # if so, its next session may attach the model again
        self.updates_in_backward = free_gradients == "backward"
        self.set_controller(controller_for(FREE_GRADIENTS, free_gradients, self, max_grad_norm))
        self.set_controller(controller_for(ON_OVERFLOW, on_overflow, self))
        # For detach(model): another library may have replaced the attached forward.
        RUNTIMES.add(self)
        self.scaler.users.add(self)

    def attach(self, model: nn.Module, methods: Sequence[str] = ()) -> nn.Module:
        """Run ``model`` under this policy from now on; return the same model.

        Trainable FP16/BF16 parameters are cast to FP32 in place (the Parameter objects stay). In the lean layouts they
        become :class:`SplitParameter`, with FP32 values in ``state_dict()``. Frozen parameters are unchanged.

        Args:
            model: any ``nn.Module``. Mixed precision applies to its calls and those of Transformers models inside it;
                for a container (``ModuleList``, ``ModuleDict``, a class without ``forward``), to calls of its children.
            methods: names of other methods to run so, as in ``["get_image_features"]``, or ``["vision.features"]`` of a
                submodule. Default: none.

        Raises:
            ValueError: for a model that cannot be attached, with advice.
        """
        if not self.policy.is_mixed:
            return model
        if self.model is not None:
            raise ValueError("this MixedPrecision has a model already: detach() it, or make another one")
        parallelism = detect_parallelism(model)
        check_attachable(model, parallelism, self.policy, is_scaled=self.scaler.is_scaling)
        methods_of(model, methods)  # raises for a wrong name before anything changes
        self._methods = tuple(methods)
        try:
            self._bind_model(model)
            # Before adopt_sharding(), which selects the weights that FSDP sends in FP32.
            install_replacements(model, self._tables)
            self.adopt_sharding(list(model.parameters()), parallelism)
            self.weights.layout.prepare_weights(model)
            self.wrap_forwards()
        except BaseException:
            self.detach()
            raise
        return model

    def set_controller(self, controller: StepController | None) -> None:
        """Set the step controller, which also observes steps; None changes nothing."""
        if controller is not None:
            self.controller = controller
            self.observers.append(controller)

    def add_rules(self, rules: Mapping[str, str]) -> None:
        """Add rules by module, which are saved as ``remedies``; a ValueError for a name that matches no module."""
        model = self.model
        # Without a model, only store the rules: attach() applies them.
        self.autocast.add_rules({} if model is None else rules, model)
        self.weights.reset_uses(self.autocast.is_lower_precision, self.autocast.modules_with_rules())
        self.rules, self.remedies = {**self.rules, **rules}, {**self.remedies, **rules}
        self.stats = replace(self.stats, remedies=tuple(f"{name}: {rule}" for name, rule in self.remedies.items()))

    def wrap_forwards(self) -> None:
        """Set the attached forward on each entry point without it."""
        if (model := self.model) is None:
            return
        for module, name in [*((one, "forward") for one in entry_points(model)), *methods_of(model, self._methods)]:
            if not isinstance(module.__dict__.get(name), AttachedForward):
                vars(module)[name] = AttachedForward(self, module, name)  # Fabric's __setattr__ writes to its module

    def attach_optimizer(self, optimizer: Optimizer) -> AttachedOptimizer:
        """Guard ``optimizer.step()``: skip it when a gradient is inf or NaN, or 2**64 or larger.

        Returns:
            The optimizer to use from now on: the same one; in the lean layouts a :class:`MasterWeightOptimizer` of it.
            Its ``step_was_skipped`` is whether its last step was skipped, in any precision.

        Raises:
            TypeError: if ``optimizer`` is not one optimizer.
            ValueError: before attach(), for an optimizer of another model, a model without a trainable parameter, and
                LBFGS.
        """
        if not self.policy.is_mixed:
            if not hasattr(optimizer, "step_was_skipped"):
                optimizer.step_was_skipped = False  # type: ignore[attr-defined]
            return cast("AttachedOptimizer", optimizer)
        if self._model is None:
            raise ValueError("attach a model before its optimizer: MixedPrecision(...).attach(model)")
        return guard_steps(optimizer, self)

    def refresh(self) -> None:
        """Update the working copies after a write to weights that hf_mp cannot detect.

        Such writes are those through NumPy (``parameter.detach().numpy()[...] = value``), DLPack, a storage or C++
        code. Writes by torch functions, through ``parameter.data`` and by optimizers are detected.
        """
        self.weights.layout.refresh()

    def detach(self) -> None:
        """Restore an ordinary FP32 model and its optimizers, without hooks, wrappers and copies."""
        for reference in self.forwards:
            if (forward := reference()) is not None:
                forward.remove()
        self.scaler.finish_pending_step()
        for guard in self.guards:
            guard.remove(self)
        self.forwards, self.guards = [], []
        model, self._model = self.model, None
        self.weights.restore(model)
        if model is not None:
            remove_replacements(model)
        STEP_HOOK.discard(self)
        for observer in self.observers:
            observer.on_detach()
        if self._patches is not None:
            self._patches()

    def copy_for(self, memo: dict[int, Any]) -> MixedPrecision:
        """Return the runtime of a deep copy of the model: same policy and scale, no optimizer."""
        if id(self) in memo:
            return memo[id(self)]
        # Without the options of the optimizer step.
        settings: Any = {"tables": self._tables, "rules": self.rules, "offload": self.offload}
        copied = memo[id(self)] = MixedPrecision(self.policy, loss_scaler=self.scaler.copy(), **settings)
        copied._methods = self._methods
        if (model := self.model) is not None and id(model) in memo:
            # begin_forward() binds the model: rules need its modules, which are not all copied yet.
            copied._model = weakref.ref(memo[id(model)])
        return copied

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs besides model and optimizer, as values for JSON."""
        state = {"version": STATE_VERSION, "precision": str(self.policy), "loss_scaler": self.scaler.state_dict()}
        # Some rules do not count skips that no scale prevents.
        others = {"remedies": self.remedies, "other_skips": self.stats.skipped_steps - self.scaler.state.skipped_steps}
        return {**state, **{name: value for name, value in others.items() if value}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of :meth:`state_dict`; warn if it was saved in another precision.

        The loss scale of another rule is not loaded, because rules have different fields.

        Raises:
            TypeError, ValueError: if ``state_dict`` is not such a state.
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
        if saved.loss_scale == self.policy.loss_scale:
            self.scaler.load_state_dict(state_dict["loss_scaler"])
        stats = PrecisionStats.resumed(self.scaler.state)
        self.stats = replace(stats, skipped_steps=stats.skipped_steps + state_dict.get("other_skips", 0))
        self.add_rules(state_dict.get("remedies", {}))
