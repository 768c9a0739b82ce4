from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import hf_mp
from hf_mp.memory.footprint import Kind, memory_footprint

from .conftest import storages_of


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    return model


def test_a_tied_weight_counts_once():
    footprint = memory_footprint(tied())
    assert footprint.total_bytes == 10 * 4 * 4
    alias = footprint.rows[1]
    assert (alias.shared_with, alias.counted_bytes, alias.tensor_bytes) == ("0.weight", 0, 160)
    assert footprint.transformers_bytes == 160


def test_modules_add_up(gpt2):
    found = memory_footprint(gpt2).by_module
    assert found[""] == found["transformer"] == gpt2.get_memory_footprint()
    assert found["lm_head"] == 0  # tied
    assert found["transformer"] == sum(found[f"transformer.{name}"] for name, _ in gpt2.transformer.named_children())


def test_parameters_that_share_memory_without_being_one_count_once():
    model = nn.Module()
    whole = torch.zeros(8, 4)
    model.upper, model.lower = nn.Parameter(whole[:4]), nn.Parameter(whole[4:])
    footprint = memory_footprint(model)
    assert footprint.total_bytes == 8 * 4 * 4
    assert footprint.transformers_bytes == 8 * 4 * 4
    assert [row.counted_bytes for row in footprint.rows] == [128, 0]


def test_buffers_gradients_and_plain_attributes_have_kinds_of_their_own():
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(3))
    model.weight.grad = torch.zeros(3)
    model.register_buffer("kept", torch.zeros(5, dtype=torch.float16))
    model.register_buffer("not_saved", torch.zeros(7, dtype=torch.int8), persistent=False)
    model.table = torch.zeros(2)
    model.tables = [torch.zeros(1), {"x": torch.zeros(4)}]
    footprint = memory_footprint(model)
    assert footprint.by_kind == {"parameters": 12, "buffers": 17, "gradients": 12, "plain attributes": 28}
    assert footprint.by_dtype == {"float32": 52, "float16": 10, "int8": 7}
    assert footprint.total_bytes == storages_of(model) == 69
    assert footprint.transformers_bytes == 12 + 17


def test_attributes_that_refer_to_each_other_are_no_containers():
    @dataclass(eq=False)
    class Node:
        parent: Any = None
        children: list[Any] = field(default_factory=list)

    model = nn.Linear(3, 3)
    model.tree = Node()
    model.tree.children.append(Node(parent=model.tree))
    assert memory_footprint(model).total_bytes == 48


def test_meta_tensors_are_named_and_hold_nothing():
    model = nn.Linear(4, 4, device="meta")
    footprint = memory_footprint(model)
    assert footprint.total_bytes == 0
    assert [row.device for row in footprint.rows] == ["meta", "meta"]
    assert footprint.transformers_bytes == 80
    assert memory_footprint(model, as_if_loaded=True).total_bytes == 80


def test_offloaded_tensors_are_listed_and_not_in_the_total(tmp_path):
    on_disk = nn.Sequential(nn.Linear(4, 4))
    disk_offload(on_disk, str(tmp_path), execution_device="cpu")
    for model in (on_disk, cpu_offload(nn.Sequential(nn.Linear(4, 4)), execution_device="cpu")):
        assert sum(row.tensor_bytes for row in memory_footprint(model).rows) == 80
        assert memory_footprint(model).total_bytes == 0


def test_a_lean_model_shows_what_its_parameters_lack_of_fp32(gpt2):
    elements = sum(parameter.numel() for parameter in gpt2.parameters())
    hf_mp.MixedPrecision("fp16-lean").attach(gpt2)
    by_kind = memory_footprint(gpt2).by_kind
    assert by_kind == {"parameters": 2 * elements, "master weights": 2 * elements}


def test_looking_does_not_change_gradients_of_a_lean_model(gpt2, batch):
    hf_mp.MixedPrecision("bf16-lean").attach(gpt2)
    gpt2(**batch).loss.backward()
    for _ in range(2):  # a second look finds what the first one found
        dtypes = {row.name: row.dtype for row in memory_footprint(gpt2).rows if row.kind is Kind.GRADIENT}
        assert dtypes["transformer.h.0.attn.c_attn.weight.grad"] == "bfloat16"
        assert dtypes["transformer.wte.weight.grad"] == "float32"  # a tied weight sums its gradients in FP32


def test_what_is_not_a_model_is_refused():
    with pytest.raises(TypeError, match=r"needs a loaded model.*not str.*hf_mp\.load"):
        memory_footprint("gpt2")


def test_int8_state_is_found_before_and_after_the_first_forward(tmp_path):
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=40, n_positions=16, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = hf_mp.load(tmp_path, "int8")
    before = memory_footprint(model)
    model(input_ids=torch.zeros(1, 4, dtype=torch.long))  # moves SCB and the codes into the module's state
    after = memory_footprint(model)
    assert before.by_kind == after.by_kind
    assert after.total_bytes == storages_of(model)
    assert after.by_kind["quantization state"] == 4 * (96 + 32 + 128 + 32)


def test_evaluated_by_itself_it_is_one_readable_line():
    model = nn.Sequential(nn.Embedding(256, 1024), nn.BatchNorm1d(4))
    footprint = memory_footprint(model)
    assert repr(footprint) == "<MemoryFootprint: 1.00 MiB in 6 tensors (parameters 1.00 MiB, buffers 40 B)>"
    assert repr(memory_footprint(nn.Identity())) == "<MemoryFootprint: 0 B in 0 tensors (none here)>"
