"""``StepRuntime``: state of one attached model, and the stages of its steps."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from hf_mp.casting.kv_cache import cache_patches
from hf_mp.casting.rules import Rules
from hf_mp.casting.tables import TableName
from hf_mp.casting.torch_patches import PATCHES, acquire
from hf_mp.integrations.masters_of_ddp import DDP_PATCHES
from hf_mp.integrations.value_clipping import VALUE_PATCHES
from hf_mp.model_index import optimizer_parameters
from hf_mp.policy import PrecisionPolicy
from hf_mp.ranks.agreement import RankGroup
from hf_mp.ranks.parallelism import (
    NOT_DISTRIBUTED,
    Parallelism,
    check_updates,
    detect_parallelism,
    mesh_groups,
)
from hf_mp.scaling.loss_scaler import Iteration, LossScaler
from hf_mp.scaling.rules import PrecisionStats, StepReport
from hf_mp.step.custom_backward import BACKWARD_PATCHES
from hf_mp.step.gradients import GradientCheck, OverflowStatus, names_of_overflowing
from hf_mp.step.observers import StepController, StepObserver
from hf_mp.step.scale_provider import LossScaleProvider
from hf_mp.step.unattached import STEP_HOOK
from hf_mp.weights.alias_patches import ALIAS_PATCHES
from hf_mp.weights.attach_checks import rules_for
from hf_mp.weights.attached_autocast import AttachedAutocast
from hf_mp.weights.forward_weights import ForwardWeights
from hf_mp.weights.weight_store import WeightLayout, WeightStore, make_layout


class StepRuntime:
    """State that forward, scale boundary, check and update of one attached model share.

    Attributes:
        weights: masters, working copies and aliases.
        observers: called in each step; ``controller``, one of them, may replace the report of a step.
        updates_in_backward: whether gradients are used during backward.
        is_joint_step: whether another optimizer has stepped since the last backward.
    """

    def __init__(
        self,
        policy: PrecisionPolicy,
        scaler: LossScaler[Any],
        layout: WeightLayout | None,
        *,
        tables: TableName,
        rules: Rules,
        max_grad_norm: float | None,
        offload: str | None = None,
    ) -> None:
        self.policy, self.scaler, self.rules, self._tables = policy, scaler, rules, tables
        self.scale_provider = LossScaleProvider(self)
        self.weights = WeightStore(layout or make_layout(policy, offload), self.scale_provider)
        self.ranks = RankGroup(lambda: f"precision={self.policy}, loss_scaler={self.scaler.state}")
        self.check = GradientCheck(
            self.on_backward_end,
            self.weights,
            self.ranks,
            self._parameters_to_check,
            measures_norm=max_grad_norm is not None,
        )
        self._max_grad_norm, self.grad_norm = max_grad_norm, None if max_grad_norm is None else torch.zeros(())
        self.updates_in_backward = False
        self.observers: list[StepObserver] = []
        self.controller: StepController | None = None
        # Set by attach() and attach_optimizer()
        self.forwards: list[weakref.ref[Any]] = []  # each AttachedForward
        self.guards: list[Any] = []  # the StepGuard of each attached optimizer
        self._model: weakref.ref[nn.Module] | None = None  # weak, because its forward references the runtime
        self._patches: weakref.finalize[..., nn.Module] | None = None  # removes the patches with the model
        self._set_autocast(None)
        # Number of forwards, and that number at the last step of each optimizer
        self._forwards_with_grad, self._forwards_at_step = 0, weakref.WeakKeyDictionary[Optimizer, int]()
        # Results of steps
        self._step_was_skipped = False
        self._stats = self._stats_before = PrecisionStats.before_first_step(scaler.get_scale())
        self._iteration: Iteration | None = None  # counted in `_stats`, but not in `_stats_before`
        self.is_joint_step = False
        self._reported: set[int] = set()  # ids of optimizers with an overflow that another one has reported

    @property
    def model(self) -> nn.Module | None:
        """The attached model, or None."""
        return None if self._model is None else self._model()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped. Synchronizes if ``found_inf`` was not read yet."""
        self.scaler.finish_pending_step()
        return self._step_was_skipped

    @property
    def stats(self) -> PrecisionStats:
        """Statistics of the run. May synchronize, as :attr:`step_was_skipped`."""
        self.scaler.finish_pending_step()
        return self._stats

    @stats.setter
    def stats(self, stats: PrecisionStats) -> None:
        self._stats = stats

    def _bind_model(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._set_autocast(model)
        self.check.is_scaled = self.scaler.is_scaling
        patches = PATCHES, VALUE_PATCHES, DDP_PATCHES, ALIAS_PATCHES, BACKWARD_PATCHES, *cache_patches()
        self._patches = weakref.finalize(model, acquire(*patches))
        STEP_HOOK.add(self)

    def _set_autocast(self, model: nn.Module | None) -> None:
        """Set an autocast for ``model``; the weight store finds the weights that its lower-precision ops read."""
        rules = rules_for(model, self.policy, self.rules)
        self.autocast = AttachedAutocast(self.policy.compute, model=model, rules=rules, tables=self._tables)
        if self.policy.exact_generation:
            self.autocast.sum_in_fp64()
        self.weights.reset_uses(self.autocast.is_lower_precision, self.autocast.modules_with_rules())

    # Forward

    def begin_forward(self, model: nn.Module, forward: Any) -> ForwardWeights | None:
        """Prepare the weights of ``model`` for ``forward``, of it or a part, and return them; None in functorch."""
        if self._patches is None:  # in a deep copy, which has all of its modules now
            self._bind_model(model)
        self._forwards_with_grad += torch.is_grad_enabled()
        parallelism = self._adopt_parallelism(model)
        # Unscale nodes have no rules for torch.func. torch has no public API to detect its transforms.
        if torch._C._are_functorch_transforms_active():
            return None
        if torch.is_grad_enabled():
            self.weights.check_single_thread()  # not in a recomputation, which runs in autograd's threads
        # DDP reduces a parameter as soon as its unscale node has run, so each needs its own.
        groups_weights = not self.updates_in_backward and parallelism.ddp is None
        holds_copies = self.autocast.is_compile_used()  # compiled code cannot read the weight cache
        return self.weights.prepare_forward(model, forward, self.check.is_scaled, groups_weights, holds_copies)

    def _adopt_parallelism(self, model: nn.Module) -> Parallelism:
        """Return the parallelism of ``model`` now, and adopt it."""
        parallelism = detect_parallelism(model)
        if parallelism is not NOT_DISTRIBUTED:
            self.ranks.register_ddp(model, parallelism)
            self.adopt_sharding(list(model.parameters()), parallelism)
        return parallelism

    def adopt_sharding(self, parameters: Sequence[Tensor], parallelism: Parallelism) -> None:
        """Change the layout to the sharding of ``parameters``, of the model or its optimizer."""
        if parallelism is not NOT_DISTRIBUTED:  # also for DDP and meshes of one process
            self.ranks.check_same_settings(mesh_groups(parameters))
            self.weights.adopt_sharding(self.model, parameters, parallelism, self.autocast.fp32_modules)

    def _parameters_to_check(self) -> list[nn.Parameter]:
        return self.weights.layout.parameters_to_check(self.model, [guard.optimizer for guard in self.guards])

    # Backward

    def begin_iteration(self) -> None:
        """Let the next step change the loss scale. Called when a backward begins."""
        self.scaler.end_iteration()
        if self._reported:  # without gradients, an optimizer has no overflow left to report
            attached = [guard.optimizer for guard in self.guards]
            self._reported &= {id(one) for one in attached if self.check.gradients(optimizer_parameters(one))}

    def on_backward_end(self, largest: Tensor | None) -> None:
        for observer in self.observers:
            observer.on_backward_end(largest)

    # Step

    def clip_and_check(self, optimizer: Optimizer) -> OverflowStatus | StepReport:
        """Clip the gradients of ``optimizer`` and check them for an overflow, before its update.

        Returns the controller's :class:`StepReport` if the gradients were used during backward.
        """
        self.scaler.finish_pending_step()
        report = None if self.controller is None else self.controller.report_from_backward()
        if report is not None:
            return report
        model, parameters = self.model, optimizer_parameters(optimizer)
        self._warn_without_forward(optimizer, parameters)
        parallelism = detect_parallelism(model)
        if model is not None and parallelism is not NOT_DISTRIBUTED:
            if parallelism.fsdp:
                check_updates(optimizer, model)
            self.adopt_sharding(parameters, parallelism)
        if self._max_grad_norm is not None:
            norm = self.clip_grad_norm(optimizer, parameters, self._max_grad_norm)
            if norm is None:  # the gradients were written, or are those of a part of the model
                norm = get_total_norm([one.grad for one in parameters if one.grad is not None])
                self.check.defer_clipping(parameters, self._max_grad_norm, norm)
            self.grad_norm = norm
        return self.check.overflow_status(parameters)

    def _warn_without_forward(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        before, now = self._forwards_at_step.get(optimizer, 0), self._forwards_with_grad
        self._forwards_at_step[optimizer] = now
        if now <= before and self.check.gradients(parameters):
            self.check.warn_once(
                "there are gradients, but since the last optimizer.step() the attached model was not called: what its "
                "loop calls instead (a method, a part of the model) computes in FP32. Name such methods when you "
                "attach: hf_mp.prepare(model, optimizer, precision, methods=['get_value']), or attach(model, "
                "methods=[...])"
            )

    def clip_grad_norm(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], max_norm: float
    ) -> Tensor | None:
        """Clip the gradients of ``parameters`` to the 2-norm ``max_norm`` in the next step; ``inf`` only measures.

        Returns the norm before clipping, FP32 of shape (). If it was not measured or gradients have changed since,
        clips nothing and returns None: torch's own function must clip.
        """
        # A lean layout, with gradients that torch cannot clip, clips all those of the optimizer.
        norm = self.weights.layout.clip_grad_norm(optimizer_parameters(optimizer), max_norm)
        if norm is None:
            norm = self.check.norm(parameters)
            if norm is not None:
                self.check.defer_clipping(parameters, max_norm, norm)
        return norm

    def freeze_scale_factors(self) -> None:
        """Copy the factors of gradients that are stored scaled. Called before S changes."""
        self.weights.layout.freeze_scale_factors(self.check.parameters)

    def report_step(self, optimizer: Optimizer, report: StepReport, *, was_skipped: bool) -> None:
        """Report a step of ``optimizer`` to observers and scaler, which sets S.

        The steps of several optimizers between two backwards are one iteration. Each resets S and the statistics to
        those before the iteration, and applies all its reports again. So they change S once, and count as one step.
        """
        if report.overflow:
            report = self._attribute_overflow(optimizer, report)
        self.check.reset_step()
        self._step_was_skipped = was_skipped
        key = id(self), id(optimizer)  # several models may have one scaler
        iteration = self._join_iteration(key)
        used_scale = self.scaler.get_scale()
        for observer in self.observers:
            observer.on_step_finished(report)
        try:  # update_scale() joins the same iteration, and adds `report` to `iteration.reports`
            names = partial(names_of_overflowing, self.weights, self.model)
            self.scaler.update_scale(report, names, self._overflow_advice, optimizer=key)
        finally:  # so that the log has a step that raises
            together = StepReport.of_all(iteration.reports.values())
            self._stats = self._stats.with_step(used_scale, self.scaler.get_scale(), together)

    def _join_iteration(self, key: tuple[int, int]) -> Iteration:
        """Join or begin an iteration; set S and the statistics to their values before its steps."""
        iteration = self.scaler.join_iteration(key)
        self.is_joint_step = iteration is self._iteration
        if self.is_joint_step:
            self._stats = replace(self._stats_before, remedies=self._stats.remedies)
        self._iteration, self._stats_before = iteration, self._stats
        return iteration

    def _attribute_overflow(self, optimizer: Optimizer, report: StepReport) -> StepReport:
        """Return ``report``, with ``may_be_scale=False`` if another optimizer has reported the same overflow.

        One overflow lowers S once. Optimizers that accumulate over different numbers of backwards report it in
        different iterations. So the first report records which other optimizers have overflowing gradients.
        """
        was_reported = id(optimizer) in self._reported
        self._reported.discard(id(optimizer))
        if was_reported:
            return replace(report, may_be_scale=False)
        others = [guard.optimizer for guard in self.guards if guard.optimizer is not optimizer]
        self._reported |= {id(one) for one in others if self.check.overflows(optimizer_parameters(one))}
        return report

    def _overflow_advice(self) -> str:
        return "\n".join(advice for observer in self.observers if (advice := observer.overflow_advice()))

    def copy_for(self, memo: dict[int, Any]) -> StepRuntime:
        raise NotImplementedError
