"""Gradients that leave FP16's range: the loss scale that suits, or one of a module's own; and what the report says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MambaConfig,
    MambaForCausalLM,
)

import hf_mp
from hf_mp import DynamicLossScaler, HeadroomLossScaler, StaticLossScaler
from hf_mp.scaling.rules import scale_text

VOCABULARY = 64
_GEMMA = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16, "pad_token_id": 0,
    "use_cache": False,
}  # fmt: skip


class Run:
    """A plain loop over sentences in which each token follows from the one before."""

    def __init__(
        self,
        model: Any,
        steps: int,
        precision: str = "fp16",
        factor: float = 1.0,
        lr: float = 1e-2,
        explained: bool = True,
        **settings: Any,
    ) -> None:
        optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
        self.explainer: Any = None
        if precision != "fp32":
            model, optimizer = hf_mp.prepare(model, optimizer, precision, **settings)
            self.explainer = hf_mp.explain_overflows(model) if explained else None
            self.runtime = vars(model)["forward"].runtime
        self.losses, self.lost = [], 0
        for ids in _sentences(steps):
            loss = model(input_ids=ids, labels=ids)["loss"]
            (loss * factor).backward()
            optimizer.step()
            self.lost += getattr(optimizer, "step_was_skipped", False)
            optimizer.zero_grad()
            self.losses.append(loss.item())

    @property
    def last(self) -> float:
        losses = self.losses[1:][-10:]  # that of a step that was healed is of its first try
        return sum(losses) / len(losses)


def _sentences(count: int) -> list[Tensor]:
    generator, found = torch.Generator().manual_seed(1), []
    follower = torch.randperm(VOCABULARY, generator=generator)
    for _ in range(count):
        ids = [torch.randint(1, VOCABULARY, (4,), generator=generator)]
        for _ in range(15):
            ids.append(follower[ids[-1]])
        found.append(torch.stack(ids, 1))
    return found


def gemma3(multiplier: float = 300.0) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**_GEMMA))
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: output * multiplier)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10.0 if parameter.dim() == 2 else 1.0)
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))


def test_no_step_is_lost_with_lora(steps: int = 8) -> None:
    """Gradients of adapters are far below those of activations, which the loss scale meets."""
    fp32, skipping = Run(gemma3(), steps, "fp32"), Run(gemma3(), steps, explained=False)
    healing = Run(gemma3(), steps, on_overflow="heal")
    assert skipping.lost > 0 and healing.lost == 0
    assert healing.last == pytest.approx(fp32.last, rel=0.02)


class Tiny(nn.Module):
    """Two branches, through one of which gradients are multiplied."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.left, self.right, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, VOCABULARY)
        self.factor = factor

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        stream = self.embed(input_ids)
        left = torch.tanh(_Multiplied.apply(self.left(stream), self.factor))
        logits = self.head(stream + left + self.right(stream))[:, :-1]
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient.float() * ctx.factor).to(gradient.dtype), None


@pytest.mark.parametrize(
    "scaler",
    [
        lambda: HeadroomLossScaler(min_scale=2.0**-60),
        lambda: DynamicLossScaler(min_scale=2.0**-60),
        lambda: HeadroomLossScaler(min_scale=1.0),
        lambda: StaticLossScaler(2.0),
    ],
    ids=["headroom", "dynamic", "headroom from 1", "static"],
)
def test_a_loss_times_1e8_loses_no_step(scaler: Callable[[], Any]) -> None:
    """Where the scale cannot go as low, products have one of their own."""
    fp32 = Run(Tiny(), 20, "fp32", factor=1e8)
    healing = Run(Tiny(), 20, factor=1e8, on_overflow="heal", loss_scaler=scaler())
    assert healing.lost == 0 and healing.last == pytest.approx(fp32.last, rel=0.01)
    is_low = healing.runtime.scaler.smallest_scale < 1.0
    assert bool(healing.runtime.remedies) == (not is_low) and (healing.runtime.scaler.get_scale() < 1.0) == is_low


def test_one_branch_beyond_what_fp16_spans_has_a_scale_of_its_own() -> None:
    """At any one scale, its gradients are inf or those of the other branch zero."""
    factor = 1e10
    fp32 = Run(Tiny(factor), 20, "fp32")
    skipping = Run(Tiny(factor), 5, loss_scaler=StaticLossScaler(2.0**10))
    healing = Run(
        Tiny(factor), 20, on_overflow="heal", loss_scaler=DynamicLossScaler(init_scale=2.0**10, min_scale=2.0**-60)
    )
    assert skipping.lost == 5
    report = skipping.explainer.reports[0]
    assert report.phase == "backward" and report.smaller_scale_helps is False
    assert report.largest_finite_scale < report.needed_scale
    assert "No loss scale holds this backward as a whole: it is finite up to" in report.to_text()
    assert healing.lost == 0 and healing.last == pytest.approx(fp32.last, rel=0.02)
    (rule,) = (rule for key, rule in healing.runtime.remedies.items() if key == "left:linear")
    assert rule.startswith("scaled/1/")
    healed = hf_mp.heal_overflows(healing.runtime).healed[0]
    assert healed.scale is not None and f"at loss scale {scale_text(healed.scale)}, came to" in str(healed)


def test_a_scale_below_1_is_found_and_named() -> None:
    """It was said that no smaller scale helps."""
    run = Run(Tiny(), 2, factor=1e8, loss_scaler=HeadroomLossScaler(min_scale=1.0))
    report = run.explainer.reports[0]
    assert run.lost == 2 and report.smaller_scale_helps and 2.0**-12 < report.largest_finite_scale < 1.0
    assert "goes no lower than 1: give it a smaller one" in report.to_text() and "rules=" not in report.to_text()
    fitting = Run(Tiny(), 2, factor=1e8, loss_scaler=StaticLossScaler(report.largest_finite_scale / 4))
    assert fitting.lost == 0


def mamba(factor: float) -> nn.Module:
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2))
    for name, parameter in model.named_parameters():
        parameter.data.mul_(factor if "in_proj" in name else 1.0)
    return model


def test_products_without_a_weight_stay_in_fp16() -> None:
    """94% of Mamba's FLOPs had to be in FP32: training stopped."""
    fp32, healing = Run(mamba(100.0), 6, "fp32", lr=1e-3), Run(mamba(100.0), 6, lr=1e-3, on_overflow="heal")
    assert healing.lost == 0 and healing.last == pytest.approx(fp32.last, rel=0.02)
    healed = hf_mp.heal_overflows(healing.runtime).healed
    assert healed and healed[-1].fp32_share < 0.25
    assert any(key.endswith("matmul") and "scaled" in rule for key, rule in healing.runtime.remedies.items())


class Masked(nn.Module):
    """A mask of FP32's smallest number, cast to 16 bits, in which one row is masked throughout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.query = nn.Embedding(VOCABULARY, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        stream = self.embed(input_ids)
        query = self.query(stream)
        length = input_ids.shape[1]
        mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
        mask[3] = torch.finfo(torch.float32).min
        scores = torch.softmax(query @ query.mT + mask.to(query.dtype), -1)
        logits = self.head(scores.to(stream.dtype) @ stream)[:, :-1]
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}


def test_a_mask_that_rounds_to_minus_inf() -> None:
    """Finite in FP32 alone: healed there, and the report says so of BF16, too."""
    fp32, skipping = Run(Masked(), 8, "fp32"), Run(Masked(), 2)
    report = skipping.explainer.reports[0]
    assert skipping.lost == 2 and (report.finite_in_fp32, report.finite_in_bf16) == (True, False)
    assert "In BF16 it is not finite." in report.to_text() and "train in bf16" not in report.to_text()
    healing = Run(Masked(), 8, on_overflow="heal")
    assert healing.lost == 0 and healing.runtime.remedies == {":to": "fp32"}
    assert healing.last == pytest.approx(fp32.last, rel=0.01)
