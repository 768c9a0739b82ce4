"""Gradients that leave FP16's range: the loss scale that fits, and what the report says."""

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
    """Two branches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.left, self.right, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        stream = self.embed(input_ids)
        left = torch.tanh(self.left(stream))
        logits = self.head(stream + left + self.right(stream))[:, :-1]
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}


@pytest.mark.parametrize("scaler", [HeadroomLossScaler, DynamicLossScaler])
def test_a_loss_times_1e8_loses_no_step(scaler: Callable[..., Any]) -> None:
    fp32 = Run(Tiny(), 20, "fp32", factor=1e8)
    healing = Run(Tiny(), 20, factor=1e8, on_overflow="heal", loss_scaler=scaler(min_scale=2.0**-60))
    assert healing.lost == 0 and healing.last == pytest.approx(fp32.last, rel=0.01)
    assert not healing.runtime.remedies and healing.runtime.scaler.get_scale() < 1.0


def test_a_scale_below_1_is_found_and_named() -> None:
    """Where the scaler does not go there, its steps are skipped, with healing too."""
    run = Run(Tiny(), 2, factor=1e8, loss_scaler=HeadroomLossScaler(min_scale=1.0), on_overflow="heal")
    report = run.explainer.reports[0]
    assert run.lost == 2 and report.smaller_scale_helps and 2.0**-12 < report.largest_finite_scale < 1.0
    assert "goes no lower than 1: give it a smaller one" in str(report) and "rules=" not in str(report)
    fitting = Run(Tiny(), 2, factor=1e8, loss_scaler=StaticLossScaler(report.largest_finite_scale / 4))
    assert fitting.lost == 0


def mamba(factor: float) -> nn.Module:
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2))
    for name, parameter in model.named_parameters():
        parameter.data.mul_(factor if "in_proj" in name else 1.0)
    return model


def test_products_without_a_weight_stay_in_fp16() -> None:
    fp32, healing = Run(mamba(100.0), 6, "fp32", lr=1e-3), Run(mamba(100.0), 6, lr=1e-3, on_overflow="heal")
    assert healing.lost == 0 and healing.last == pytest.approx(fp32.last, rel=0.02)
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
    """Finite in FP32 alone: no step is healed, and the report has a rule that helps."""
    run = Run(Masked(), 2, on_overflow="heal")
    report = run.explainer.reports[0]
    assert run.lost == 2 and (report.finite_in_fp32, report.finite_in_bf16, report.rules) == (True, False, None)
    assert "Pass rules={'': 'fp32'}. In BF16 it is not finite." in str(report)
    assert Run(Masked(), 2, rules={"": "fp32"}).lost == 0
