"""``MagnitudeCollector``: the magnitudes of the tensors of one training step."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp.casting.uncompiled import is_compiled
from hf_mp.casting.watching import watching
from hf_mp.diagnostics.contract.swamped import swamped
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
    """Samples the tensors of the step whose first forward begins now, and counts them when it has ended.

    It hooks the modules that hold parameters until the first backward, writes only its own tensors and draws no random
    numbers, so the step is bit for bit the same.

    Activations and their gradients are those of each module's first output in its first call, in the first micro-batch.
    Weight gradients are the sum of all micro-batches, before clipping. Weights and updates are of the FP32 masters.
    """

    def __init__(self, runtime: MixedPrecision, model: nn.Module, entry: nn.Module) -> None:
        super().__init__()  # which holds the hooks
        self._runtime, self._model = runtime, model
        self._weights: dict[tuple[str, str], nn.Parameter] = {}
        self._asked_for_gradient: set[str] = set()
        self._notes: list[str] = []
        if is_sharded(model):  # gathered parameters are gone when the backward ends
            self._notes.append(SHARDED)
        else:
            for path, parameter in model.named_parameters():  # a tied one once, in the layer that has it first
                layer, _, name = path.rpartition(".")
                if parameter.requires_grad:
                    self._weights[layer, name] = parameter
        # By kind, layer and name of the parameter. Before the backward: an optimizer-in-backward updates during it.
        self._samples = {(Kind.WEIGHTS, *key): _master_sample(one) for key, one in self._weights.items()}
        if is_compiled(model):
            self._notes.append(COMPILED)
            return
        # A scripted module takes no hooks; one without parameters gives what others have made; what `entry` returns has
        # left the scaled region.
        inside = {
            name: module
            for name, module in model.named_modules()
            if module._parameters and module is not entry and not isinstance(module, torch.jit.ScriptModule)
        }
        self.enter_context(watching(inside, left=self._see_output))

    def _see_output(self, name: str, output: Any) -> None:
        """Sample the output of the module ``name``, and its gradient when that comes."""
        tensor = next((one for one in tensors_in(output) if one.is_floating_point()), None)
        if tensor is None:
            return
        # Several calls, or a recomputation: the first one counts.
        if (key := (Kind.ACTIVATIONS, name, "")) not in self._samples:
            self._take(key, tensor)
        # Reentrant checkpointing builds a graph only when it computes a module for the second time.
        if tensor.requires_grad and name not in self._asked_for_gradient:
            self._asked_for_gradient.add(name)
            tensor.register_hook(functools.partial(self._see_gradient, name))

    def _see_gradient(self, name: str, gradient: Tensor | None) -> None:
        key = (Kind.ACTIVATION_GRADIENTS, name, "")
        if gradient is not None and key not in self._samples:
            # Inside of the model gradients are scaled; histograms are of true ones, and shift by log2 of the scale.
            self._take(key, gradient, self._runtime.inverse_scale_on(gradient.device, None, ()))

    def _take(self, key: tuple[Kind, str, str], tensor: Tensor, factor: Tensor | None = None) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            local = local_part(tensor.detach())
            values = sample(local)
            if factor is not None:
                values = values.to(torch.float32) * factor.squeeze()
            self._samples[key] = sampling_stride(tuple(local.shape)), values

    def backward_ended(self) -> None:
        self.close()
        # At each backward anew, since gradients are sums by then; the last one of the step stays.
        for key, parameter in self._weights.items():
            gradient, factor = gradient_and_factor(parameter)
            if gradient is not None:
                self._take((Kind.WEIGHT_GRADIENTS, *key), gradient, factor)

    def finish(self) -> StepMagnitudes:
        """Count the samples of the step, which was just taken."""
        self.close()
        has_gradients = any(kind is Kind.WEIGHT_GRADIENTS for kind, _, _ in self._samples)
        missing = [] if has_gradients or not self._weights else [NO_GRADIENTS]
        found = [TensorMagnitudes(*key, stride, histogram(values)) for key, (stride, values) in self._samples.items()]
        found += self._updates()
        layers, kinds = [name for name, _ in self._model.named_modules()], [*Kind]
        tensors = sorted(found, key=lambda t: (layers.index(t.layer), kinds.index(t.kind)))
        return StepMagnitudes(
            step=self._runtime.stats.steps + 1,
            loss_scale=self._runtime.scaler.get_scale(),
            tensors=tuple(tensors),
            notes=(*self._notes, *missing),
        )

    def _updates(self) -> Iterator[TensorMagnitudes]:
        for key, parameter in self._weights.items():
            (stride, before), (_, after) = self._samples[Kind.WEIGHTS, *key], _master_sample(parameter)
            # Of the masters as they are: what clipping, decay and the optimizer have made of the gradient.
            update = after - before
            lost = swamped(before, update, torch.bfloat16)
            yield TensorMagnitudes(Kind.UPDATES, *key, stride, histogram(update), lost)


def _master_sample(parameter: nn.Parameter) -> tuple[int, Tensor]:
    """The stride and the values of a sample of the FP32 master."""
    # Of both halves of a split parameter the same places, so that no whole FP32 master is made.
    values = master_sample(parameter, lambda half: sample(local_part(half)))
    return sampling_stride(tuple(local_part(parameter.detach()).shape)), values
