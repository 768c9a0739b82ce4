"""``check_training``: who has no master, and what share of the updates would be lost, against updates made."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from transformers import GPT2LMHeadModel

import hf_mp

RATE = 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rate", [1e-3, 1e-5])
def test_the_share_is_what_the_first_step_of_adam_loses(gpt2, batch, dtype, rate) -> None:
    model = gpt2.to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter, dtype=torch.float32).to(dtype) + 0.01
    optimizer = AdamW(model.parameters(), lr=rate, weight_decay=0.0, eps=0.0)
    check = hf_mp.check_training(model, optimizer)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    for row in check.parameters:
        kept = (before[row.name] == model.get_parameter(row.name)).float().mean().item()
        assert row.lost_share == pytest.approx(kept, abs=0.05)
    kept = sum(int((before[name] == one).sum()) for name, one in model.named_parameters())
    assert check.lost_share == pytest.approx(kept / sum(one.numel() for one in model.parameters()), abs=0.02)


def test_the_updates_of_sgd_are_not_known(gpt2, batch) -> None:
    model = gpt2.to(torch.bfloat16)
    check = hf_mp.check_training(model, SGD(model.parameters(), lr=1e-2))
    assert check.lost_share is None and "how many of their updates would be lost is not known" in str(check)
    assert "and an unknown share of their updates at learning rate 0.01" in check.advice


@pytest.mark.parametrize("precision", ["bf16", "bf16-lean", "whole", "fp32"])
def test_who_has_masters_has_nothing_to_be_told(gpt2, precision) -> None:
    model = gpt2 if precision == "fp32" else gpt2.to(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=RATE)
    assert precision == "fp32" or len(hf_mp.check_training(model, optimizer).without_masters) == 28
    if precision == "whole":
        optimizer = hf_mp.MasterWeightOptimizer(optimizer)
    elif precision != "fp32":
        model, optimizer = hf_mp.prepare(model, optimizer, precision)
    check = hf_mp.check_training(model, optimizer)
    assert check.without_masters == () and check.advice == ""
    assert check.lost_share < 1e-3
    assert str(check) == (
        "all 28 trained parameters are FP32 or have FP32 masters, and 0.0% of all updates would be lost"
    )


def test_it_says_what_to_do(gpt2: GPT2LMHeadModel) -> None:
    gpt2.transformer.h.to(torch.bfloat16)
    gpt2.transformer.wpe.requires_grad_(False)
    check = hf_mp.check_training(gpt2, AdamW(gpt2.parameters(), lr=RATE))
    assert all(".h." in name for name in check.without_masters) and len(check.without_masters) == 24
    assert "wpe" not in str(check)
    rows = {one.name: one for one in check.parameters}
    assert rows["transformer.h.0.ln_1.weight"].lost_share == 1.0  # they are 1, and 1 - 1e-5 is 1 in BF16
    assert rows["transformer.h.0.ln_1.bias"].lost_share == 0.0  # they are 0
    assert [risk.kind for risk in check.risks] == ["no masters"]
    assert "99,968 of 112,832 weights are bf16 without an FP32 master" in check.advice
    assert "at learning rate 1e-05 are less than half a unit in the last place" in check.advice
    assert "way out: give them masters: MixedPrecisionCallback('bf16')" in check.advice
    assert str(check).startswith("24 of 27 trained parameters have no FP32 master, and ")


def test_a_warm_up_counts_with_the_rate_that_it_reaches(gpt2) -> None:
    optimizer = AdamW(gpt2.to(torch.bfloat16).parameters(), lr=1e-3)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    assert optimizer.param_groups[0]["lr"] == 0.0
    check = hf_mp.check_training(gpt2, optimizer)
    assert check.learning_rate == 1e-3
    assert check.lost_share == hf_mp.check_training(gpt2, AdamW(gpt2.parameters(), lr=1e-3)).lost_share


@pytest.mark.parametrize(
    "setting", [{"kahan_sum": True}, {"kahan_sum": None}, {"bf16_stochastic_round": True}, "state"]
)
def test_an_optimizer_that_keeps_bits_itself_is_no_risk(setting) -> None:
    """By the names that optimi and torchao have for it: a setting, an attribute, or an entry of its state."""
    weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    model = nn.ParameterList([weight])
    optimizer = AdamW([weight], lr=1e-3)
    assert hf_mp.check_training(model, optimizer).risks
    if setting == "state":
        optimizer.state[weight]["kahan_comp"] = torch.zeros_like(weight)
    elif "kahan_sum" in setting:
        optimizer.defaults.update(setting)
    else:
        vars(optimizer).update(setting)
    check = hf_mp.check_training(model, optimizer)
    assert check.lost_share == check.parameters[0].lost_share == 0.0 and check.risks == () and check.advice == ""
    assert str(check) == ("1 of 1 trained parameters have no FP32 master, and the optimizer keeps small updates itself")
    optimizer.defaults["kahan_sum"] = optimizer.bf16_stochastic_round = False
    optimizer.state[weight] = {"kahan_comp": None}  # as of optimi, where it is off
    assert hf_mp.check_training(model, optimizer).risks


@pytest.mark.parametrize(
    "make",
    [
        lambda one: SGD(one, lr=1e-3),
        lambda one: AdamW(one, lr=torch.tensor(1e-3), fused=True),
        lambda one: torch.optim.Adafactor(one, lr=1e-3),
        lambda one: torch.optim.RMSprop(one, lr=1e-3),
    ],
)
def test_no_optimizer_of_torch_keeps_what_rounding_drops(make) -> None:
    weight = nn.Parameter(torch.ones(64, 2, dtype=torch.bfloat16))
    (risk,) = hf_mp.check_training(nn.ParameterList([weight]), make([weight])).risks
    assert risk.kind == "no masters"


def test_what_is_no_training_is_refused(gpt2) -> None:
    with pytest.raises(TypeError, match=r"takes a model and its optimizer"):
        hf_mp.check_training(gpt2, [])
    with pytest.raises(ValueError, match=r"no trainable parameter of this Linear"):
        hf_mp.check_training(nn.Linear(2, 2), AdamW(gpt2.parameters()))
