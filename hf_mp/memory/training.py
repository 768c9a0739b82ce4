"""Estimates the memory of fine-tuning."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import import_utils

from hf_mp.casting.experts import has_stacked_experts
from hf_mp.casting.mode import autocast
from hf_mp.environment.libraries import first_line, quiet_bitsandbytes
from hf_mp.kernels.nested import tensors_in
from hf_mp.memory.batches import Inputs, make_batch
from hf_mp.memory.fake_tensors import FAKE_GPU_DEVICE, FakeValueMode, host_memory_of, kernels_of_a_gpu
from hf_mp.memory.ledger import Category, Phase, StepProfile, profile_step
from hf_mp.memory.models import ModelLike, config_of, find_model, meta_model, replace_tensors
from hf_mp.memory.parallel import (
    Collective,
    CommunicationRecorder,
    make_tensor_parallel,
    one_rank_of,
    shard,
    under_ddp,
)
from hf_mp.memory.precisions import parse_preset
from hf_mp.memory.recorder import CopiedBytes, MemoryRecorder
from hf_mp.memory.settings import Parallel, TrainingSettings, check_device, make_settings
from hf_mp.memory.sizes import largest_first, readable
from hf_mp.ranks.parallelism import is_dtensor
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.step.observers import FreeGradients
from hf_mp.weights.master_weight_optimizer import MasterWeightOptimizer

_MAX_GRAD_NORM = 1.0  # default of TrainingArguments
_RECORDED_UPDATES = 2  # the first creates the optimizer state; later ones are like the second
_MAX_STEPS = 40  # a measured run skips steps until the loss scale is low enough
_RECORDED_MICRO_BATCHES = 2


@dataclass(frozen=True, repr=False)
class TrainingMemory(StepProfile):
    """The memory of one training step, estimated or measured.

    Attributes:
        model: class name.
        parameters: number of parameters.
        settings: of the step.
        device: ``"cpu"`` or ``"cuda"``.
        measured: whether the tensors were real.
        peak_bytes: of all tensors together.
        peak_phase, peak_op: phase and op in which the peak is reached.
        bytes_by_category: bytes of each :class:`Category` at the peak.
        by_phase: the same at the peak of forward, backward and update.
        allocator_peak_bytes: peak of CUDA's allocator, with workspaces of kernels; None if estimated or on a CPU.
        communication: traffic of one rank in a step, by collective.
        host_bytes: page-locked host memory of a rank.
        copied_bytes: copies of a step from or to the host, the larger. Both are 0 without offload.
    """

    model: str
    parameters: int
    settings: TrainingSettings
    device: str
    measured: bool
    allocator_peak_bytes: int | None = None
    communication: tuple[Collective, ...] = ()
    host_bytes: int = 0
    copied_bytes: int = 0

    def __repr__(self) -> str:
        how = f"{self.settings}, {'measured' if self.measured else 'estimated'} on {self.device}"
        peak = f"peak {readable(self.peak_bytes)} in {self.peak_phase} ({largest_first(self.bytes_by_category)})"
        return f"<TrainingMemory of {self.model} in {self.settings.precision}, {how}: {peak}>"


@dataclass
class TrainingSetup:
    model: nn.Module
    forward: Callable[..., Any]  # the model, or DDP around it
    optimizer: Optimizer
    accumulation_steps: int
    runtime: MixedPrecision | None = None
    updates: int = 0  # steps that were not skipped


def estimate_training_memory(
    model: ModelLike,
    precision: str | torch.dtype = "fp16",
    *,
    batch_size: int = 1,
    seq_len: int | None = None,
    accumulation_steps: int = 1,
    gradient_checkpointing: bool = False,
    optimizer: str | None = None,
    free_gradients: FreeGradients = "step",
    offload: str | None = None,
    device: str = "cuda",
    ranks: int = 1,
    parallel: Parallel = "fsdp2",
    node_size: int = 8,
) -> TrainingMemory:
    """Predict the memory of fine-tuning by a forward, backward, clipping and update on fake tensors, without a GPU.

    Args:
        model: a name, a directory, a ``config.json``, a configuration or a model; only the configuration is read.
        precision: one of :data:`hf_mp.memory.precisions.TRAINING_PRESETS`; default ``"fp16"``.
        batch_size: sequences in a forward, without padding; default 1.
        seq_len: tokens in a sequence; default: the positions of the model, at most 1024.
        accumulation_steps: micro-batches in one update; default 1.
        gradient_checkpointing: recompute blocks in backward; default False.
        optimizer: a name of ``TrainingArguments(optim=...)``; default: the preset's, else ``"adamw_torch_fused"``, with
            ``parallel="tp"`` ``"adamw_torch"``.
        free_gradients: as for :class:`hf_mp.MixedPrecision`, with the Trainer's clipping; default ``"step"``.
        offload: as for :class:`hf_mp.MixedPrecision`, for a lean preset on a GPU; default None.
        device: ``"cuda"`` (default; needs no GPU) or ``"cpu"``.
        ranks: processes, at most 4,096, each with ``batch_size`` sequences; default 1. The code of one runs.
        parallel: ``"fsdp2"`` (default), ``"ddp"``, ``"hsdp"`` (FSDP2 within a machine, replicated over machines) or
            ``"tp"`` (tensor parallel by the plan of Transformers; all ranks have the same sequences).
        node_size: ranks on one machine; default 8.

    Returns:
        The peak by category, of the step and of each phase, without CUDA's context, fragmentation and workspaces.

    Raises:
        ValueError: for an unknown model, precision, optimizer or device, impossible settings, or a model with shapes
            that depend on its data.
        RuntimeError: for several ranks in one of several processes (``torchrun``).
    """
    with memory_predictor(
        find_model(model),
        precision,
        device=device,
        batch_size=batch_size,
        seq_len=seq_len,
        accumulation_steps=accumulation_steps,
        gradient_checkpointing=gradient_checkpointing,
        optimizer=optimizer,
        free_gradients=free_gradients,
        offload=offload,
        ranks=ranks,
        parallel=parallel,
        node_size=node_size,
    ) as predict:
        return predict(batch_size)


@contextlib.contextmanager
def memory_predictor(
    source: PreTrainedConfig | nn.Module, precision: str | torch.dtype, *, device: str = "cuda", **given: Any
) -> Iterator[Callable[[int], TrainingMemory]]:
    """Yield ``predict(batch_size)``, with one model and optimizer for all calls.

    Arguments as for :func:`estimate_training_memory`.
    """
    settings = make_settings(source, precision, **given)
    _check_predictable(settings, device)
    target = FAKE_GPU_DEVICE if device == "cuda" else torch.device("cpu")
    model = meta_model(source, parse_preset(precision).loaded)
    # Before FSDP2 replaces the class.
    inputs, name, parameters = Inputs.of(model, settings.precision), type(model).__name__, model.num_parameters()
    prepared = prepare_model(model, settings)
    recorder = MemoryRecorder(target)
    communication = CommunicationRecorder(settings.node_size) if settings.ranks > 1 else None
    host_memory = contextlib.nullcontext() if settings.offload is None else host_memory_of(recorder)
    with one_rank_of(settings, target) as mesh, fake_tensors(target), host_memory:
        replace_tensors(prepared, target)
        if settings.ranks > 1 and settings.parallel == "tp":
            make_tensor_parallel(model, settings.ranks)
        setup = make_training_setup(shard(prepared, mesh), settings, target)
        _adapt_to_fake_tensors(setup, settings)
        with recording(setup, recorder, communication) as profile_of:

            def predict(batch_size: int) -> TrainingMemory:
                batch_settings = replace(settings, batch_size=batch_size)
                return TrainingMemory(
                    **vars(profile_of(make_batch(inputs, batch_settings, target))),
                    model=name,
                    parameters=parameters,
                    settings=batch_settings,
                    device=device,
                    measured=False,
                    communication=() if communication is None else communication.collectives(),
                    host_bytes=host_bytes_of(setup),
                    copied_bytes=max(vars(recorder.copied).values()),
                )

            yield predict


def _check_predictable(settings: TrainingSettings, device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} cannot be predicted for: use 'cuda' or 'cpu'")
    check_device(settings, device)
    precision, parallel = settings.precision, settings.parallel
    if parse_preset(precision).lora and settings.ranks > 1 and parallel != "ddp":
        raise ValueError(f"parallel={parallel!r} cannot shard quantized weights of precision={precision!r}: use 'ddp'")


def _adapt_to_fake_tensors(setup: TrainingSetup, settings: TrainingSettings) -> None:
    """Wrap the forward in DDP, and cache the scale tensors, by which updates group gradients."""
    runtime = setup.runtime
    if settings.ranks > 1 and settings.parallel == "ddp":
        has_hook = runtime is not None and runtime.policy.reduce_dtype is not torch.float32
        setup.forward = under_ddp(setup.forward, layout_has_hook=has_hook)
    if runtime is not None:
        runtime.scaler.scale_and_inverse = functools.cache(runtime.scaler.scale_and_inverse)  # type: ignore[method-assign]


@contextlib.contextmanager
def fake_tensors(device: torch.device) -> Iterator[None]:
    """Run training code on tensors without memory: fake CPU tensors, or meta tensors instead of CUDA's."""
    fused = [*_get_fused_kernels_supported_devices(), FAKE_GPU_DEVICE.type]
    with (
        warnings.catch_warnings(),
        quiet_bitsandbytes(),  # it logs each matmul that it casts
        # Constants of libraries are real tensors. Meta tensors do not need the slow mode.
        contextlib.nullcontext() if device == FAKE_GPU_DEVICE else FakeTensorMode(allow_non_fake_inputs=True),
        FakeValueMode(),
        # Transformers creates more masks while tracing.
        mock.patch.object(import_utils, "is_fake_tensor", lambda value: False),
        mock.patch.object(torch_optimizer, "_get_fused_kernels_supported_devices", lambda: fused),
        kernels_of_a_gpu() if device == FAKE_GPU_DEVICE else contextlib.nullcontext(),
    ):
        # Addresses are 0 for all fake tensors.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        try:
            yield
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise ValueError(
                f"shapes or decisions of the model depend on its data (in {error.func}), so its memory cannot be "
                "predicted: measure it (hf_mp.measure_training_memory)"
            ) from error


def prepare_model(model: PreTrainedModel, settings: TrainingSettings) -> nn.Module:
    """Prepare a model, real or on the meta device, for training."""
    config = config_of(model)
    config.use_cache = False  # as the Trainer sets it
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        # Prepended to the labels; no shape depends on its value.
        config.decoder_start_token_id = 0
    if parse_preset(settings.precision).lora:
        return _with_adapters(model, settings.gradient_checkpointing)
    if settings.gradient_checkpointing:
        # `activation_checkpointing_enable` since Transformers 5.23
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def make_training_setup(model: nn.Module, settings: TrainingSettings, device: torch.device) -> TrainingSetup:
    """Attach the precision to a prepared model, and create its optimizer."""
    preset = parse_preset(settings.precision)
    model.train()  # dropout saves masks
    runtime = None
    if preset.policy is not None:
        max_grad_norm = _MAX_GRAD_NORM if settings.free_gradients == "backward" else None
        options: Any = {"free_gradients": settings.free_gradients, "offload": settings.offload}
        runtime = MixedPrecision(preset.policy, max_grad_norm=max_grad_norm, **options)
        runtime.attach(model)
    optimizer = make_optimizer(settings.optimizer, model, device)
    if runtime is not None:
        optimizer = runtime.attach_optimizer(optimizer)
    if preset.autocast is not None:
        # As accelerate does. torch.autocast does not cast stacked experts.
        if device == FAKE_GPU_DEVICE:
            region: Any = autocast(preset.autocast, rules={torch._grouped_mm: "unlisted"})
        else:
            region = torch.autocast(device.type, preset.autocast)
        model.forward = convert_outputs_to_fp32(region(model.forward))
    return TrainingSetup(model, model, optimizer, settings.accumulation_steps, runtime)


def host_bytes_of(setup: TrainingSetup) -> int:
    """Return the bytes of host memory that offload uses; 0 without offload."""
    if setup.runtime is None or setup.runtime.offload is None:
        return 0
    of_optimizer: Any = cast(Any, setup.optimizer).rooms.values()
    of_parameters = [cast(Any, one).place.rooms for one in setup.model.parameters() if hasattr(one, "place")]
    # A slab is one allocation with rooms of several tensors.
    slabs = {id(room.slab): room.slab for rooms in (*of_optimizer, *of_parameters) for room in rooms.values()}
    return sum(slab.nbytes for slab in slabs.values())


def _with_adapters(model: PreTrainedModel, gradient_checkpointing: bool) -> nn.Module:
    """Freeze a quantized model and add LoRA adapters, as in PEFT's guide to quantization."""
    with quiet_bitsandbytes():
        from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # PEFT reads a deprecated name
        # PEFT would cast stacked experts, which are most of a model, to FP32.
        experts = {p: p.data for module in model.modules() if has_stacked_experts(module) for p in module.parameters()}
        prepared = prepare_model_for_kbit_training(model, use_gradient_checkpointing=gradient_checkpointing)
        for parameter, data in experts.items():
            parameter.data = data
        try:
            return get_peft_model(prepared, LoraConfig())
        except ValueError:  # PEFT has no default layers for this architecture
            return get_peft_model(prepared, LoraConfig(target_modules="all-linear"))


def make_optimizer(name: str, model: nn.Module, device: torch.device) -> Optimizer:
    """Create the Trainer's optimizer for ``TrainingArguments(optim=name)``.

    Raises:
        ValueError: for an unknown name, or an optimizer with a missing package.
    """
    try:
        with quiet_bitsandbytes():
            kind, settings = _optimizer_class(name, model)
    except (ValueError, ImportError, KeyError) as error:
        raise ValueError(f"optimizer={name!r} cannot be made: {error}") from error
    settings["lr"] = 0.0  # so that a measured model's weights do not change
    if kind.__module__.startswith("torch.optim.") and not settings.get("fused"):
        has_dtensors = any(map(is_dtensor, model.parameters()))
        settings.setdefault("foreach", device.type != "cpu" and not has_dtensors)  # torch's default for real tensors
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # The Trainer's groups, updated in turn.
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() >= 2], "weight_decay": 0.01},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    return kind([group for group in groups if group["params"]], **settings)


def _optimizer_class(name: str, model: nn.Module | None) -> tuple[Any, dict[str, Any]]:
    """Return ``Trainer.get_optimizer_cls_and_kwargs`` for ``TrainingArguments(optim=name)``."""
    from transformers.training_args import OptimizerNames, TrainingArguments

    # The class has the defaults; __init__ would reset accelerate's state.
    args: Any = object.__new__(TrainingArguments)
    args.optim, args.distributed_state, args._n_gpu = OptimizerNames(name), None, 1  # one process
    try:
        from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS, OptimizerContext
    except ImportError:
        from transformers import Trainer

        return Trainer.get_optimizer_cls_and_kwargs(args, cast(Any, model))
    # Importing the Trainer would import datasets and pandas.
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    context = OptimizerContext(args, cast(Any, model), {"lr": args.learning_rate}, adam, optim_args={})
    return _OPTIMIZER_HANDLERS[args.optim](context)


@contextlib.contextmanager
def recording(
    setup: TrainingSetup, recorder: MemoryRecorder, communication: CommunicationRecorder | None = None
) -> Iterator[Callable[[dict[str, Any]], StepProfile]]:
    """Yield ``profile_of(batch)``, which runs several steps and returns the highest profile.

    ``communication``, if given, records the last of these steps.
    """

    def profile_of(batch: dict[str, Any]) -> StepProfile:
        recorder.take(tensors_in(batch), Category.INPUTS_AND_BUFFERS)
        profiles: list[StepProfile] = []
        updates = max(_RECORDED_UPDATES, setup.updates + 1)
        while setup.updates < updates and len(profiles) < _MAX_STEPS:
            recorder.ledger.start_step()
            recorder.copied = CopiedBytes()
            if communication is not None:
                communication.start()
            setup.updates += train_one_step(setup, batch, recorder.start_phase)
            recorder.take(tensors_in(list(setup.optimizer.state.values())), Category.OPTIMIZER_STATE)
            setup.optimizer.zero_grad()
            profiles.append(profile_step(recorder.ledger.events))
        # Of equal peaks, the last: the first step creates the optimizer state.
        return max(reversed(profiles), key=lambda profile: profile.peak_bytes)

    runtime = setup.runtime
    if runtime is not None and runtime.offload is not None:
        recorder.take(setup.optimizer.transfers.windows, Category.OFFLOAD_WINDOWS)  # type: ignore[attr-defined]
    if runtime is not None and runtime.scaler.is_scaling:  # the scale exists before the first step
        recorder.take(runtime.scaler.scale_and_inverse(recorder.device), Category.TEMPORARIES)
    with recorder.following(setup.model), communication or contextlib.nullcontext(), recorder:
        yield profile_of


def _loss_of(setup: TrainingSetup, batch: dict[str, Any]) -> Any:
    name = type(setup.model).__name__
    try:
        loss = getattr(setup.forward(**batch), "loss", None)
    except (DynamicOutputShapeException, DataDependentOutputException, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        given = ", ".join(f"{key} {tuple(value.shape)}" for key, value in batch.items() if isinstance(value, Tensor))
        raise ValueError(
            f"{name} takes no step on {given}, the inputs that its class and configuration suggest "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error
    if loss is None:
        raise ValueError(
            f"{name} returns no loss for {', '.join(batch)}, so there is no step to take: give a model with a head "
            "that has one, such as BertForMaskedLM"
        )
    return loss


def train_one_step(
    setup: TrainingSetup, batch: dict[str, Any], start_phase: Callable[[Phase], None] = lambda phase: None
) -> bool:
    """Run forward, backward, clipping and update; return whether the update was applied.

    The caller clears the gradients.
    """
    micro_batches = min(setup.accumulation_steps, _RECORDED_MICRO_BATCHES)
    for _ in range(micro_batches):
        start_phase(Phase.FORWARD)
        loss = _loss_of(setup, batch)
        if micro_batches > 1:
            loss = loss / micro_batches
        start_phase(Phase.BACKWARD)
        loss.backward()
        del loss
    start_phase(Phase.UPDATE)
    if isinstance(setup.optimizer, MasterWeightOptimizer):
        setup.optimizer.clip_grad_norm_(_MAX_GRAD_NORM)
    else:
        # As Accelerator.clip_grad_norm_.
        clip: Any = Accelerator._clip_grad_norm_dtensor_aware
        clip(None, [p for p in setup.model.parameters() if p.requires_grad], _MAX_GRAD_NORM)
    setup.optimizer.step()
    return setup.runtime is None or not setup.runtime.step_was_skipped
