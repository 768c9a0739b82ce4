"""``MagnitudeCollector``: counts the magnitudes of the tensors of one step."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp.casting.call_observer import observe_calls
from hf_mp.casting.compile_exclusion import is_compiled
from hf_mp.diagnostics.contract.lost_update_count import count_lost_updates
from hf_mp.diagnostics.magnitudes import histogram, sample, sampling_stride
from hf_mp.diagnostics.step_magnitudes import Kind, StepMagnitudes, TensorMagnitudes
from hf_mp.kernels.nested import tensors_in
from hf_mp.ranks.parallelism import is_sharded, local_part
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.weights.split_parameter import gradient_and_factor, master_sample

COMPILED = "activations and their gradients: the model is compiled, and its modules are not seen from outside"
SHARDED = "weights, weight gradients and updates: FSDP gathers and shards the parameters meanwhile"
NO_GRADIENTS = "weight gradients: none were left after the backward (an optimizer-in-backward uses them up)"


class MagnitudeCollector(ExitStack):
    """Samples the tensors of a step, and counts them after its update.

    Activations and their gradients are those of the first output of each module with parameters, in the first
    micro-batch. Weight gradients are sums of all micro-batches before clipping. Weights and updates are those of the
    FP32 masters.
    """

    def __init__(self, runtime: MixedPrecision, model: nn.Module, entry: nn.Module) -> None:
        super().__init__()
        self._runtime, self._model = runtime, model
        self._has_gradient_hook: set[str] = set()
        sharded, compiled = is_sharded(model), is_compiled(model)
        self._notes = [note for note, is_needed in ((SHARDED, sharded), (COMPILED, compiled)) if is_needed]
        trained = {} if sharded else {path: one for path, one in model.named_parameters() if one.requires_grad}
        self._weights = {path.rpartition(".")[::2]: one for path, one in trained.items()}  # by layer and name
        # Stride and values. An optimizer step in backward updates weights before its end.
        self._samples = {(Kind.WEIGHTS, *key): _master_sample(one) for key, one in self._weights.items()}
        if not compiled:
            # Scripted modules support no hooks. The gradient of the output of `entry` is not scaled.
            hooked = {
                name: module
                for name, module in model.named_modules()
                if module._parameters and module is not entry and not isinstance(module, torch.jit.ScriptModule)
            }
            self.enter_context(observe_calls(hooked, left=self._sample_output))

    def _sample_output(self, name: str, output: Any) -> None:
        tensor = next((one for one in tensors_in(output) if one.is_floating_point()), None)
        if tensor is None:
            return
        key = Kind.ACTIVATIONS, name, ""
        if key not in self._samples:
            self._store_sample(key, tensor)
        # With reentrant checkpointing, only the recomputation has a graph.
        if tensor.requires_grad and name not in self._has_gradient_hook:
            self._has_gradient_hook.add(name)
            tensor.register_hook(functools.partial(self._sample_gradient, name))

    def _sample_gradient(self, name: str, gradient: Tensor | None) -> None:
        key = (Kind.ACTIVATION_GRADIENTS, name, "")
        if gradient is not None and key not in self._samples:
            self._store_sample(key, gradient, self._runtime.scale_provider.inverse_scale_for(gradient.device, None, ()))

    def _store_sample(self, key: tuple[Kind, str, str], tensor: Tensor, factor: Tensor | None = None) -> None:
        """Store a sample of ``tensor``, multiplied by ``factor`` (FP32, one element)."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            local = local_part(tensor.detach())
            values = sample(local)
            if factor is not None:
                values = values.to(torch.float32) * factor.squeeze()
            self._samples[key] = sampling_stride(tuple(local.shape)), values

    def on_backward_end(self) -> None:
        """Sample the sum of the weight gradients up to now."""
        self.close()
        for key, parameter in self._weights.items():
            gradient, factor = gradient_and_factor(parameter)
            if gradient is not None:
                self._store_sample((Kind.WEIGHT_GRADIENTS, *key), gradient, factor)

    def finish(self) -> StepMagnitudes:
        """Count the samples after the update of the step."""
        self.close()
        has_gradients = any(kind is Kind.WEIGHT_GRADIENTS for kind, _, _ in self._samples)
        missing = [] if has_gradients or not self._weights else [NO_GRADIENTS]
        tensors = [TensorMagnitudes(*key, stride, histogram(values)) for key, (stride, values) in self._samples.items()]
        tensors += self._updates()
        keys = ((layer, kind) for layer, _ in self._model.named_modules() for kind in Kind)
        order = {key: place for place, key in enumerate(keys)}
        return StepMagnitudes(
            step=self._runtime.stats.steps + 1,
            loss_scale=self._runtime.scaler.get_scale(),
            tensors=tuple(sorted(tensors, key=lambda one: order[one.layer, one.kind])),
            notes=(*self._notes, *missing),
        )

    def _updates(self) -> Iterator[TensorMagnitudes]:
        for key, parameter in self._weights.items():
            (stride, before), (_, after) = self._samples[Kind.WEIGHTS, *key], _master_sample(parameter)
            update = after - before
            yield TensorMagnitudes(
                Kind.UPDATES,
                *key,
                stride,
                histogram(update),
                lost_updates=count_lost_updates(before, update, torch.bfloat16),
            )


def _master_sample(parameter: nn.Parameter) -> tuple[int, Tensor]:
    """Return stride and values of a sample of the FP32 master, without a complete FP32 copy."""
    values = master_sample(parameter, lambda half: sample(local_part(half)))
    return sampling_stride(tuple(local_part(parameter.detach()).shape)), values
