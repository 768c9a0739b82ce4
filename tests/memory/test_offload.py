"""The memory of a step with offload: what is left on the GPU, what the host holds, and what is copied."""

from __future__ import annotations

import json

import pytest
from covering import covering
from transformers import LlamaConfig
from typer.testing import CliRunner

import hf_mp
from hf_mp import cli
from hf_mp.memory.ledger import Category, Phase
from hf_mp.weights.offload import transfers

STEP = {"batch_size": 1, "seq_len": 8}
MIB = 2**20


def where_weights_dominate(**settings: object) -> LlamaConfig:
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8}
    return LlamaConfig(
        **sizes, vocab_size=256, max_position_embeddings=64, architectures=["LlamaForCausalLM"], **settings
    )


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "WINDOW_BYTES", MIB)


@pytest.mark.parametrize(
    ("precision", "case"),
    covering(
        ["bf16-lean", "fp16-lean"],
        [("optimizer", 1, 10, 2), ("optimizer", 2, 10, 4), ("all", 1, 12, 0), ("all", 2, 14, 0)],
        together=1,
    ),
)
def test_bytes_of_a_parameter(precision: str, case: tuple[str, int, int, int]) -> None:
    offload, micro_batches, on_host, gradients = case
    found = hf_mp.estimate_training_memory(
        where_weights_dominate(), precision, offload=offload, accumulation_steps=micro_batches, **STEP
    )
    assert found.host_bytes / found.parameters == pytest.approx(on_host, rel=0.01)
    at_update = found.by_phase[Phase.UPDATE]
    assert at_update[Category.WORKING_COPIES] / found.parameters == pytest.approx(2, rel=0.02)
    assert at_update[Category.GRADIENTS] / found.parameters == pytest.approx(gradients, abs=0.1)
    assert at_update[Category.MASTER_WEIGHTS] == 0 and at_update[Category.OPTIMIZER_STATE] < 0.05 * MIB
    assert 1.5 * MIB < at_update[Category.OFFLOAD_WINDOWS] <= 2.1 * MIB
    # Remainders and moments go both ways; gradients are copied out, and come back for the update or a sum.
    moved = 10 + {("all", 1): 2, ("all", 2): 4 + 2}.get((offload, micro_batches), 0)
    assert found.copied_bytes / found.parameters == pytest.approx(moved, rel=0.02)


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_the_windows_of_a_small_model_are_small(offload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "WINDOW_BYTES", 256 * MIB)
    found = hf_mp.estimate_training_memory(where_weights_dominate(), "bf16-lean", offload=offload, **STEP)
    windows = found.by_phase[Phase.UPDATE][Category.OFFLOAD_WINDOWS]
    assert found.host_bytes / 5 < windows < found.host_bytes / 4 + 2 * MIB


def test_a_tied_weight_has_room_for_a_sum() -> None:
    config = where_weights_dominate(tie_word_embeddings=True)
    found = hf_mp.estimate_training_memory(config, "bf16-lean", offload="all", **STEP)
    assert found.host_bytes == pytest.approx(12 * found.parameters + 2 * 256 * 512, rel=0.001)


def test_moments_of_8_bits_halve_the_hosts_memory() -> None:
    pytest.importorskip("bitsandbytes")
    settings = {"offload": "optimizer", "optimizer": "adamw_bnb_8bit"}
    found = hf_mp.estimate_training_memory(where_weights_dominate(), "bf16-lean", **settings, **STEP)
    assert 4 < found.host_bytes / found.parameters < 4.7


def test_a_gradient_is_freed_as_soon_as_it_is_copied() -> None:
    """A backward holds the gradients of what leaves together, and no others."""
    peaks = {}
    for layers in (4, 8):
        config = where_weights_dominate()
        config.num_hidden_layers = layers
        found = hf_mp.estimate_training_memory(config, "bf16-lean", offload="all", gradient_checkpointing=True, **STEP)
        peaks[layers] = found.by_phase[Phase.BACKWARD][Category.GRADIENTS] / MIB
    assert peaks[8] < peaks[4] + 1


@pytest.mark.slow
def test_the_command_shows_the_lean_presets_and_both_memories(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    where_weights_dominate().save_pretrained(tmp_path)
    line = ["memory", str(tmp_path), "--train", "--seq-len", "8", "--offload", "all", "--gpu", "64MiB"]
    result = CliRunner().invoke(cli.app, line)
    assert result.exit_code == 0, result.output
    told = " ".join(result.stdout.split())
    for words in ("1 x 8 tokens, offload='all'", "hf_mp hf_mp fp16-lean bf16-lean", "offload windows, MiB"):
        assert words in told
    assert "host memory, MiB" in told and "copies at 25 GB/s 0.01 s 0.01 s" in told and "largest batch" in told
    found = json.loads(CliRunner().invoke(cli.app, [*line, "--json", "--precision", "bf16-lean"]).stdout)
    estimate = found["training"]["bf16-lean"]["estimate"]
    assert estimate["settings"]["offload"] == "all"
    assert estimate["host_bytes"] > estimate["copied_bytes"] * 0.9 > 10 * found["parameters"] * 0.9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cpu"}, r"offload='all' moves memory from a GPU to the host.*use 'cuda', or leave offload out"),
        ({"ranks": 2}, r"needs whole weights on each rank, and parallel='fsdp2' shards them: use 'ddp'"),
        ({"precision": "fp16"}, r"needs a lean layout.*use 'fp16-lean' or 'bf16-lean'"),
        ({"offload": "cpu"}, r"offload='cpu' is not known: use 'optimizer' or 'all'"),
        ({"free_gradients": "backward"}, r"free_gradients='backward' updates each parameter"),
    ],
)
def test_what_cannot_be_predicted_is_refused(settings: dict[str, object], message: str) -> None:
    given = {"precision": "bf16-lean", "offload": "all", **STEP, **settings}
    with pytest.raises(ValueError, match=message):
        hf_mp.estimate_training_memory(where_weights_dominate(), **given)


def test_a_step_on_a_cpu_is_not_measured_with_offload() -> None:
    with pytest.raises(ValueError, match=r"moves memory from a GPU to the host"):
        hf_mp.measure_training_memory(where_weights_dominate(), "bf16-lean", device="cpu", offload="all", **STEP)


def test_ranks_of_ddp_have_host_memory_each() -> None:
    settings = {"offload": "all", "ranks": 2, "parallel": "ddp"}
    found = hf_mp.estimate_training_memory(where_weights_dominate(), "bf16-lean", **settings, **STEP)
    assert found.host_bytes / found.parameters == pytest.approx(12, rel=0.01)


def test_nothing_is_left_behind() -> None:
    from hf_mp.weights.offload import host_memory

    before = host_memory.allocate, host_memory.free_bytes
    hf_mp.estimate_training_memory(where_weights_dominate(), "bf16-lean", offload="optimizer", **STEP)
    assert (host_memory.allocate, host_memory.free_bytes) == before
