"""A loop of one's own: what it is promised, by preset and feature, against the same loop in FP32."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import torch.nn.functional as F
from tiny import Using, assert_true, attached, copies, gradients_of, same, take_step, unscale_node, weights
from torch import Tensor, nn
from trainer_runs import tiny_gpt2
from transformers import GPT2LMHeadModel

import hf_mp
from hf_mp import MixedPrecision
from hf_mp.weights.split_parameter import SplitParameter

Batch = dict[str, Tensor]
PRESETS = ["fp16", "bf16", "fp16-lean", "bf16-lean"]
every_preset = pytest.mark.parametrize("precision", PRESETS)
# FP16 has 11 significant bits: a chain of a few dozen roundings leaves gradients within about 10 half-ulps (2**-11).
GRADIENT_TOLERANCE = {"fp16": 5e-3, "bf16": 4e-2}
LOSS_TOLERANCE = {"fp16": 1e-3, "bf16": 1e-2}
X = torch.randn(5, 8, generator=torch.Generator().manual_seed(7))


def of(table: dict[str, float], precision: str) -> float:
    return table[precision.removesuffix("-lean")]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def masters(model: nn.Module) -> list[Tensor]:
    """The FP32 weights of any layout."""
    return copies(model.state_dict().values())


# When backward() returns, .grad is FP32 and unscaled


def loss_of(model: nn.Module, x: Tensor = X) -> Tensor:
    return model(x).square().mean()


def penalized(model: nn.Sequential) -> None:
    for _ in range(3):  # what was scaled and what was not are added up
        (loss_of(model) + 0.1 * model[2].weight.square().sum()).backward()


def in_inference_mode(model: nn.Sequential) -> None:
    loss = loss_of(model)
    with torch.inference_mode():
        loss.backward()


def by_autograd_grad(model: nn.Sequential) -> None:
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(loss_of(model), list(model.parameters())), strict=True
    ):
        assert parameter.grad is None and gradient.dtype is torch.float32
        parameter.grad = gradient


def twice(model: nn.Sequential) -> None:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()


def gradient_penalty(model: nn.Sequential) -> None:
    loss = loss_of(model)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(gradient.square().sum() for gradient in gradients)).backward()


def tied(model: nn.Sequential) -> None:
    model[2].weight = model[0].weight
    loss_of(model).backward()


def hooked(model: nn.Sequential) -> None:
    seen: dict[str, Tensor] = {}
    model[0].weight.register_hook(lambda gradient: seen.update(hook=gradient.clone()) or 2 * gradient)
    model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.update(post=p.grad.clone()))
    loss_of(model).backward()
    assert torch.equal(model[0].weight.grad, 2 * seen["hook"]) and torch.equal(model[2].weight.grad, seen["post"])


def clipped(model: nn.Sequential) -> None:
    (100 * loss_of(model)).backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 1.0


BACKWARDS: dict[str, Callable[[nn.Sequential], Any]] = {
    "micro-batches": lambda m: [loss_of(m, part).backward() for part in (X[:2], X[2:], X)],
    "a penalty on weights outside of the model": penalized,
    "autograd.grad": by_autograd_grad,
    "inference mode": in_inference_mode,
    "some inputs": lambda m: loss_of(m).backward(inputs=[m[0].weight]),
    "retain_graph": twice,
    "a gradient penalty": gradient_penalty,
    "tied weights": tied,
    "hooks": hooked,
    "clipped": clipped,
    "clipped by value": lambda m: (loss_of(m).backward(), nn.utils.clip_grad_value_(m.parameters(), 2e-2)),
}


@every_preset
@pytest.mark.parametrize("name", BACKWARDS)
def test_gradients_are_fp32_and_true(name: str, precision: str) -> None:
    model, reference = layers(), layers()
    attached(model, precision)
    for each in (reference, model):
        BACKWARDS[name](each)
    found = [parameter.grad for parameter in model.parameters()]
    assert {gradient.dtype for gradient in found if gradient is not None} == {torch.float32}
    assert_true(found, [parameter.grad for parameter in reference.parameters()], of(GRADIENT_TOLERANCE, precision))


@every_preset
def test_micro_batches_add_up_in_fp32(precision: str) -> None:
    model, parts = layers(), (X[:2], X[2:], X)
    attached(model, precision)
    single = [gradients_of(model, lambda part=part: model(part).square().sum()) for part in parts]
    model.zero_grad()
    for part in parts:
        model(part).square().sum().backward()
    assert same(copies(p.grad for p in model.parameters()), [a + b + c for a, b, c in zip(*single, strict=True)])


# Steps


@every_preset
@pytest.mark.parametrize("optim", [torch.optim.SGD, torch.optim.AdamW])
def test_a_training_follows_fp32(batch: Batch, precision: str, optim: Any) -> None:
    def losses(precision: str) -> list[float]:
        model, rate = tiny_gpt2(), 0.3 if optim is torch.optim.SGD else 3e-3
        model, optimizer = hf_mp.prepare(model, optim(model.parameters(), lr=rate), precision)
        assert {p.dtype for p in model.parameters()} == {hf_mp.PrecisionPolicy.parse(precision).params}
        return [take_step(model(**batch).loss, optimizer, clip=1.0) for _ in range(12)]

    expected = losses("fp32")
    assert expected[-1] < expected[0] - 0.3
    assert losses(precision) == pytest.approx(expected, rel=of(LOSS_TOLERANCE, precision))


@pytest.mark.parametrize("precision", [*PRESETS, "compute=fp16,loss_scale=dynamic"])
@pytest.mark.parametrize("factor", [torch.inf, torch.nan])
@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
def test_a_skipped_step_changes_nothing(precision: str, factor: float, clips: bool) -> None:
    model = layers()
    model, optimizer = hf_mp.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True), precision)
    runtime: Any = model.forward.runtime

    def state() -> tuple[list[Tensor], Any]:
        lists = optimizer.state_dict()
        moments = [value for one in lists["state"].values() for value in one.values() if isinstance(value, Tensor)]
        working = [] if "lean" in precision else map(runtime.weights.layout.copies.get, model.parameters())
        return copies([*masters(model), *model.parameters(), *working, *moments]), lists["param_groups"]

    def step(factor: float = 1.0) -> bool:
        (loss_of(model) * factor).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert optimizer.step() is None
        optimizer.zero_grad()
        return optimizer.step_was_skipped

    assert not step() and not step()
    (before, groups), scale = state(), runtime.stats.loss_scale
    assert step(factor) and runtime.stats.skipped_steps == 1
    (after, groups_after), lowered = state(), runtime.stats.loss_scale
    assert same(before, after) and groups == groups_after
    assert lowered < scale or precision.startswith("bf16")
    assert not step() and not any(map(torch.equal, before[:4], state()[0][:4]))


# What happens to a model meanwhile


@every_preset
def test_evaluation_and_generation(gpt2: GPT2LMHeadModel, batch: Batch, precision: str) -> None:
    expected = gpt2.eval()(**batch).loss.item()
    runtime = MixedPrecision(precision)
    runtime.attach(gpt2)
    before = masters(gpt2)
    with torch.no_grad():
        assert gpt2(**batch).loss.item() == pytest.approx(expected, rel=of(LOSS_TOLERANCE, precision))
    with torch.inference_mode():
        gpt2(**batch)
    tokens = gpt2.generate(batch["input_ids"][:1, :4], max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert tokens.shape == (1, 9) and same(before, masters(gpt2))
    assert "lean" in precision or len(runtime.weights.layout.copies) > 0
    gpt2.train()(**batch).loss.backward()


@every_preset
def test_resized_embeddings_train(gpt2: GPT2LMHeadModel, batch: Batch, precision: str) -> None:
    runtime = MixedPrecision(precision)
    runtime.attach(gpt2)
    gpt2(**batch).loss.backward()
    gpt2.zero_grad()
    old = gpt2.state_dict()["transformer.wte.weight"].clone()
    gpt2.resize_token_embeddings(205)
    optimizer = runtime.attach_optimizer(torch.optim.SGD(gpt2.parameters(), lr=0.1))
    assert gpt2.lm_head.weight is gpt2.transformer.wte.weight
    for _ in range(2):
        take_step(gpt2(**batch).loss, optimizer)
    new = gpt2.state_dict()["transformer.wte.weight"]
    assert new.dtype is torch.float32 and new.shape == (205, 64) == (*gpt2(**batch).logits.shape[-1:], 64)
    assert (new[:199] - old).abs().max() < 0.05 and not torch.equal(new, new.half().float())


@every_preset
def test_a_frozen_block_stays_as_it_is_until_it_is_unfrozen(
    gpt2: GPT2LMHeadModel, batch: Batch, precision: str
) -> None:
    dtype = torch.float32 if "lean" in precision else torch.float16
    block = gpt2.to(dtype).transformer.h[0].requires_grad_(False)
    model, optimizer = hf_mp.prepare(gpt2, torch.optim.AdamW(gpt2.parameters(), lr=1e-3), precision)
    frozen = weights(block)
    take_step(model(**batch).loss, optimizer)
    assert {(p.dtype, p.grad) for p in block.parameters()} == {(dtype, None)}
    assert not any(isinstance(p, SplitParameter) for p in block.parameters())
    assert same(frozen, weights(block))
    block.requires_grad_(True)
    take_step(model(**batch).loss, optimizer)
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    moved = [not torch.equal(old.float(), new) for old, new in zip(frozen, block.state_dict().values(), strict=True)]
    assert sum(moved) >= len(frozen) - 1  # c_attn's bias has a third without gradient


# Loops of another form


@every_preset
def test_a_forward_leaves_nothing_to_the_garbage_collector(precision: str) -> None:
    """What a graph saves is as large as a step: it is freed with the loss, and not some steps later."""
    model, outputs, nodes = layers(), list[weakref.ref[Any]](), list[weakref.ref[Any]]()
    hf_mp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), precision)
    model.register_forward_hook(lambda module, args, output: outputs.append(weakref.ref(output.grad_fn)))
    model[0].register_forward_hook(lambda module, *_: nodes.append(weakref.ref(unscale_node(module.weight))))
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            loss_of(model).backward()
        assert [output() for output in outputs] == [None] * 3
        first, second, third = (node() for node in nodes)
        assert first is second is third
        del first, second, third, model
        gc.collect()  # which does not see what autograd's nodes hold
        assert [node() for node in nodes] == [None] * 3
    finally:
        gc.enable()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "bnb AdamW": lambda p: bnb.optim.AdamW(p, lr=1e-2),
}


def gan(precision: str, make: Callable[[Any], Any], together: bool = False, steps: int = 4) -> tuple[Any, Any]:
    """A generator and a discriminator in one attached model, each with its optimizer, or both with one."""
    torch.manual_seed(0)
    model: Any = Using(
        lambda m, x, part: getattr(m, part)(x),
        generator=nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6)),
        discriminator=nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)),
    )
    runtime = MixedPrecision(precision)
    runtime.attach(model)
    parts = [model] if together else [model.generator, model.discriminator]
    optimizers = [runtime.attach_optimizer(make(part.parameters())) for part in parts]
    of_generator, of_discriminator = optimizers[0], optimizers[-1]
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        real, noise = torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator)
        fake = model(noise, "generator")  # used after the discriminator's step
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.softplus(-model(real, "discriminator")) + F.softplus(model(fake.detach(), "discriminator"))
        loss.mean().backward()
        of_discriminator.step()
        of_generator.zero_grad()
        F.softplus(-model(fake, "discriminator")).mean().backward()
        of_generator.step()
    return model, runtime


@pytest.mark.parametrize("together", [False, True], ids=["two", "one"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@every_preset
def test_a_graph_made_before_anothers_step_is_differentiated(precision: str, optimizer: str, together: bool) -> None:
    expected, _ = gan("fp32", OPTIMIZERS[optimizer], together)
    found, runtime = gan(precision, OPTIMIZERS[optimizer], together)
    torch.testing.assert_close(dict(found.state_dict()), dict(expected.state_dict()), rtol=0.05, atol=0.03)
    working = runtime.weights.layout.copies
    for parameter in found.parameters():
        if parameter in working:
            assert torch.equal(working.get(parameter), parameter.detach().to(working.dtype))
