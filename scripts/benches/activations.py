"""The tensors that a training step of GPT-2 774M keeps for backward, and its peak: ours, the Trainer's, leaner ones.

    python scripts/bench.py activations
    python scripts/bench.py activations --model gpt2 --batch-size 1

On tensors without memory, so that no GPU is needed. Liger's kernels are written in Triton, need one, and are for other
models: ``torch.nn.functional.linear_cross_entropy`` in chunks represents its fused loss, which keeps no logits either,
and torch's GELU in one op its activations. The chunks themselves are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear_cross_entropy
from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions
from transformers.modeling_outputs import CausalLMOutput

from hf_mp.memory.batches import Inputs, make_batch
from hf_mp.memory.command import quiet_libraries
from hf_mp.memory.fake_tensors import FAKE_GPU_DEVICE
from hf_mp.memory.ledger import Category, Event, Phase
from hf_mp.memory.models import find_config, meta_model, replace_tensors
from hf_mp.memory.recorder import MemoryRecorder
from hf_mp.memory.settings import make_settings
from hf_mp.memory.training import fake_tensors, make_training_setup, prepare_model, recording

_KEPT = (Category.ACTIVATIONS, Category.LOGITS_AND_LOSS)
CONTENDERS: dict[str, dict[str, Any]] = {
    "Trainer fp16=True": {"precision": "trainer-fp16"},
    "Trainer fp16=True, GELU in one op": {"precision": "trainer-fp16", "fused": True},
    "Trainer fp16=True, loss in chunks": {"precision": "trainer-fp16", "chunks": True},
    "Trainer fp16=True, both": {"precision": "trainer-fp16", "fused": True, "chunks": True},
    "Trainer fp16=True, gradient checkpointing": {"precision": "trainer-fp16", "gradient_checkpointing": True},
    "hf_mp fp16": {"precision": "fp16"},
    "hf_mp fp16, gradient checkpointing": {"precision": "fp16", "gradient_checkpointing": True},
    "hf_mp fp16-lean": {"precision": "fp16-lean"},
    "hf_mp fp16-lean, gradient checkpointing": {"gradient_checkpointing": True, "precision": "fp16-lean"},
}


def measure(model: str = "gpt2-large", batch_size: int = 8, seq_len: int = 1024) -> dict[str, Any]:
    """The peak of each, and the bytes that forward leaves for backward, by op."""
    quiet_libraries()
    shape: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len}
    rows = {name: take_step(model, **shape, **settings) for name, settings in CONTENDERS.items()}
    return {"model": model, **shape, "contenders": rows}


def take_step(name: str, *, fused: bool = False, chunks: bool = False, **settings: Any) -> dict[str, Any]:
    """One row."""
    config: Any = find_config(name)
    if fused:  # by its configuration, GPT-2 has the same function as eight ops of Python
        config.activation_function = "gelu_pytorch_tanh"
    asked = make_settings(config, **settings)
    planned = meta_model(config, "fp32")
    batch_of = Inputs.of(planned, asked.precision)
    if chunks:
        planned.forward = with_loss_in_chunks(planned)
    prepared = prepare_model(planned, asked)
    recorder = MemoryRecorder(FAKE_GPU_DEVICE)
    with fake_tensors(FAKE_GPU_DEVICE):
        replace_tensors(prepared, FAKE_GPU_DEVICE)
        setup = make_training_setup(prepared, asked, FAKE_GPU_DEVICE)
        with recording(setup, recorder) as profile_of:
            profile = profile_of(make_batch(batch_of, asked, FAKE_GPU_DEVICE))
    kept = left_by_forward(recorder.ledger.events)
    return {
        "peak_bytes": profile.peak_bytes,
        "peak_in": profile.peak_phase.value,
        "kept_bytes": kept.total(),
        "kept_bytes_by_op": dict(kept.most_common(12)),
    }


def left_by_forward(events: list[Event]) -> Counter[str]:
    """Bytes of activations and logits that are in use when backward begins, by the op that made them."""
    found: Counter[str] = Counter()
    ops: dict[int, str] = {}
    for event in events:
        if event.phase is Phase.BACKWARD:
            break
        if event.phase is Phase.FORWARD and event.sign > 0:
            ops[id(event.allocation)] = event.op
        if event.allocation.category in _KEPT and id(event.allocation) in ops:
            found[ops[id(event.allocation)]] += event.sign * event.allocation.size_bytes
    return found


def with_loss_in_chunks(model: Any) -> Callable[..., CausalLMOutput]:
    """The forward of a GPT-2 that makes its logits and their gradients chunk by chunk, and none of them whole."""
    decoder: nn.Module = model.transformer

    def forward(input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        hidden = decoder(input_ids=input_ids)[0][:, :-1].flatten(0, 1)
        loss = linear_cross_entropy(
            hidden, model.lm_head.weight, labels[:, 1:].flatten(), options=LinearCrossEntropyOptions()
        )
        return CausalLMOutput(loss=loss)

    return forward
