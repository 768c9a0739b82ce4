"""Working copies handed over to an engine: by name, and as a directory in Transformers' format."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_runs import tiny_gpt2
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

import hf_mp
from hf_mp.trainer.weight_export import working_copies
from hf_mp.weights.split_parameter import SplitParameter

PRESETS = ("fp16", "bf16", "fp16-lean", "bf16-lean")


def trained(precision: str, batch: dict[str, Tensor], steps: int = 2) -> tuple[GPT2LMHeadModel, Any]:
    model = tiny_gpt2()
    model, optimizer = hf_mp.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), precision)
    for _ in range(steps):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("precision", PRESETS)
def test_they_are_what_the_forward_reads(batch: dict[str, Tensor], precision: str) -> None:
    model, _ = trained(precision, batch)
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16
    copies, masters = dict(working_copies(model)), model.state_dict()
    assert list(copies) == [name for name, _ in model.named_parameters()]
    for name, copy in copies.items():
        assert copy.dtype is dtype and not copy.requires_grad
        torch.testing.assert_close(copy.float(), masters[name].detach(), rtol=2.0**-8, atol=1e-7)
    products = {name: copy.float() for name, copy in copies.items() if ".c_" in name and name.endswith("weight")}
    assert len(products) == 4
    assert any(not torch.equal(value, masters[name]) for name, value in products.items())
    twin = tiny_gpt2()
    twin.load_state_dict({**masters, **products})
    twin, _ = hf_mp.prepare(twin, torch.optim.SGD(twin.parameters()), precision)  # type: ignore[assignment]
    assert torch.equal(twin(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("precision", PRESETS)
def test_each_step_is_handed_over(batch: dict[str, Tensor], precision: str) -> None:
    model, optimizer = trained(precision, batch)
    before = {name: copy.clone() for name, copy in working_copies(model)}
    optimizer.param_groups[0]["lr"] = 0.1
    model(**batch).loss.backward()
    optimizer.step()
    after = dict(working_copies(model))
    assert all(not torch.equal(before[name], after[name]) for name in before)
    with torch.no_grad():  # and what is written from outside
        model.transformer.ln_f.bias.fill_(0.25)
        model.lm_head.weight.fill_(0.5)
    after = dict(working_copies(model))
    assert after["transformer.ln_f.bias"].eq(0.25).all() and after["transformer.wte.weight"].eq(0.5).all()


class Largest32(TorchDispatchMode):
    """The largest FP32 tensor that anything makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {given.untyped_storage()._cdata for given in args if isinstance(given, Tensor)}
        is_new = isinstance(result, Tensor) and result.untyped_storage()._cdata not in before
        if is_new and result.dtype is torch.float32:
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("precision", PRESETS)
def test_no_fp32_copy_is_made_and_no_copy_is_kept(batch: dict[str, Tensor], precision: str) -> None:
    model, _ = trained(precision, batch)
    runtime = model.forward.runtime  # type: ignore[attr-defined]
    kept = len(runtime.weights.layout.copies)
    with Largest32() as largest:
        copies = dict(working_copies(model))
    assert largest.elements <= 1
    assert len(runtime.weights.layout.copies) == kept
    weight = model.transformer.h[0].mlp.c_fc.weight
    own = weight if isinstance(weight, SplitParameter) else runtime.weights.layout.copies.get(weight)
    assert copies["transformer.h.0.mlp.c_fc.weight"].data_ptr() == own.data_ptr()


@pytest.mark.parametrize("precision", PRESETS)
def test_a_directory_of_them_loads_as_it_was_saved(tmp_path: Path, batch: dict[str, Tensor], precision: str) -> None:
    model, _ = trained(precision, batch)
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16
    model.save_pretrained(tmp_path / "engine", state_dict=dict(working_copies(model)))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "engine", dtype=dtype)
    copies = dict(working_copies(model))
    assert (tmp_path / "engine" / "model.safetensors").stat().st_size < 2 * loaded.num_parameters() + 8192
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype is dtype and torch.equal(parameter, copies[name]), name
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    # the training goes on as if nothing had been: its own checkpoints are in FP32
    model.save_pretrained(tmp_path / "own")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "own").dtype is torch.float32


class Client:
    """What TRL's ``VLLMClient.update_named_params`` asks of what it is given."""

    received: dict[str, Tensor]

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, Tensor]]
    ) -> None:
        self.received = dict(named_params)
        told = [(name, dtype, shape) for name, dtype, shape in metadata]
        sent = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in self.received.items()]
        assert told == sent


def test_the_protocol_of_trls_client(batch: dict[str, Tensor]) -> None:
    model, _ = trained("fp16", batch)
    metadata = [(n, str(c.dtype).removeprefix("torch."), list(c.shape)) for n, c in working_copies(model)]
    client = Client()
    client.update_named_params(metadata, working_copies(model))
    assert client.received.keys() == dict(model.named_parameters()).keys()
    assert {copy.dtype for copy in client.received.values()} == {torch.float16}
    theirs = pytest.importorskip("trl.generation.vllm_client").VLLMClient.update_named_params
    assert list(inspect.signature(theirs).parameters) == list(inspect.signature(Client.update_named_params).parameters)


def test_a_model_of_ones_own_is_handed_over_by_name() -> None:
    layer = nn.Linear(2, 2)
    layer, _ = hf_mp.prepare(layer, torch.optim.SGD(layer.parameters()), "bf16")  # type: ignore[assignment]
    assert {name: copy.dtype for name, copy in working_copies(layer)} == dict.fromkeys(
        ["weight", "bias"], torch.bfloat16
    )
    runtime = layer.forward.runtime  # type: ignore[attr-defined]
    runtime.detach()
    with pytest.raises(
        ValueError, match=r"was detached from this model, as it is when a training ends: .*keep_attached=True"
    ):
        working_copies(runtime)
