"""Replays one micro-batch of a failed step: who made the first inf or NaN, and what would have helped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm

from hf_mp.casting.experts import expert_counts
from hf_mp.casting.mode import autocast
from hf_mp.diagnostics.cures import find_cure
from hf_mp.diagnostics.kept_state import IncomingGradient, KeptBackward
from hf_mp.diagnostics.looks import run_again, scaled_entry
from hf_mp.diagnostics.origins import Origin, OriginTracker, origin_in_weight, spoilt_parts
from hf_mp.diagnostics.overflow_report import OverflowReport
from hf_mp.diagnostics.remedies import merged
from hf_mp.diagnostics.values import Finiteness, finiteness, ranges_of
from hf_mp.kernels.gradient_scan import SQUARES_BELOW
from hf_mp.policy import needs_loss_scale
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.weights.ranks.placement import is_dtensor, is_running, is_sharded


class CannotReplay(RuntimeError):
    """The micro-batch cannot be replayed without disturbing the training."""


class Replay:
    """A forward and backward of one micro-batch without side effects; what they show completes ``report``.

    Raises:
        CannotReplay: where it would take the other processes.
    """

    def __init__(self, runtime: MixedPrecision, backward: KeptBackward, report: OverflowReport) -> None:
        assert runtime.model is not None  # it was called
        self._runtime, self._model = runtime, runtime.model
        # A replay happens where a step failed, which the other processes do not know of.
        if is_running() and any(isinstance(module, SyncBatchNorm) for module in self._model.modules()):
            raise CannotReplay("SyncBatchNorm communicates with the other processes, which do not replay")
        if is_sharded(self._model) or any(map(is_dtensor, self._model.parameters())):
            raise CannotReplay("its weights are sharded, and gathering them needs the other processes")
        self._backward, self._report = backward, report
        self._notes: list[str] = []

    def run(self) -> OverflowReport:
        origin = self._find_origin()
        if origin is not None:
            found = {name: getattr(origin, name) for name in ("phase", "module", "op", "tensor", "inputs", "outputs")}
            self._report = replace(self._report, **found, smaller_scale_helps=False)
            self._notes = [*origin.notes, *self._notes]
            # A spoiled buffer that is itself the origin needs no note.
            if origin.phase != "weight":
                self._note_spoiled_buffers()
            if origin.phase in ("forward", "backward"):
                self._look_for_a_cure()
        return replace(self._report, notes=tuple(self._notes))

    def _find_origin(self) -> Origin | None:
        backward, scale = self._backward, self._runtime.scaler.get_scale()
        tracker = OriginTracker(self._model, backward.calls[0].forward.module())

        @contextmanager
        def watching(mode: autocast) -> Iterator[None]:
            self._blame_what_is_there(tracker)
            with tracker.watching(mode):
                yield

        rerun = run_again(
            self._runtime,
            backward,
            watching,
            dtype=self._runtime.policy.compute,
            scale=scale,
            with_gradients=backward.is_kept(),
        )
        # Nothing below is valid for another forward than the one that failed.
        came = list(zip(backward.incoming, rerun.outputs, strict=True))
        if not self._is_as_it_was(came):
            return None
        experts = expert_counts(self._model)
        too_large = [
            part
            for name, gradient in rerun.gradients.items()
            for part in spoilt_parts(name, gradient, experts, SQUARES_BELOW * scale)
        ]
        self._report = replace(self._report, nonfinite_gradients=tuple(too_large))
        # What comes first in a step is the origin of what comes later.
        if (origin := _first(map(tracker.of, rerun.outputs))) is not None:
            return origin
        for incoming, output in came:
            if (origin := self._of_entry(incoming, output, scale)) is not None:
                return origin
        origin = _first(map(tracker.of, rerun.gradients.values()))
        if origin is None and too_large:
            self._notes.append(
                "a gradient is finite and its square is not (2**64 or more), so that the step is skipped for it as for "
                "inf: scale the loss down, or look for what multiplies it"
            )
        return origin

    def _of_entry(self, incoming: IncomingGradient, output: Tensor, scale: float) -> Origin | None:
        """Whether the gradient that came in through an output is at fault, by itself or times the loss scale."""
        gradient, name = incoming.gradient, incoming.output
        if gradient is None:
            self._notes.append(
                f"the gradient that came into the output {name!r} was too large to keep, so this "
                "backward could not be replayed; from now on it is kept, for the next failure"
            )
            return None
        if incoming.is_changed():
            self._notes.append(f"the gradient of the output {name!r} was modified in place since")
        # FP32 does not hold the square of a larger one, and the step is skipped for it as for inf.
        if finiteness(gradient, SQUARES_BELOW):
            ranges = ranges_of([(f"{name}, the output", output)]), ranges_of([("its gradient", gradient)])
            return Origin("loss outside of the model", 0, "", "", name, *ranges)
        scaled = scaled_entry(gradient, scale, output)
        if finiteness(scaled):
            ranges = ranges_of([("input 0", gradient)]), ranges_of([("output 0", scaled)])
            return Origin("backward", 0, "", "loss scaling", "", *ranges)
        return None

    def _blame_what_is_there(self, tracker: OriginTracker) -> None:
        """Tell the tracker what was not finite before the forward."""
        for name, tensor in self._backward.inputs():
            if finiteness(tensor) is Finiteness.NOT_FINITE:
                tracker.blame(tensor, Origin("input", 0, tensor=name, inputs=ranges_of([(name, tensor)])))
        experts = expert_counts(self._model)
        for name, tensor in [*self._model.named_parameters(), *self._model.named_buffers()]:
            # A buffer may be a mask, which holds -inf on purpose; a parameter may not.
            least = Finiteness.MINUS_INF if isinstance(tensor, nn.Parameter) else Finiteness.NOT_FINITE
            if finiteness(tensor) >= least:
                tracker.blame(tensor, origin_in_weight(name, tensor, experts))

    def _note_spoiled_buffers(self) -> None:
        spoiled = [name for name, buffer in self._model.named_buffers() if finiteness(buffer) is Finiteness.NOT_FINITE]
        if spoiled:
            self._notes.append(f"the forward has left inf or NaN in {', '.join(spoiled[:5])}, which no skip takes back")

    def _is_as_it_was(self, came: list[tuple[IncomingGradient, Tensor]]) -> bool:
        """Whether losses are finite where they were; notes what speaks against it."""
        if any(call.versions != call.versions_now() for call in self._backward.calls):
            self._notes.append("the batch was modified in place since the forward: the replay may differ")
        for incoming, again in came:
            loss = incoming.call.losses.get(incoming.output)
            if loss is not None and bool(finiteness(loss)) != bool(finiteness(again)):
                self._notes.append(
                    f"the output {incoming.output!r} was {loss.item():g} and came to {again.item():g} in the replay: "
                    "the forward depends on something besides its inputs, weights and random generators"
                )
                return False
        return True

    def _look_for_a_cure(self) -> None:
        try:
            cure = find_cure(self._runtime, self._backward)
        except Exception as error:  # the model may do anything in another dtype, and the rest of the report stands
            self._notes.append(f"not tried in another precision: {type(error).__name__}: {error}")
            return
        self._report = report = replace(self._report, finite_in_fp32=cure.finite_in_fp32)
        # A run in BF16 has tried it already, and needs no other loss scale.
        if not needs_loss_scale(self._runtime.policy.compute):
            return
        rules = merged(one.rules for one in cure.remedies) if cure.finite_in_fp32 else None
        self._report = report = replace(report, finite_in_bf16=cure.finite_in_bf16, rules=rules)
        if cure.suits is not None and report.phase == "backward":
            # The choice of healing leaves a doubling of room.
            largest, needed = 2.0 * cure.suits.fits, cure.suits.needs
            self._report = replace(
                report,
                smaller_scale_helps=largest >= needed,
                largest_finite_scale=largest,
                needed_scale=needed,
            )


def _first(origins: Iterable[Origin | None]) -> Origin | None:
    return min((one for one in origins if one is not None and not one.is_mask), key=lambda one: one.order, default=None)
