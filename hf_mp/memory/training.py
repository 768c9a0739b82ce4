"""Estimates the memory of fine-tuning: runs one training step on fake tensors."""

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
from hf_mp.memory.fake_tensors import STAND_IN, AnswerAsIfAllWentWell, host_memory_of, kernels_of_a_gpu
from hf_mp.memory.ledger import Category, Phase, StepProfile, profile_step
from hf_mp.memory.models import ModelLike, config_of, find_model, replace_tensors, skeleton
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

_MAX_GRAD_NORM = 1.0  # TrainingArguments'
_RECORDED_UPDATES = 2  # the first creates the optimizer's state, the second is like all others
_MOST_STEPS = 40  # a real run skips steps at first, until the loss scale has come down
_RECORDED_MICRO_BATCHES = 2  # the second adds to the gradients of the first, like all others


@dataclass(frozen=True, repr=False)
class TrainingMemory(StepProfile):
    """The memory of one training step, estimated or measured.

    Attributes:
        model: class of the model.
        parameters: number of parameters.
        settings: the settings of the step.
        device: ``"cpu"`` or ``"cuda"``.
        measured: whether real tensors were counted.
        peak_bytes: peak of all tensors together.
        peak_phase: part of the step at the peak.
        peak_op: op that reached the peak.
        bytes_by_category: bytes of every :class:`Category` at the peak.
        by_phase: the highest use of forward, backward and update, each by category.
        allocator_peak_bytes: the allocator's own peak on a GPU, with the workspace of kernels; else None.
        communication: what one of several ranks sends and receives in a step, by collective.
        host_bytes: with offload, page-locked memory of the host, by each rank.
        copied_bytes: with offload, what a step copies to the device and back: the larger of the two.
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
class Trainee:
    model: nn.Module
    forward: Callable[..., Any]
    optimizer: Optimizer
    accumulation_steps: int
    runtime: MixedPrecision | None = None
    updates: int = 0  # taken so far


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
    """Predict the memory of fine-tuning, without a GPU and without using that memory.

    A model of fake tensors (torch's ``FakeTensorMode``) takes real training steps: forward, backward, clipping and
    update, with the autocast and the optimizer that training uses. Nothing is computed by formula.

    Args:
        model: a name, a directory, a ``config.json``, a configuration or a model; only the configuration is read.
        precision: one of :data:`hf_mp.memory.precisions.TRAINING_PRESETS`; default ``"fp16"``.
        batch_size: sequences in one forward, without padding; default 1.
        seq_len: tokens in a sequence; default: all positions that the model has, at most 1024.
        accumulation_steps: micro-batches in one update; default 1.
        gradient_checkpointing: recompute blocks in backward; default False.
        optimizer: a name of ``TrainingArguments(optim=...)``; default: the preset's, else the Trainer's
            ``"adamw_torch_fused"``.
        free_gradients: as for :class:`hf_mp.MixedPrecision`, with the Trainer's clipping; default ``"step"``.
        offload: as for :class:`hf_mp.MixedPrecision`, of a lean preset on a GPU; default None.
        device: ``"cuda"`` (default; needs no GPU) or ``"cpu"``.
        ranks: processes that train together, at most 4,096, each with ``batch_size`` sequences; default 1. The code of
            one of them runs, on torch's fake process group.
        parallel: how the ranks share the work: ``"fsdp2"`` (default), ``"ddp"``, ``"hsdp"`` (FSDP2 within a machine,
            replicated over machines), or ``"tp"``: tensor parallel by the plan of Transformers, all ranks with the same
            sequences, and ``"adamw_torch"`` by default, because a fused update takes no mixture of DTensors and plain
            tensors.
        node_size: ranks on one machine; default 8.

    Returns:
        The peak by category, for the whole step and for each of its parts. Only tensors count, not CUDA's context, the
            allocator's fragmentation, or workspaces of kernels.

    Raises:
        ValueError: for an unknown model, precision, optimizer or device, an impossible batch, sequence or number of
            micro-batches, a precision or model that cannot be trained on these ranks, or a model whose shapes depend on
            its data.
        RuntimeError: for several ranks, if this process is itself one of several (``torchrun``).
    """
    with step_of(
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
def step_of(
    source: PreTrainedConfig | nn.Module, precision: str | torch.dtype, *, device: str = "cuda", **given: Any
) -> Iterator[Callable[[int], TrainingMemory]]:
    """What predicts the memory of a step from its batch size; all of them are taken by one model and optimizer.

    Arguments are those of :func:`estimate_training_memory`, ``batch_size`` the first that is asked for.
    """
    settings = make_settings(source, precision, **given)
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} cannot be predicted for: use 'cuda' or 'cpu'")
    check_device(settings, device)
    target = STAND_IN if device == "cuda" else torch.device("cpu")
    preset, ranks, parallel = parse_preset(precision), settings.ranks, settings.parallel
    if preset.lora and ranks > 1 and parallel != "ddp":
        raise ValueError(f"parallel={parallel!r} cannot shard quantized weights of precision={precision!r}: use 'ddp'")
    communication = CommunicationRecorder(settings.node_size) if ranks > 1 else None
    planned = skeleton(source, preset.loaded)
    # Before FSDP2 gives it another class.
    inputs, name, parameters = Inputs.of(planned, settings.precision), type(planned).__name__, planned.num_parameters()
    prepared, recorder = prepare_model(planned, settings), MemoryRecorder(target)
    on_host = contextlib.nullcontext() if settings.offload is None else host_memory_of(recorder)
    with one_rank_of(settings, target) as mesh, fake_tensors(target), on_host:
        replace_tensors(prepared, target)
        if communication is not None and parallel == "tp":
            make_tensor_parallel(planned, ranks)
        trainee = make_trainee(shard(prepared, mesh), settings, target)
        _finish(trainee, settings)
        with recording(trainee, recorder, communication) as profile_of:

            def predict(batch_size: int) -> TrainingMemory:
                asked = replace(settings, batch_size=batch_size)
                profile = profile_of(make_batch(inputs, asked, target))
                return TrainingMemory(
                    **vars(profile),
                    model=name,
                    parameters=parameters,
                    settings=asked,
                    device=device,
                    measured=False,
                    communication=() if communication is None else communication.collectives(),
                    host_bytes=host_bytes_of(trainee),
                    copied_bytes=max(vars(recorder.copied).values()),
                )

            yield predict


def _finish(trainee: Trainee, settings: TrainingSettings) -> None:
    """What a trainee of fake tensors needs besides: DDP around it, and a scaler that keeps none of them."""
    runtime = trainee.runtime
    if settings.ranks > 1 and settings.parallel == "ddp":
        has_hook = runtime is not None and runtime.policy.reduce_dtype is not torch.float32
        trainee.forward = under_ddp(trainee.forward, layout_has_hook=has_hook)
    if runtime is not None:
        # An update joins gradients of one scale, which it tells by the tensor that holds it.
        runtime.scaler.scale_and_inverse = functools.cache(runtime.scaler.scale_and_inverse)  # type: ignore[method-assign]


@contextlib.contextmanager
def fake_tensors(device: torch.device) -> Iterator[None]:
    """Have no tensor of a training on ``device`` take memory: on a CPU by fake ones, for a GPU on the meta device."""
    fused = [*_get_fused_kernels_supported_devices(), STAND_IN.type]
    with (
        warnings.catch_warnings(),
        quiet_bitsandbytes(),  # it remarks on each product that it casts
        # Constants that libraries keep are real tensors. Those on the meta device need no mode, which takes most of the
        # time of an op.
        contextlib.nullcontext() if device == STAND_IN else FakeTensorMode(allow_non_fake_inputs=True),
        AnswerAsIfAllWentWell(),
        # Under tracing, Transformers makes masks that training does not.
        mock.patch.object(import_utils, "is_fake_tensor", lambda value: False),
        # The meta device stands for a GPU, which has fused updates.
        mock.patch.object(torch_optimizer, "_get_fused_kernels_supported_devices", lambda: fused),
        kernels_of_a_gpu() if device == STAND_IN else contextlib.nullcontext(),
    ):
        # Working copies compare addresses, which are 0 for all fake tensors.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        try:
            yield
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise ValueError(
                f"shapes or decisions of the model depend on its data (in {error.func}), so its memory cannot be "
                "predicted: measure it (hf_mp.measure_training_memory)"
            ) from error


def prepare_model(model: PreTrainedModel, settings: TrainingSettings) -> nn.Module:
    """Prepare a loaded model, real or on the meta device, for training."""
    config = config_of(model)
    config.use_cache = False  # as the Trainer sets it
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        # The decoder reads the labels behind this token, and no size depends on which it is.
        config.decoder_start_token_id = 0
    if parse_preset(settings.precision).lora:
        return _with_adapters(model, settings.gradient_checkpointing)
    if settings.gradient_checkpointing:
        # its name from Transformers 5.23 on, and the one before
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def make_trainee(model: nn.Module, settings: TrainingSettings, device: torch.device) -> Trainee:
    """Precision and optimizer for a prepared model."""
    preset = parse_preset(settings.precision)
    # Dropout is part of what training takes.
    model.train()
    runtime = None
    if preset.policy is not None:
        clipped = _MAX_GRAD_NORM if settings.free_gradients == "backward" else None
        given: Any = {"free_gradients": settings.free_gradients, "offload": settings.offload}
        runtime = MixedPrecision(preset.policy, max_grad_norm=clipped, **given)
        runtime.attach(model)
    optimizer = make_optimizer(settings.optimizer, model, device)
    if runtime is not None:
        optimizer = runtime.attach_optimizer(optimizer)
    if preset.autocast is not None:
        # As accelerate's prepare_model does for fp16=True and bf16=True.
        # Stacked experts, which only our tables have, torch.autocast leaves in FP32.
        stand_in = autocast(preset.autocast, rules={torch._grouped_mm: "unlisted"})
        inside = stand_in if device == STAND_IN else torch.autocast(device.type, preset.autocast)
        model.forward = convert_outputs_to_fp32(inside(model.forward))
    return Trainee(model, model, optimizer, settings.accumulation_steps, runtime)


def host_bytes_of(trainee: Trainee) -> int:
    """The bytes of the host that offload has taken."""
    if trainee.runtime is None or trainee.runtime.offload is None:
        return 0
    optimizer: Any = trainee.optimizer
    places = [*optimizer.rooms.values(), *(p.place.rooms for p in trainee.model.parameters() if hasattr(p, "place"))]
    slabs = {id(room.slab): room.slab for rooms in places for room in rooms.values()}
    return sum(slab.nbytes for slab in slabs.values())


def _with_adapters(model: PreTrainedModel, gradient_checkpointing: bool) -> nn.Module:
    """A frozen, quantized model with LoRA adapters, as in peft's guide to quantization; experts stay in 16 bits."""
    with quiet_bitsandbytes():
        from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    # Transformers warns about a name that peft reads.
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        # It casts all that is not quantized to FP32, stacked experts too, which are most of a model.
        experts = {p: p.data for module in model.modules() if has_stacked_experts(module) for p in module.parameters()}
        prepared = prepare_model_for_kbit_training(model, use_gradient_checkpointing=gradient_checkpointing)
        for parameter, data in experts.items():
            parameter.data = data
        try:
            return get_peft_model(prepared, LoraConfig())
        except ValueError:  # peft knows no usual layers for this architecture
            return get_peft_model(prepared, LoraConfig(target_modules="all-linear"))


def make_optimizer(name: str, model: nn.Module, device: torch.device) -> Optimizer:
    """The Trainer's optimizer for ``TrainingArguments(optim=name)``, with its two parameter groups."""
    try:
        with quiet_bitsandbytes():
            kind, settings = _optimizer_class(name, model)
    except (ValueError, ImportError, KeyError) as error:
        raise ValueError(f"optimizer={name!r} cannot be made: {error}") from error
    settings["lr"] = 0.0  # leaves a given model's weights unchanged
    if kind.__module__.startswith("torch.optim.") and not settings.get("fused"):
        has_dtensors = any(map(is_dtensor, model.parameters()))
        settings.setdefault("foreach", device.type != "cpu" and not has_dtensors)  # torch's, but not for fake tensors
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # As the Trainer has them: no decay for biases and norms.
    # Each group is updated by a call of its own, so that they matter for what is in use at once.
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() >= 2], "weight_decay": 0.01},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    return kind([group for group in groups if group["params"]], **settings)


def _optimizer_class(name: str, model: nn.Module | None) -> tuple[Any, dict[str, Any]]:
    """As ``Trainer.get_optimizer_cls_and_kwargs`` for ``TrainingArguments(optim=name)``."""
    from transformers.training_args import OptimizerNames, TrainingArguments

    # Without its device setup, which resets accelerate's state. The class has the defaults.
    args: Any = object.__new__(TrainingArguments)
    args.optim, args.distributed_state, args._n_gpu = OptimizerNames(name), None, 1  # one process
    try:
        from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS, OptimizerContext
    except ImportError:
        from transformers import Trainer

        return Trainer.get_optimizer_cls_and_kwargs(args, cast(Any, model))
    # The Trainer's table, without the Trainer, which imports datasets and pandas.
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    context = OptimizerContext(args, cast(Any, model), {"lr": args.learning_rate}, adam, optim_args={})
    return _OPTIMIZER_HANDLERS[args.optim](context)


@contextlib.contextmanager
def recording(
    trainee: Trainee, recorder: MemoryRecorder, communication: CommunicationRecorder | None = None
) -> Iterator[Callable[[dict[str, Any]], StepProfile]]:
    """What trains on a batch until the highest step was seen, and gives its profile.

    ``communication`` has counted the last of these steps.
    """

    def profile_of(batch: dict[str, Any]) -> StepProfile:
        recorder.take(tensors_in(batch), Category.INPUTS_AND_BUFFERS)
        profiles: list[StepProfile] = []
        updates = max(_RECORDED_UPDATES, trainee.updates + 1)
        # A step that the loss scale skips is no update.
        while trainee.updates < updates and len(profiles) < _MOST_STEPS:
            recorder.ledger.start_step()
            recorder.copied = CopiedBytes()
            if communication is not None:
                communication.start()
            trainee.updates += train_one_step(trainee, batch, recorder.start_phase)
            recorder.take(tensors_in(list(trainee.optimizer.state.values())), Category.OPTIMIZER_STATE)
            trainee.optimizer.zero_grad()
            profiles.append(profile_step(recorder.ledger.events))
        # What every step reaches counts more than what only the first one does, where they are equal.
        return max(reversed(profiles), key=lambda profile: profile.peak_bytes)

    if trainee.runtime is not None and trainee.runtime.offload is not None:
        recorder.take(trainee.optimizer.transfers.windows, Category.OFFLOAD_WINDOWS)  # type: ignore[attr-defined]
    if (runtime := trainee.runtime) is not None and runtime.scaler.is_scaling:  # no op of a step makes its scale
        recorder.take(runtime.scaler.scale_and_inverse(recorder.device), Category.TEMPORARIES)
    with recorder.following(trainee.model), communication or contextlib.nullcontext(), recorder:
        yield profile_of


def _loss_of(trainee: Trainee, batch: dict[str, Any]) -> Any:
    """The loss of a forward.

    Raises:
        ValueError: for a model that does not take inputs of these shapes, or returns no loss for them.
    """
    name = type(trainee.model).__name__
    try:
        loss = getattr(trainee.forward(**batch), "loss", None)
    except (DynamicOutputShapeException, DataDependentOutputException, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:  # as its modules raise them
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
    trainee: Trainee, batch: dict[str, Any], start_phase: Callable[[Phase], None] = lambda phase: None
) -> bool:
    """Forward, backward, clipping and update, and whether there was one; the caller clears the gradients."""
    micro_batches = min(trainee.accumulation_steps, _RECORDED_MICRO_BATCHES)
    for _ in range(micro_batches):
        start_phase(Phase.FORWARD)
        loss = _loss_of(trainee, batch)
        if micro_batches > 1:
            loss = loss / micro_batches
        start_phase(Phase.BACKWARD)
        loss.backward()
        del loss
    start_phase(Phase.UPDATE)
    if isinstance(trainee.optimizer, MasterWeightOptimizer):
        trainee.optimizer.clip_grad_norm_(_MAX_GRAD_NORM)
    else:
        clip: Any = Accelerator._clip_grad_norm_dtensor_aware  # Accelerator.clip_grad_norm_, which reads no other state
        clip(None, [p for p in trainee.model.parameters() if p.requires_grad], _MAX_GRAD_NORM)
    trainee.optimizer.step()
    return trainee.runtime is None or not trainee.runtime.step_was_skipped
