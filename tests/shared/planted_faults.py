"""Faults to plant: what goes wrong, in which model, and whom the report must name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from autograd_functions import LargeFactor
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

VOCABULARY = 61
Batch = dict[str, Tensor]
Plant = Callable[[Any], None]


class Mlp(nn.Module):
    """With batch normalization, dropout and a counter: everything that a forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.act: nn.Module = nn.ReLU()
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(32, 4)
        self.calls = 0

    def forward(self, x: Tensor, offset: Tensor | None = None) -> Tensor:
        self.calls += 1
        x = self.dropout(self.act(self.norm(self.first(x))))
        return self.last(x if offset is None else x + offset)


def gpt2(**settings: Any) -> nn.Module:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False, **settings))


def bert() -> nn.Module:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes))


def llama() -> nn.Module:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, intermediate_size=64, max_position_embeddings=16, use_cache=False, **sizes)
    )


def tokens(seed: int) -> Batch:
    ids = torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def classes(seed: int) -> Batch:
    ids = tokens(seed)["input_ids"]
    return {
        "input_ids": ids,
        "labels": ids[:, 0] % 2,
        "attention_mask": (ids > 10).long().index_fill(1, torch.tensor(0), 1),
    }


def vectors(seed: int) -> Batch:
    return {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))}


MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[[int], Batch]]] = {
    "gpt2": (gpt2, tokens),
    "bert": (bert, classes),
    "llama": (llama, tokens),
    "mlp": (Mlp, vectors),
}


def model_loss(outputs: Any) -> Tensor:
    """The model's own loss, or a sum of squares of what it gives."""
    return outputs.square().mean() if isinstance(outputs, Tensor) else outputs.loss


@dataclass(frozen=True)
class Fault:
    """A fault, and the report that it must get. ``bad`` says which micro-batch of how many meets it in its data."""

    name: str
    model: str
    phase: str
    module: str = ""
    op: str = ""
    tensor: str = ""
    plant: Plant = lambda model: None
    spoil: Callable[[Batch], Batch] | None = None  # the data of the bad micro-batch
    loss: Callable[[Any], Tensor] = model_loss
    precision: str = "fp16"
    scale: float | None = None
    micro_batches: int = 1
    bad: int = 1
    checkpointing: bool | None = None  # None, or use_reentrant
    settings: dict[str, Any] = field(default_factory=dict)


# Planting


def set_element(name: str, value: float) -> Plant:
    @torch.no_grad()
    def plant(model: nn.Module) -> None:
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        named[name].view(-1)[1] = value

    return plant


def enlarge(*names: str, largest: float = 4e4) -> Plant:
    """Weights as large as FP16 can hold: the product with them overflows."""

    @torch.no_grad()
    def plant(model: nn.Module) -> None:
        for name in names:
            weight = model.get_submodule(name).weight
            weight.mul_(largest / weight.abs().max())

    return plant


def put(name: str, function: Callable[[Tensor], Tensor]) -> Plant:
    """A module of one's own that computes ``function``."""

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    def plant(model: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Own())

    return plant


def guarded(x: Tensor) -> Tensor:
    """Makes an inf that nobody gets to see."""
    return torch.where(x > 2.0, torch.zeros_like(x) + 1.0 / (x - x).detach(), x).clamp(-2.0, 2.0).nan_to_num(0.0)


def no_position_left(x: Tensor) -> Tensor:
    scores = x.masked_fill(torch.ones_like(x, dtype=torch.bool), float("-inf"))
    return torch.softmax(scores, -1)


FORWARD = {
    "product-of-itself": (lambda x: (x + 300) * (x + 300), "mul"),
    "exp": (lambda x: torch.exp(x + 100), "exp"),
    "division-by-zero": (lambda x: x / (x - x), "div"),
    "root-of-negative": (lambda x: (x - 10).sqrt(), "sqrt"),
    "log-of-zero": (lambda x: (x - x).log() * (x - x), "log"),
    "cast-to-half": (lambda x: (x.float() + 1e5).half(), "half"),
    "everything-masked": (no_position_left, "softmax"),
}
BACKWARD = {
    "large-factor": (LargeFactor.apply, "LargeFactor"),
    "root-of-zero": (lambda x: (x * 0.0).sqrt(), "sqrt"),
}


def spoil(key: str, value: float) -> Callable[[Batch], Batch]:
    def change(batch: Batch) -> Batch:
        spoiled = batch[key].clone()
        spoiled.view(-1)[3] = value
        return {**batch, key: spoiled}

    return change


def as_embeddings(batch: Batch) -> Batch:
    embeddings = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(9))
    embeddings[1, 2, 3] = float("nan")
    return {"inputs_embeds": embeddings, "labels": batch["labels"]}


# Losses outside of the model


def divided_by_zero(outputs: Any) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return (logits / (logits.detach() * 0.0)).mean()


def _faults() -> list[Fault]:
    weights = [
        ("gpt2", "transformer.wpe.weight", float("inf")),
        ("gpt2", "transformer.h.0.ln_1.weight", float("nan")),
        ("gpt2", "transformer.h.1.mlp.c_fc.weight", float("inf")),
        ("gpt2", "transformer.h.1.mlp.c_fc.weight", 1e5),
        ("gpt2", "transformer.h.0.attn.c_proj.bias", float("-inf")),
        ("bert", "bert.encoder.layer.1.attention.self.query.weight", float("nan")),
        ("bert", "classifier.bias", float("inf")),
        ("llama", "model.layers.0.mlp.down_proj.weight", float("inf")),
        ("llama", "model.norm.weight", float("nan")),
        ("mlp", "last.weight", float("inf")),
    ]
    products = [
        ("gpt2", "transformer.h.0.attn.c_attn", "addmm"),
        ("gpt2", "transformer.h.1.mlp.c_fc", "addmm"),
        ("bert", "bert.encoder.layer.0.intermediate.dense", "linear"),
        ("bert", "bert.encoder.layer.1.attention.self.value", "linear"),
        ("llama", "model.layers.1.self_attn.v_proj", "linear"),
        ("llama", "model.layers.0.mlp.up_proj", "linear"),
        ("llama", "lm_head", "linear"),
        ("mlp", "first", "linear"),
    ]
    places = [("gpt2", "transformer.h.1.mlp.act"), ("bert", "bert.encoder.layer.0.intermediate.intermediate_act_fn"),
              ("llama", "model.layers.1.mlp.act_fn"), ("mlp", "act")]  # fmt: skip
    found = [
        Fault(
            f"weight-{model}-{name}-{value}",
            model,
            "weight",
            name.rpartition(".")[0],
            "",
            name,
            set_element(name, value),
        )
        for model, name, value in weights
    ]
    found += [Fault(f"large-{m}-{name}", m, "forward", name, op, "", enlarge(name)) for m, name, op in products]
    for phase, kinds in (("forward", FORWARD), ("backward", BACKWARD)):
        for number, (name, (function, op)) in enumerate(kinds.items()):
            for model, place in (places[number % 4], places[(number + 1) % 4]):
                found.append(Fault(f"{name}-{model}", model, phase, place, op, "", put(place, function)))
    up = "model.layers.0.mlp.up_proj"
    act, factor = "transformer.h.0.mlp.act", LargeFactor.apply
    div, forward_act = FORWARD["division-by-zero"][0], put(act, FORWARD["product-of-itself"][0])

    def both(model: nn.Module) -> None:
        put("transformer.h.0.mlp.act", guarded)(model)
        put("transformer.h.1.mlp.act", div)(model)

    found += [
        Fault("large-llama-gate-times-up", "llama", "forward", "model.layers.1.mlp", "mul", "",
              enlarge("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj", largest=600.0)),
        Fault("buffer-mlp-eval", "mlp", "weight", "norm", "", "norm.running_var",
              lambda m: (set_element("norm.running_var", float("nan"))(m), m.eval())),
        Fault("innocent-inf-first", "gpt2", "forward", "transformer.h.1.mlp.act", "div", "", both),
        Fault("scale-gpt2", "gpt2", "backward", "", "cross_entropy_loss", scale=2.0**40),
        Fault("scale-mlp", "mlp", "backward", "", "loss scaling", scale=2.0**40),
        Fault("data-embeddings", "gpt2", "input", "", "", "inputs_embeds", spoil=as_embeddings),
        Fault("data-x", "mlp", "input", "", "", "x", spoil=spoil("x", float("nan"))),
        Fault("data-second-argument", "mlp", "input", "", "", "offset",
              spoil=lambda batch: {**batch, "offset": torch.full((32,), float("inf"))}),
        Fault("loss-division-by-zero-gpt2", "gpt2", "loss outside of the model", tensor="logits", loss=divided_by_zero),
        Fault("loss-division-by-zero-mlp", "mlp", "loss outside of the model", tensor="", loss=divided_by_zero),
        Fault("loss-root-of-zero", "mlp", "loss outside of the model", tensor="",
              loss=lambda outputs: (outputs * 0.0).sqrt().sum()),
        Fault("loss-times-inf", "bert", "loss outside of the model", tensor="loss",
              loss=lambda outputs: outputs.loss * float("inf")),
        Fault("second-of-three-data", "mlp", "input", "", "", "x", spoil=spoil("x", float("inf")),
              micro_batches=3, bad=2),
        Fault("second-of-three-forward", "mlp", "forward", "first", "linear",
              spoil=lambda batch: {"x": batch["x"] * 1e6}, micro_batches=3, bad=2),
        Fault("third-of-three-bf16", "mlp", "input", "", "", "x", spoil=spoil("x", float("nan")),
              micro_batches=3, bad=3, precision="bf16"),
        *[Fault(f"checkpointing-{kind}-reentrant-{reentrant}", "gpt2", kind, act, op, plant=plant,
                checkpointing=reentrant)
          for reentrant in (True, False)
          for kind, op, plant in (("forward", "mul", forward_act), ("backward", "LargeFactor", put(act, factor)))],
        Fault("bf16-division", "gpt2", "forward", act, "div", plant=put(act, div), precision="bf16"),
        Fault("bf16-weight", "llama", "weight", up, tensor=f"{up}.weight",
              plant=set_element(f"{up}.weight", float("inf")), precision="bf16"),
        Fault("lean-forward", "gpt2", "forward", act, "mul", plant=forward_act, precision="fp16-lean"),
        Fault("lean-backward", "llama", "backward", "model.layers.0.mlp.act_fn", "LargeFactor",
              plant=put("model.layers.0.mlp.act_fn", factor), precision="fp16-lean"),
        Fault("lean-checkpointing-backward-reentrant", "gpt2", "backward", act, "LargeFactor", plant=put(act, factor),
              precision="fp16-lean", checkpointing=True),
        Fault("lean-weight", "gpt2", "weight", "transformer.h.1.mlp.c_fc", tensor="transformer.h.1.mlp.c_fc.weight",
              plant=set_element("transformer.h.1.mlp.c_fc.weight", float("inf")), precision="fp16-lean"),
        Fault("lean-bf16", "bert", "forward", "bert.encoder.layer.1.intermediate.intermediate_act_fn", "div",
              plant=put("bert.encoder.layer.1.intermediate.intermediate_act_fn", div), precision="bf16-lean"),
    ]  # fmt: skip
    return found


FAULTS = _faults()
