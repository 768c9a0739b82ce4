"""The plan of one rank of many; tests/distributed/test_plan.py compares it with real ranks."""

from __future__ import annotations

import re
import sys

import pytest
import torch
import torch.distributed as distributed
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from hf_mp import estimate_training_memory
from hf_mp.cli import app
from hf_mp.memory import parallel
from hf_mp.memory.ledger import Category

LAYERS, WIDTH = 2, 64


def config() -> GPT2Config:
    return GPT2Config(
        n_layer=LAYERS, n_embd=WIDTH, n_head=4, vocab_size=512, n_positions=32, bos_token_id=0, eos_token_id=0
    )


def test_what_shrinks_with_the_ranks_and_what_stays() -> None:
    eight, many = (estimate_training_memory(config(), "fp32", ranks=ranks) for ranks in (8, 64))
    kept = [found.bytes_by_category[Category.OPTIMIZER_STATE] for found in (eight, many)]
    assert kept[0] < 0.2 * 8 * eight.parameters and kept[1] < 0.5 * kept[0]  # blocks of 512 bytes are not shared
    for few, more in zip(eight.communication, many.communication, strict=True):
        assert (few.name, few.dtype) == (more.name, more.dtype)
        assert 7 / 8 * more.sent_bytes <= 1.3 * few.sent_bytes  # (n - 1) / n of the whole, and padding
    assert "one of 8 ranks, fsdp2" in repr(eight)


@pytest.mark.parametrize("preset", ["fp32", "trainer-bf16"])
def test_ddp_holds_all_and_sends_each_gradient_twice(preset: str) -> None:
    ddp = estimate_training_memory(config(), preset, ranks=4, parallel="ddp")
    assert ddp.bytes_by_category[Category.MASTER_WEIGHTS] >= 4 * ddp.parameters
    reduced = next(one for one in ddp.communication if one.name == "all-reduce" and one.dtype == "float32")
    assert reduced.sent_bytes == 2 * 4 * ddp.parameters * 3 // 4


def test_a_lean_layout_under_ddp_reduces_in_16_bits() -> None:
    found = estimate_training_memory(config(), "fp16-lean", ranks=4, parallel="ddp")
    sent = {(one.name, one.dtype): one.sent_bytes for one in found.communication if one.sent_bytes > 1024}
    # Gradients are summed in FP32 where they arrive, and their average is gathered again.
    pass_bytes = pytest.approx(2 * found.parameters * 3 / 4, rel=0.01)
    assert sent == {("all-to-all", "float16"): pass_bytes, ("all-gather", "float16"): pass_bytes}


@pytest.mark.exhaustive
def test_the_first_chunk_says_what_all_chunks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    short = estimate_training_memory(config(), "fp16-lean", ranks=48)
    monkeypatch.setattr(parallel, "_chunk_of_first_rank", _chunk_with_empty)
    assert short == estimate_training_memory(config(), "fp16-lean", ranks=48)


def test_hsdp_shards_within_a_machine_and_leaves_nothing_behind() -> None:
    hook = sys.excepthook
    found = estimate_training_memory(config(), "fp32", ranks=64, parallel="hsdp", node_size=8).communication
    ranks = {one.name: (one.ranks, one.within_node) for one in found if one.sent_bytes > 1024}
    # As many replicas as a machine has ranks: they are on several machines all the same.
    assert ranks == {"all-gather": (8, True), "reduce-scatter": (8, True), "all-reduce": (8, False)}
    assert sys.excepthook is hook
    assert not distributed.is_initialized()


def llama() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=512, max_position_embeddings=32, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def test_tensor_parallel_ranks_share_weights_and_send_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda"))  # as on a machine with GPUs
    two = estimate_training_memory(llama(), "fp16", ranks=2, parallel="tp")
    masters = two.bytes_by_category[Category.MASTER_WEIGHTS]
    if "model.embed_tokens" not in LlamaForCausalLM(llama()).tp_plan:  # Transformers 5.17
        masters -= 4 * 512 * WIDTH // 2
    assert 2 * two.parameters < masters < 1.05 * 2 * two.parameters  # norms are not shared
    assert two.settings.optimizer == "adamw_torch"
    sent = {(one.name, one.dtype): one.sent_bytes for one in two.communication}
    # Two row-wise products in each layer, of 32 tokens, in FP16; the logits' parts are gathered.
    assert sent["all-reduce", "float16"] == LAYERS * 2 * 32 * WIDTH * 2
    assert sent["all-gather", "float16"] == 32 * 512 * 2 // 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": config()}, r"needs a model with a tp_plan in .*, and GPT2LMHeadModel has none: use 'fsdp2'"),
        (
            {"precision": "bf16-lean"},
            r"precision='bf16-lean' needs whole weights.* this model is tensor parallel: use 'bf16'",
        ),
        ({"ranks": 8}, r"ranks=8 cannot share the 4 key and value heads of LlamaForCausalLM .* that divides 4"),
        ({"precision": "int8-lora"}, r"parallel='tp' cannot shard quantized weights of precision='int8-lora'"),
    ],
)
def test_impossible_tensor_parallel_plans(settings: dict[str, object], message: str) -> None:
    arguments = {"model": llama(), "precision": "fp32", "ranks": 2, "parallel": "tp", **settings}
    with pytest.raises(ValueError, match=message):
        estimate_training_memory(**arguments)  # type: ignore[arg-type]
    assert not distributed.is_initialized()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 0}, r"ranks=0 is not possible: use a whole number from 1 to 4096"),
        ({"ranks": 5000}, r"ranks=5000 is not possible"),
        ({"ranks": 8, "parallel": "zero"}, r"parallel='zero' is not known: use one of ddp, fsdp2, hsdp, tp"),
        ({"ranks": 12, "parallel": "hsdp"}, r"ranks=12 is not a multiple of node_size=8"),
        ({"ranks": 8, "parallel": "ddp", "node_size": 0}, r"node_size=0 is not possible: use a whole number from 1 on"),
        ({"ranks": 2, "precision": "int8-lora"}, r"quantized weights of precision='int8-lora': use 'ddp'"),
    ],
)
def test_impossible_plans(settings: dict[str, object], message: str) -> None:
    arguments = {"precision": "fp32", **settings}
    with pytest.raises(ValueError, match=message):
        estimate_training_memory(config(), **arguments)  # type: ignore[arg-type]


def test_not_where_ranks_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="this process is one of several already"):
        estimate_training_memory(config(), "fp32", ranks=2)


class TestCommand:
    ARGUMENTS = ("memory", "--seq-len", "32", "--precision", "fp32", "--ranks", "4")

    def run(self, tmp_path: object, *arguments: str) -> str:
        config().save_pretrained(str(tmp_path))
        result = CliRunner().invoke(app, [*self.ARGUMENTS, *arguments, str(tmp_path)])
        assert result.exit_code in (0, 2), result.output
        return " ".join(result.output.split())

    def test_table(self, tmp_path: object) -> None:
        shown = self.run(tmp_path)
        assert "one of 4 ranks, fsdp2" in shown
        assert re.search(r"sent by all-gather of 4 ranks, fp32, [KM]iB [\d.]+", shown)

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ("--ranks 1 --parallel ddp", "--parallel is for several ranks: say how many, as --ranks 64"),
            ("--precision int8-lora", "int8-lora is missing: parallel='fsdp2' cannot shard"),
            ("--parallel tp", "error: parallel='tp' needs a model with a tp_plan in Transformers, and GPT2LMHeadModel"),
        ],
    )
    def test_what_ranks_cannot_do_is_told(self, tmp_path: object, arguments: str, sentence: str) -> None:
        assert sentence in self.run(tmp_path, *arguments.split())


def test_a_planned_rank_takes_its_updates_in_fp16() -> None:
    planned = estimate_training_memory(config(), "fp16", device="cpu", ranks=2, parallel="ddp")
    assert planned.bytes_by_category[Category.OPTIMIZER_STATE] > 0
