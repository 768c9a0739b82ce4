"""Replays one micro-batch of a failed step under instruments."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm

from hf_mp.casting.experts import entries_in, expert_counts
from hf_mp.casting.nested import apply_to_tensors, named_tensors
from hf_mp.diagnostics.kept_state import KeptBackward, KeptCall, Outputs, eagerly, untouched
from hf_mp.diagnostics.looks import Look, differentiate, entered, look
from hf_mp.diagnostics.origins import CallSites, Origin, OriginTracker, note_of_others
from hf_mp.diagnostics.overflow_report import OverflowReport
from hf_mp.diagnostics.ranges import STAND_IN
from hf_mp.diagnostics.remedies import rules_to_try, scale_range
from hf_mp.diagnostics.values import Finiteness, finiteness, ranges_of, spoilt
from hf_mp.kernels.gradient_scan import SQUARES_BELOW
from hf_mp.policy import needs_loss_scale
from hf_mp.scaling.borders import output_border
from hf_mp.scaling.rules import FP16_MAX, SMALLEST_SCALE
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.weights.lean.split_parameter import raw_gradient
from hf_mp.weights.ranks.placement import is_dtensor, is_running, is_sharded


class CannotReplay(RuntimeError):
    """The micro-batch cannot be replayed without disturbing the training."""


class _Entering(NamedTuple):
    """A gradient that enters the model in a backward, and the output that it comes in through."""

    output: Tensor
    gradient: Tensor


class Replay:
    """A forward and backward of one micro-batch without side effects; what it finds completes ``report``."""

    def __init__(self, runtime: MixedPrecision, backward: KeptBackward, report: OverflowReport) -> None:
        self._runtime = runtime
        self._model = model = cast(nn.Module, runtime.model)
        # A replay happens where a step failed, which the other processes do not know of.
        if is_running() and any(isinstance(module, SyncBatchNorm) for module in model.modules()):
            raise CannotReplay("SyncBatchNorm communicates with the other processes, which do not replay")
        if is_sharded(model) or any(map(is_dtensor, model.parameters())):
            raise CannotReplay("its weights are sharded, and gathering them needs the other processes")
        self._backward, self._report = backward, report
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._experts = expert_counts(model)
        # The borders of the replay ask for these, so that other scales are tried without the run's scaler.
        self._scales: dict[torch.device, Tensor] = {}
        self._origin: Origin | None = None
        self._notes: list[str] = []

    def run(self) -> OverflowReport:
        """Find the origin of what is not finite, and what helps."""
        with untouched(self._model), torch.enable_grad(), eagerly():
            self._find_origin()  # its graph, as large as that of the training step, is gone when it returns
            if self._origin is not None and self._origin.phase != "weight":
                self._note_spoiled_buffers()
            if self._origin is not None and self._origin.phase in ("forward", "backward"):
                self._try_others()
        return replace(self._report, notes=(*(self._origin.notes if self._origin else ()), *self._notes))

    def _find_origin(self) -> None:
        calls = self._backward.calls
        entry = calls[0].forward.module()
        sites = CallSites(self._model, self._model if entry is None else entry)
        tracker = OriginTracker(sites)
        self._blame_what_is_there(tracker)
        with sites.watching(self._runtime.region), tracker:
            outputs = self._backward.again(self._call)
        leaving = self._backward.through(outputs)
        for output in leaving:
            self._take(tracker.of(output))
        entering = self._entering(leaving, tracker)
        if not self._is_as_it_was(outputs) and self._backward.is_spoilt():
            entering = []  # what came in belongs to another forward
        names: tuple[str, ...] = ()
        if self._origin is None and entering:
            # FP32 does not hold the square of such a gradient, and the step is skipped for it as for inf.
            tracker.limit_gradients(SQUARES_BELOW, self._runtime.scaler.get_scale())
            with sites.watching(self._runtime.region), tracker:
                names = self._backward_through(entering, tracker)
        # The origin is known; this is for the names of the gradients that it spoilt.
        elif entering and self._backward.is_kept():
            names = self._backward_through(entering)
        self._report_origin(names)
        self._try_smaller_scales(entering)

    def _report_origin(self, nonfinite_gradients: tuple[str, ...]) -> None:
        self._report = replace(self._report, nonfinite_gradients=nonfinite_gradients)
        if (origin := self._origin) is not None:
            found = {name: getattr(origin, name) for name in ("phase", "module", "op", "tensor", "inputs", "outputs")}
            self._report = replace(self._report, **found, smaller_scale_helps=False)

    def _entering(self, outputs: list[Tensor], tracker: OriginTracker) -> list[_Entering]:
        """The gradients that were kept, each with its output of the replay; spoilt ones are blamed on the loss."""
        entering = []
        for incoming, output in zip(self._backward.incoming, outputs, strict=True):
            gradient, name = incoming.gradient, incoming.output
            if gradient is None:
                if self._origin is None:
                    self._notes.append(
                        f"the gradient that came into the output {name!r} was too large to keep, so this "
                        "backward could not be replayed; from now on it is kept, for the next failure"
                    )
                continue
            if incoming.is_changed():
                self._notes.append(f"the gradient of the output {name!r} was modified in place since")
            # Of an output that is not finite, the gradient says nothing: the origin is behind it.
            if finiteness(gradient, SQUARES_BELOW) and not finiteness(output):
                ranges = ranges_of([(f"{name}, the output", output)]), ranges_of([("its gradient", gradient)])
                tracker.blame(gradient, Origin("loss outside of the model", 0, "", "", name, *ranges))
            entering.append(_Entering(output, gradient))
        return entering

    def _take(self, origin: Origin | None) -> None:
        if origin is not None and (self._origin is None or origin.order < self._origin.order):
            self._origin = origin

    def _call(self, call: KeptCall, args: Any, kwargs: Any) -> Any:
        """A call in the region of the run, with borders of its own."""
        region = self._runtime.region
        args, kwargs = apply_to_tensors(entered, (args, kwargs))
        with region.running(self._runtime.weights_for(self._model, self)):
            outputs = region.ruled(call.forward.module(), call.forward.original)(*args, **kwargs)
        return {name: output_border(found, self) for name, found in named_tensors(outputs)}

    # What the borders ask (hf_mp.scaling.borders.Crossings)

    def scale(self, device: torch.device) -> Tensor | None:
        """The scale of the replay, which may differ from the run's."""
        scale = self._runtime.scale(device)
        return None if scale is None else self._scales.setdefault(device, scale.clone())

    def inverse(self, device: torch.device, node: Any, places: Sequence[int]) -> Tensor | None:
        return None if (scale := self.scale(device)) is None else scale.reciprocal()

    def gradient_entered(self, node: Any, gradient: Tensor) -> None:
        """Ignored."""

    def take(self, node: Any, uses: dict[int, list[Tensor]], inverse: Tensor | None) -> None:
        """Nothing."""

    def _blame_what_is_there(self, tracker: OriginTracker) -> None:
        """Tell the tracker what was not finite before the forward."""
        for name, tensor in self._backward.inputs():
            if finiteness(tensor) is Finiteness.NOT_FINITE:
                tracker.blame(tensor, Origin("input", 0, tensor=name, inputs=ranges_of([(name, tensor)])))
        for name, tensor in [*self._model.named_parameters(), *self._model.named_buffers()]:
            # A buffer may be a mask, which holds -inf on purpose; a parameter may not.
            least = Finiteness.MINUS_INF if isinstance(tensor, nn.Parameter) else Finiteness.NOT_FINITE
            rounded = self._rounded(tensor)
            if finiteness(rounded) >= least:
                parts = self._spoilt_parts(name, rounded)
                first, place = next(iter(parts.items()))
                found = [(first, tensor), *([] if rounded is tensor else [(f"{first}, its working copy", rounded)])]
                ranges = ranges_of([(name, one.detach()[place]) for name, one in found])
                notes = note_of_others([*parts])
                origin = Origin("weight", 0, name.rpartition(".")[0], tensor=first, inputs=ranges, notes=notes)
                tracker.blame(rounded, origin)
                if finiteness(tensor):
                    tracker.blame(tensor, origin)
                else:
                    origin.notes += (f"its FP32 value is finite, but FP16 ends at {FP16_MAX:g}",)

    def _spoilt_parts(self, name: str, tensor: Tensor, limit: float = math.inf) -> dict[str, Any]:
        """What of a parameter is not finite, by name: of stacked experts each such one by its index, else all of it."""
        if name not in self._experts:
            return {name: ...}
        return {f"{name}[{expert}]": expert for expert in entries_in(spoilt(tensor, limit))}

    def _rounded(self, tensor: Tensor) -> Tensor:
        """What the forward reads for a parameter: its working copy, if there is one."""
        copies = self._runtime.layout.copies
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad and tensor.dtype is torch.float32:
            return copies.get(tensor) if tensor in copies else tensor
        return tensor

    def _note_spoiled_buffers(self) -> None:
        spoiled = [name for name, buffer in self._model.named_buffers() if finiteness(buffer) is Finiteness.NOT_FINITE]
        if spoiled:
            self._notes.append(f"the forward has left inf or NaN in {', '.join(spoiled[:5])}, which no skip takes back")

    def _is_as_it_was(self, outputs: Outputs) -> bool:
        """Whether losses are finite where they were; notes what speaks against it."""
        if any(call.versions != call.versions_now() for call in self._backward.calls):
            self._notes.append("the batch was modified in place since the forward: the replay may differ")
        known = [(call, name, loss) for call in self._backward.calls for name, loss in call.losses.items()]
        for call, name, loss in known:
            again = outputs[id(call), name]
            if bool(finiteness(loss)) != bool(finiteness(again)):
                self._notes.append(
                    f"the output {name!r} was {loss.item():g} and came to {again.item():g} in the replay: the "
                    "forward depends on something besides its inputs, weights and random generators"
                )
                return False
        return True

    def _backward_through(self, entering: list[_Entering], tracker: OriginTracker | None = None) -> tuple[str, ...]:
        """The names of gradients that a backward spoils, which accumulates nowhere; ``tracker`` tells their origin."""
        found_in: dict[str, list[str]] = {}  # by name of the parameter, what of its gradient is not finite

        def look_at(name: str, gradient: Tensor | None) -> Tensor | None:
            if gradient is None:  # a split parameter has taken it already
                return None
            if finiteness(gradient, SQUARES_BELOW):
                found_in[name] = [*self._spoilt_parts(name, gradient, SQUARES_BELOW)]
                self._take(None if tracker is None else tracker.of(gradient))
            return gradient.new_zeros(()).expand(gradient.shape)  # unused: its memory can be freed

        # Hooks, and not the result: the gradients of all weights would be as large as the model.
        outputs, gradients = map(list, zip(*entering, strict=True))
        handles = [Tensor.register_hook(p, functools.partial(look_at, name)) for name, p in self._parameters.items()]
        if tracker is not None:
            handles.append(outputs[0].register_hook(tracker.note_task))
        try:
            found = differentiate(outputs, gradients, [*self._parameters.values()], raw_gradient)
            if found.by_backward:  # split parameters take a scaled gradient past their hooks
                for name, gradient in zip(self._parameters, found.gradients, strict=True):
                    look_at(name, gradient)
        finally:
            for handle in handles:
                handle.remove()
        return tuple(itertools.chain.from_iterable(found_in.get(name, ()) for name in self._parameters))

    def _try_smaller_scales(self, entering: list[_Entering]) -> None:
        if self._report.phase != "backward" or self._report.is_too_large:  # which it is at any scale
            return
        used = self._runtime.scaler.get_scale()

        def is_finite_at(exponent: int) -> bool:
            for tensor in self._scales.values():
                tensor.fill_(2.0**exponent)
            return not self._backward_through(entering)

        # At the smallest scales of all, every gradient is zero: whether it helps depends on what is left of them.
        exponents = range(math.ceil(math.log2(SMALLEST_SCALE)), math.ceil(math.log2(used)))
        finite = bisect.bisect_left(exponents, True, key=lambda exponent: not is_finite_at(exponent))
        if not finite:
            return
        largest, needed = 2.0 ** exponents[finite - 1], None
        if self._backward.is_kept():
            needed = scale_range(look(self._runtime, self._backward, with_gradients=True).ranges, used).needs
        helps = largest >= (needed or 0.0)
        self._report = replace(
            self._report, smaller_scale_helps=helps, largest_finite_scale=largest, needed_scale=needed
        )

    def _try_others(self) -> None:
        """Run the same micro-batch in FP32, in BF16, and by rules: where is it finite?"""
        backward, runtime, report = self._backward, self._runtime, self._report
        # Without them a backward cannot be judged, and a forward alone might be finite by chance.
        if not backward.is_kept():
            return
        # A loss outside the model was computed from the failing outputs: its gradient says nothing about these.
        with_gradients = not backward.is_spoilt()

        def again(dtype: torch.dtype, rules: dict[str, str] | None = None, scale: float = 1.0) -> Look:
            return look(runtime, backward, dtype=dtype, rules=rules, scale=scale, with_gradients=with_gradients)

        try:
            self._report = report = replace(report, finite_in_fp32=again(torch.float32).is_finite)
            if not report.finite_in_fp32:
                return
            seen = again(STAND_IN)
            # A run in BF16 has tried it already.
            if needs_loss_scale(runtime.policy.compute):
                self._report = report = replace(report, finite_in_bf16=seen.is_finite)
            if not report.smaller_scale_helps:
                # Where the forward is at fault, the loss scale goes to where its backward fits.
                scale = runtime.scaler.get_scale() if report.phase == "backward" else 0.0
                rules = rules_to_try(report.module, seen.ranges, runtime, scale)
                helping = (one for one in rules if again(runtime.policy.compute, one, scale or 1.0).is_finite)
                self._report = replace(report, rules=next(helping, {}) if rules else None)
        except Exception as error:  # the model may do anything in another dtype, and the rest of the report stands
            self._notes.append(f"not tried in another precision: {type(error).__name__}: {error}")
