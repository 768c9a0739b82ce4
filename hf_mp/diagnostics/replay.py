"""Replays one micro-batch of a failed step under instruments."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm

from hf_mp.casting.experts import entries_in, expert_counts
from hf_mp.casting.nested import apply_to_tensors, named_tensors
from hf_mp.diagnostics.kept_state import KeptBackward, KeptCall, eagerly, masters_in_place, untouched
from hf_mp.diagnostics.looks import differentiate, entered
from hf_mp.diagnostics.looks import look as look_at
from hf_mp.diagnostics.origins import CallSites, Origin, OriginTracker, note_of_others
from hf_mp.diagnostics.overflow_report import OverflowReport
from hf_mp.diagnostics.remedies import rules_in_fp32, scale_range
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


_Outputs = dict[tuple[int, str], Tensor]  # by the identity of the call, and by name


class _Entering(NamedTuple):
    """A gradient that enters the model in a backward, and the output that it comes in through."""

    output: Tensor
    gradient: Tensor


@dataclass
class Findings:
    """What a replay has found; the fields are those of :class:`OverflowReport`."""

    origin: Origin | None = None
    nonfinite_gradients: tuple[str, ...] = ()
    smaller_scale_helps: bool | None = None
    largest_finite_scale: float | None = None
    needed_scale: float | None = None
    finite_in_fp32: bool | None = None
    finite_in_bf16: bool | None = None
    rules: dict[str, str] | None = None
    notes: list[str] = field(default_factory=list)

    def completing(self, place: OverflowReport) -> OverflowReport:
        """``place``, the report on where the step failed, with what was found."""
        found = {name: value for name, value in vars(self).items() if name not in ("origin", "notes")}
        if self.origin is None:
            return replace(place, **found, notes=tuple(self.notes))
        found.update({name: value for name, value in vars(self.origin).items() if name not in ("order", "is_mask")})
        notes = (*self.origin.notes, *self.notes)
        return replace(place, **{**found, "smaller_scale_helps": bool(self.smaller_scale_helps), "notes": notes})


class Replay:
    """A forward and backward of one micro-batch without side effects."""

    def __init__(self, runtime: MixedPrecision, backward: KeptBackward) -> None:
        self._runtime = runtime
        self._model = model = cast(nn.Module, runtime.model)
        if is_running() and any(isinstance(module, SyncBatchNorm) for module in model.modules()):
            raise CannotReplay("SyncBatchNorm communicates with the other processes, which do not replay")
        if is_sharded(model) or any(map(is_dtensor, model.parameters())):
            raise CannotReplay("its weights are sharded, and gathering them needs the other processes")
        self._backward, self._calls = backward, backward.calls
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._experts = expert_counts(model)
        self._scales: dict[torch.device, Tensor] = {}
        self._limit = math.inf  # a gradient of a parameter that is as large counts as inf
        self.found = Findings()

    def run(self) -> Findings:
        """Find the origin of what is not finite, and what helps."""
        found = self.found
        with untouched(self._model), torch.enable_grad(), eagerly():
            self._find_origin()  # its graph, as large as that of the training step, is gone when it returns
            self._note_spoiled_buffers()
            if found.origin is not None and found.origin.phase in ("forward", "backward"):
                self._try_fp32()
                if found.finite_in_fp32 and not found.smaller_scale_helps:
                    self._try_rules()
        return found

    def _find_origin(self) -> None:
        if any(call.versions != call.versions_now() for call in self._calls):
            self.found.notes.append("the batch was modified in place since the forward: the replay may differ")
        entry = self._calls[0].forward.module()
        sites = CallSites(self._model, self._model if entry is None else entry)
        tracker = OriginTracker(sites)
        self._blame_what_is_there(tracker)
        with sites.watching(self._runtime.region), tracker:
            outputs = self._forward()
        is_same = all(self._is_same_loss(call, name, outputs) for call in self._calls for name in call.losses)
        entering = self._entering(outputs, tracker, is_same=is_same)
        if not is_same and any(finiteness(gradient) for _, gradient in entering):
            entering = []  # what came in belongs to another forward
        if self.found.origin is None and entering:
            with sites.watching(self._runtime.region), tracker:
                self._backward_through(entering, tracker)
            if self.found.origin is None and not self.found.nonfinite_gradients:
                self._find_too_large(sites, entering)
            self._try_smaller_scales(entering)
        elif len(entering) == len(self._backward.incoming):
            self._backward_through(entering, None)

    def _entering(self, outputs: _Outputs, tracker: OriginTracker, *, is_same: bool) -> list[_Entering]:
        """The gradients that were kept, each with its output of the replay; the outputs may tell the origin."""
        found, entering = self.found, []
        for incoming in self._backward.incoming:
            output = outputs[id(incoming.call), incoming.output]
            self._take(tracker.of(output))
            if incoming.gradient is not None:
                if incoming.gradient._version != incoming.version:
                    found.notes.append(f"the gradient of the output {incoming.output!r} was modified in place since")
                if is_same and found.origin is None:
                    self._check_incoming(incoming.output, output, incoming.gradient)
                entering.append(_Entering(output, incoming.gradient))
            elif found.origin is None:
                found.notes.append(
                    f"the gradient that came into the output {incoming.output!r} was too large to keep, so this "
                    "backward could not be replayed; from now on it is kept, for the next failure"
                )
        return entering

    def _take(self, origin: Origin | None) -> None:
        if origin is not None and (self.found.origin is None or origin.order < self.found.origin.order):
            self.found.origin = origin

    def _forward(self, *, autocast: bool = True) -> _Outputs:
        """The outputs of all calls, made again."""
        return {
            (id(call), name): output for call in self._calls for name, output in self._call(call, autocast=autocast)
        }

    def _call(self, call: KeptCall, *, autocast: bool) -> list[tuple[str, Tensor]]:
        module = call.forward.module()
        if module.training != call.is_training:
            module.train(call.is_training)
        call.random_states.restore()
        args, kwargs = apply_to_tensors(entered, (call.args, call.kwargs))
        region = self._runtime.region
        weights = self._runtime.weights_for(self._model, self, in_fp32=not autocast)
        with region.running(weights), nullcontext() if autocast else region.island():
            forward = call.forward.original
            outputs = (region.ruled(module, forward) if autocast else forward)(*args, **kwargs)
        return [(name, output_border(found, self)) for name, found in named_tensors(outputs)]

    # What the borders ask (hf_mp.scaling.borders.Crossings)

    def scale(self, device: torch.device) -> Tensor | None:
        """The scale of the replay, which may differ from the run's."""
        scale = self._runtime.scale(device)
        return None if scale is None else self._scales.setdefault(device, scale.clone())

    def inverse(self, device: torch.device, node: Any, places: Sequence[int]) -> Tensor | None:
        """None: finiteness does not depend on it."""
        return None

    def gradient_entered(self, node: Any, gradient: Tensor) -> None:
        """Ignored."""

    def take(self, node: Any, uses: dict[int, list[Tensor]], inverse: Tensor | None) -> None:
        """Nothing."""

    def _blame_what_is_there(self, tracker: OriginTracker) -> None:
        """Tell the tracker what was not finite before the forward."""
        for call in self._calls:
            for name, tensor in call.inputs():
                if finiteness(tensor) is Finiteness.NOT_FINITE:
                    tracker.blame(tensor, Origin("input", 0, tensor=name, inputs=ranges_of([(name, tensor)])))
        for name, tensor in [*self._model.named_parameters(), *self._model.named_buffers()]:
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
        if self.found.origin is None or self.found.origin.phase == "weight":
            return
        spoiled = [name for name, buffer in self._model.named_buffers() if finiteness(buffer) is Finiteness.NOT_FINITE]
        if spoiled:
            self.found.notes.append(
                f"the forward has left inf or NaN in {', '.join(spoiled[:5])}, which no skip takes back"
            )

    def _is_same_loss(self, call: KeptCall, name: str, outputs: _Outputs) -> bool:
        output = outputs[id(call), name]
        if bool(finiteness(call.losses[name])) == bool(finiteness(output)):
            return True
        self.found.notes.append(
            f"the output {name!r} was {call.losses[name].item():g} and came to {output.item():g} in the replay: the "
            "forward depends on something besides its inputs, weights and torch's random generators"
        )
        return False

    def _check_incoming(self, name: str, output: Tensor, gradient: Tensor) -> None:
        if finiteness(gradient, self._limit) and not finiteness(output):
            ranges = ranges_of([(f"{name}, the output", output)]), ranges_of([("its gradient", gradient)])
            self.found.origin = Origin("loss outside of the model", 0, "", "", name, *ranges)

    def _backward_through(self, entering: list[_Entering], tracker: OriginTracker | None) -> None:
        """A backward that accumulates nowhere; with ``tracker``, it takes the origins of non-finite gradients."""
        found_in: dict[str, list[str]] = {}  # by name of the parameter, what of its gradient is not finite

        def look(parameter: nn.Parameter, gradient: Tensor | None) -> Tensor | None:
            if gradient is None:  # a split parameter has taken it already
                return None
            if finiteness(gradient, self._limit):
                name = self._names[id(parameter)]
                found_in[name] = [*self._spoilt_parts(name, gradient, self._limit)]
                self._take(None if tracker is None else tracker.of(gradient))
            return gradient.new_zeros(()).expand(gradient.shape)  # unused: its memory can be freed

        def note_task(gradient: Tensor) -> None:
            if tracker is not None:
                tracker.backward_task = torch._C._current_graph_task_id()

        outputs, gradients = map(list, zip(*entering, strict=True))
        handles = [outputs[0].register_hook(note_task)]
        handles += [Tensor.register_hook(p, functools.partial(look, p)) for p in self._parameters]
        try:
            found = differentiate(outputs, gradients, self._parameters, raw_gradient)
            if found.by_backward:  # split parameters take a scaled gradient past their hooks
                for parameter, gradient in zip(self._parameters, found.gradients, strict=True):
                    look(parameter, gradient)
        finally:
            for handle in handles:
                handle.remove()
        names = dict.fromkeys(self._names.values())
        self.found.nonfinite_gradients = tuple(part for name in names for part in found_in.get(name, ()))

    def _find_too_large(self, sites: CallSites, entering: list[_Entering]) -> None:
        """Find the origin of a gradient that is finite but too large to be squared."""
        self._limit = SQUARES_BELOW
        inside = SQUARES_BELOW * self._runtime.scaler.get_scale()  # where gradients are scaled
        tracker = OriginTracker(sites, inside, carried_limit=min(inside, SQUARES_BELOW))
        with sites.watching(self._runtime.region), tracker:
            self._backward_through(entering, tracker)
        kept = [incoming for incoming in self._backward.incoming if incoming.gradient is not None]
        for incoming, one in zip(kept if self.found.nonfinite_gradients else (), entering, strict=False):
            self._check_incoming(incoming.output, *one)

    def _try_smaller_scales(self, entering: list[_Entering]) -> None:
        if self.found.origin is None or self.found.origin.phase != "backward":
            return
        if self._limit < math.inf:  # the true gradient is too large, at any scale
            self.found.smaller_scale_helps = False
            return
        used = self._runtime.scaler.get_scale()
        names = self.found.nonfinite_gradients

        def is_finite_at(scale: float) -> bool:
            for tensor in self._scales.values():
                tensor.fill_(scale)
            self._backward_through(entering, None)
            return not self.found.nonfinite_gradients

        # At the smallest scales of all, every gradient is zero: whether it helps depends on what is left of them.
        exponents = range(math.ceil(math.log2(SMALLEST_SCALE)), math.ceil(math.log2(used)))
        finite = bisect.bisect_left(exponents, True, key=lambda exponent: not is_finite_at(2.0**exponent))
        self.found.nonfinite_gradients, self.found.smaller_scale_helps = names, False
        if not finite:
            return
        self.found.largest_finite_scale = 2.0 ** exponents[finite - 1]
        if all(incoming.gradient is not None for incoming in self._backward.incoming):
            seen = look_at(self._runtime, self._backward, with_gradients=True)
            self.found.needed_scale = scale_range(seen.ranges, used).needs
        self.found.smaller_scale_helps = self.found.largest_finite_scale >= (self.found.needed_scale or 0.0)

    def _try_fp32(self) -> None:
        """Run the same micro-batch without autocast: does the model overflow in FP32, too?"""
        if any(entry.gradient is None for entry in self._backward.incoming):
            return
        names, parameters = self.found.nonfinite_gradients, self._parameters
        for tensor in self._scales.values():
            tensor.fill_(1.0)
        self._limit /= self._runtime.scaler.get_scale()  # by which parameters still unscale
        try:
            with masters_in_place(self._model) as masters:
                self._parameters = [masters.get(id(parameter), parameter) for parameter in parameters]
                self._names.update({id(master): self._names[key] for key, master in masters.items()})
                self._run_in_fp32()
        except Exception as error:  # a model with frozen 16-bit parts cannot run like that; the rest of the report can
            self.found.notes.append(f"not tried in FP32: {type(error).__name__}: {error}")
        finally:
            self.found.nonfinite_gradients, self._parameters = names, parameters

    def _run_in_fp32(self) -> None:
        self.found.finite_in_fp32 = self._is_finite(autocast=False)
        if self.found.finite_in_fp32 and needs_loss_scale(self._runtime.policy.compute):
            with_gradients = self.found.origin is not None and self.found.origin.phase == "backward"
            self.found.finite_in_bf16 = look_at(self._runtime, self._backward, with_gradients=with_gradients).is_finite

    def _is_finite(self, *, autocast: bool) -> bool:
        outputs = self._forward(autocast=autocast)
        leaving = [outputs[id(incoming.call), incoming.output] for incoming in self._backward.incoming]
        gradients = [g for incoming in self._backward.incoming if (g := incoming.gradient) is not None]
        if any(map(finiteness, leaving)):
            return False
        # A loss outside the model was computed from the failing outputs: its gradient says nothing about these.
        if any(map(finiteness, gradients)):
            return True
        self._backward_through([*map(_Entering, leaving, gradients)], None)
        return not self.found.nonfinite_gradients

    def _try_rules(self) -> None:
        """Run the same micro-batch with the module in FP32 that overflowed, or its branch: does it help?"""
        if self.found.origin is None:
            return
        names, self._limit = self.found.nonfinite_gradients, math.inf
        for tensor in self._scales.values():
            tensor.fill_(self._runtime.scaler.get_scale())
        for rules in rules_in_fp32(self.found.origin.module):
            try:
                with self._runtime.region.trying(rules, self._model):
                    helps = self._is_finite(autocast=True)
            except Exception as error:
                self.found.notes.append(f"not tried with the rules {rules}: {type(error).__name__}: {error}")
                break
            self.found.rules = rules if helps else {}
            if helps:
                break
        self.found.nonfinite_gradients = names
