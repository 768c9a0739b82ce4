"""``MagnitudeCollector``: the magnitudes of the tensors of one training step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp.casting.nested import named_tensors
from hf_mp.diagnostics.layers import select_layers
from hf_mp.diagnostics.magnitudes import histogram, sample, sampling_stride, swamped
from hf_mp.diagnostics.step_magnitudes import Kind, StepMagnitudes, TensorMagnitudes
from hf_mp.scaling.rules import StepReport
from hf_mp.step.forward import AttachedForward
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.weights.distributed import is_sharded, local_part
from hf_mp.weights.split_parameter import gradient_and_factor, master_sample

COMPILED = "activations and their gradients: the model is compiled, and its modules are not seen from outside"
SHARDED = "weights, weight gradients and updates: FSDP gathers and shards the parameters meanwhile"
NO_GRADIENTS = "weight gradients: none were left after the backward (an optimizer-in-backward uses them up)"


@dataclass(frozen=True)
class _Sampled:
    """Sampled elements of a tensor."""

    dtype: str
    stride: int
    values: Tensor

    @classmethod
    def of(cls, tensor: Tensor, factor: Tensor | None = None) -> _Sampled:
        """Of ``tensor`` times ``factor``."""
        local = local_part(tensor.detach())
        values = sample(local)
        if factor is not None:
            values = values.to(torch.float32) * factor.squeeze()
        return cls(str(tensor.dtype).removeprefix("torch."), sampling_stride(tuple(local.shape)), values)

    @classmethod
    def of_master(cls, parameter: nn.Parameter) -> _Sampled:
        """Of the FP32 master weight."""
        stride = sampling_stride(tuple(local_part(parameter.detach()).shape))
        return cls("float32", stride, master_sample(parameter, lambda half: sample(local_part(half))))


class MagnitudeCollector:
    """Samples a step's tensors, and counts them when the step has ended.

    It hooks the chosen modules between :meth:`begin` and :meth:`finish`, writes only its own tensors and draws no
    random numbers, so the step is bit for bit the same.

    Activations and their gradients are those of each module's first output in its first call, in the first micro-batch.
    Weight gradients are the sum of all micro-batches, before clipping. Weights and updates are of the FP32 masters.
    """

    def __init__(
        self,
        runtime: MixedPrecision,
        layers: Sequence[str] | None = None,
        on_backward_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._runtime = runtime
        self._on_backward_end = on_backward_end
        self._patterns = layers
        self._handles: list[Any] = []
        self._forget_step()
        if runtime.model is not None:
            select_layers(runtime.model, layers)  # refuse wrong patterns now

    def _forget_step(self) -> None:
        self.is_active = False
        self._activations: dict[str, _Sampled] = {}
        self._activation_gradients: dict[str, _Sampled] = {}
        self._gradients: dict[tuple[str, str], _Sampled] = {}
        self._weights: dict[tuple[str, str], _Sampled] = {}
        self._asked_for_gradient: set[str] = set()
        self._parameters: dict[tuple[str, str], nn.Parameter] = {}
        self._notes: tuple[str, ...] = ()
        self._task: int | None = None

    def begin(self, forward: AttachedForward) -> None:
        """Collect the step whose first forward begins now."""
        model = self._runtime.model
        if model is None:
            return
        self.abandon()
        self.is_active = True
        layers = select_layers(model, self._patterns)
        if is_sharded(model):  # gathered parameters are gone when the backward ends
            self._notes = (SHARDED,)
        else:
            self._parameters = _trainable(layers)
            # Before the backward: an optimizer-in-backward updates during it.
            self._weights = {key: _Sampled.of_master(p) for key, p in self._parameters.items()}
        if _is_compiled(model):
            self._notes = (*self._notes, COMPILED)
            return
        entry = forward.module()  # what it returns has left the scaled region
        for name, module in layers.items():
            if module is not entry:
                self._handles.append(module.register_forward_hook(self._forward_hook(name)))

    def _forward_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            found = (t for _, t in named_tensors(output) if t.is_floating_point())
            tensor = next(found, None)
            if tensor is None or not self.is_active:
                return
            if name not in self._activations:
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    self._activations[name] = _Sampled.of(tensor)
            # Reentrant checkpointing builds a graph only when it computes a module for the second time.
            if tensor.requires_grad and name not in self._asked_for_gradient:
                self._asked_for_gradient.add(name)
                tensor.register_hook(self._gradient_hook(name))

        return hook

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor | None) -> None:
            if gradient is not None and self.is_active and name not in self._activation_gradients:
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    inverse = self._runtime.inverse(gradient.device, None, 0)
                    self._activation_gradients[name] = _Sampled.of(gradient, inverse)

        return hook

    def backward_ended(self) -> None:
        """Sample the gradients that the first backward left."""
        if not self.is_active:
            return
        self._remove_hooks()
        self._on_backward_end()
        for key, parameter in self._parameters.items():
            gradient, factor = gradient_and_factor(parameter)
            if gradient is not None:
                self._gradients[key] = _Sampled.of(gradient, factor)

    def finish(self, report: StepReport) -> StepMagnitudes:
        """Count the samples of the step, which was just taken or skipped."""
        self._remove_hooks()
        missing = [] if self._gradients or not self._parameters else [NO_GRADIENTS]
        found: dict[tuple[str, str, Kind], TensorMagnitudes] = {}
        for kind, samples in (
            (Kind.ACTIVATIONS, self._activations),
            (Kind.ACTIVATION_GRADIENTS, self._activation_gradients),
        ):
            found.update({(name, "", kind): _counted(kind, name, "", taken) for name, taken in samples.items()})
        for kind, of_parameters in ((Kind.WEIGHTS, self._weights), (Kind.WEIGHT_GRADIENTS, self._gradients)):
            found.update({(*key, kind): _counted(kind, *key, taken) for key, taken in of_parameters.items()})
        if not report.overflow:
            found.update(self._updates())
        order = {layer: place for place, layer in enumerate(self._layers())}
        tensors = sorted(found.values(), key=lambda t: (order.get(t.layer, len(order)), list(Kind).index(t.kind)))
        step = StepMagnitudes(
            step=self._runtime.stats.steps + 1,
            loss_scale=self._runtime.scaler.get_scale(),
            skipped=report.overflow,
            tensors=tuple(tensors),
            notes=(*self._notes, *missing),
        )
        self._forget_step()
        return step

    def _layers(self) -> list[str]:
        model = self._runtime.model
        return [] if model is None else list(select_layers(model, self._patterns))

    def _updates(self) -> dict[tuple[str, str, Kind], TensorMagnitudes]:
        rows = {}
        for key, before in self._weights.items():
            after = _Sampled.of_master(self._parameters[key])
            if after.values.shape != before.values.shape:  # the weight was replaced
                continue
            update = after.values - before.values
            if key not in self._gradients and not update.any():
                continue  # it had no part in the step
            rows[(*key, Kind.UPDATES)] = TensorMagnitudes(
                Kind.UPDATES,
                *key,
                after.dtype,
                before.stride,
                histogram(update),
                swamped_fp16=swamped(before.values, update, torch.float16),
                swamped_bf16=swamped(before.values, update, torch.bfloat16),
            )
        return rows

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def abandon(self) -> None:
        """Stop collecting, and remove the hooks."""
        self._remove_hooks()
        self._forget_step()


def _trainable(layers: Mapping[str, nn.Module]) -> dict[tuple[str, str], nn.Parameter]:
    """The parameters of ``layers`` by layer and name; tied ones in their first layer."""
    found: dict[int, tuple[tuple[str, str], nn.Parameter]] = {}
    for layer, module in layers.items():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter.is_floating_point():
                found.setdefault(id(parameter), ((layer, name), parameter))
    return dict(found.values())


def _counted(kind: Kind, layer: str, name: str, taken: _Sampled) -> TensorMagnitudes:
    return TensorMagnitudes(kind, layer, name, taken.dtype, taken.stride, histogram(taken.values))


def _is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile compiles a part of ``model`` or its caller."""
    if any(
        getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        for module in model.modules()
    ):
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith("_dynamo/eval_frame.py") and "DisableContext" not in code.co_qualname:
            return True
        frame = frame.f_back
    return False
