"""A training step of many kinds of models: decoders, encoders, both, vision, convolution, speech, MoE, state space.

    python scripts/bench.py architectures
    python scripts/bench.py architectures --times 4 --name bench_architectures_4  # four times as much in a batch
    python scripts/bench.py architectures --only "BERT,ResNet-50" --rounds 5
    python scripts/bench.py architectures --mixtures --name bench_experts  # also batched_mm under torch.autocast

Forward, backward, clipping and a fused AdamW update of models with random weights, made from their Transformers
configurations; the contenders take turns of two steps, of which the second is timed. The floor is the model in BF16
throughout: no cast, no FP32 gradient, an update of half the bytes. Medians, spreads, ``bf16`` and the floor over
``torch.autocast`` in BF16, ``fp16`` over FP32, and the same of the peaks of all tensors in two steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import transformers as hf
import typer
from torch import Tensor, nn

from _benchmarks import DEFAULT_DEVICE, DTYPES, peak_tensor_bytes
from _contenders import BATCHED, Step
from _contenders import make_step as make_loop
from _results import alternate, ratios_of, rows_of
from hf_mp.casting.cpu.upcast import runs_natively

Inputs = dict[str, Tensor]
PEER = "torch.autocast bf16"
CONTENDERS = ("fp32", PEER, "hf_mp bf16", "hf_mp fp16")
FLOOR = "whole bf16"
RATIOS = {
    "bf16_to_torch_autocast": ("hf_mp bf16", PEER),
    "bf16_floor_to_torch_autocast": (FLOOR, PEER),
    "fp16_to_fp32": ("hf_mp fp16", "fp32"),
}
PEAKS = {"bf16_peak_to_torch_autocast": ("hf_mp bf16", PEER), "fp16_peak_to_fp32": ("hf_mp fp16", "fp32")}
BATCHED_PEER = f"{PEER}, {BATCHED}"  # experts multiplied by torch.bmm, and not grouped_mm
BATCHED_RATIO = {"bf16_to_batched_torch_autocast": ("hf_mp bf16", BATCHED_PEER)}
VOCABULARY = 8192


@dataclass(frozen=True)
class Architecture:
    """A kind of model, and what it is trained on."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]

    def batch(self, times: int = 1) -> Inputs:
        """Inputs of one forward: so many drawn, in one batch."""
        drawn = [self.inputs() for _ in range(times)]
        return {
            name: torch.cat([inputs[name] for inputs in drawn]) if value.dim() else value
            for name, value in drawn[0].items()
        }


def made(kind: str, task: str, **settings: Any) -> Callable[[], nn.Module]:
    """Makes a model of Transformers, ``<kind><task>``, from its configuration."""

    def make() -> nn.Module:
        model: nn.Module = getattr(hf, kind + task)(getattr(hf, f"{kind}Config")(**settings))
        return model

    return make


def layers(layers: int, width: int, heads: int = 8) -> dict[str, int]:
    return {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads,
            "intermediate_size": 4 * width}  # fmt: skip


def _tokens(batch: int = 2, length: int = 128) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def language(batch: int = 2, length: int = 128, **others: Tensor) -> Inputs:
    ids = _tokens(batch, length)
    return {"input_ids": ids, "labels": ids, **others}


def padded(batch: int = 4, length: int = 128) -> Inputs:
    """Sentences of different lengths, as an encoder is trained on."""
    mask = (torch.arange(length) < torch.linspace(length / 2, length, batch)[:, None]).long()
    return language(batch, length, attention_mask=mask)


def images(size: int = 96, batch: int = 4) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(2, (batch,))}


def _speech() -> Inputs:
    return {"input_values": torch.randn(2, 16000), "labels": torch.randint(2, (2,))}


def _spectrograms() -> Inputs:
    return {"input_features": torch.randn(2, 80, 800), "labels": _tokens(2, 64)}


def _captions() -> Inputs:
    return {"input_ids": _tokens(8, 32), "pixel_values": torch.randn(8, 3, 96, 96), "return_loss": torch.tensor(True)}


_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DECODER = {**_TOKENS, "use_cache": False}
_SEQ2SEQ = {**_DECODER, "decoder_start_token_id": 1}
_GPT2 = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
_WHISPER = {"d_model": 256, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "num_key_value_heads": 4}
_CLIP = {"text_config": {**layers(3, 256, 4), **_TOKENS},
         "vision_config": {**layers(3, 256, 4), "image_size": 96, "patch_size": 16}}  # fmt: skip
_DEBERTA = {**layers(3, 384), "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
_LM, _MASKED, _IMAGE = "ForCausalLM", "ForMaskedLM", "ForImageClassification"

ARCHITECTURES: dict[str, Architecture] = {
    "Llama 4 x 512, GQA": Architecture(
        made("Llama", _LM, **layers(4, 512), **_DECODER, num_key_value_heads=2), language
    ),
    "Qwen3-MoE 4 x 256": Architecture(
        made("Qwen3Moe", _LM, **layers(4, 256), **_DECODER, head_dim=32, **_EXPERTS), language
    ),
    "GPT-2 6 x 384": Architecture(made("GPT2", "LMHeadModel", n_layer=6, n_embd=384, n_head=6, **_GPT2), language),
    "BERT 4 x 512": Architecture(made("Bert", _MASKED, **layers(4, 512), vocab_size=VOCABULARY), padded),
    "T5 3+3 x 512": Architecture(
        made("T5", "ForConditionalGeneration", **_SEQ2SEQ, num_layers=3, num_decoder_layers=3), language
    ),
    "ViT 6 x 384": Architecture(made("ViT", _IMAGE, **layers(6, 384, 6), image_size=160), lambda: images(160)),
    "ResNet-50": Architecture(made("ResNet", _IMAGE), images),
    "Whisper 2+2 x 256": Architecture(
        made("Whisper", "ForConditionalGeneration", **_SEQ2SEQ, **_WHISPER, max_source_positions=400), _spectrograms
    ),
    "Mamba 4 x 256": Architecture(
        made("Mamba", _LM, **_DECODER, hidden_size=256, num_hidden_layers=4), lambda: language(2, 64)
    ),
    "GPT-2 2 x 64": Architecture(
        made("GPT2", "LMHeadModel", n_layer=2, n_embd=64, n_head=4, **_GPT2), lambda: language(4, 32)
    ),
    "DeBERTa 3 x 384": Architecture(made("DebertaV2", _MASKED, **_DEBERTA, vocab_size=VOCABULARY), padded),
    "Gemma 2 3 x 384": Architecture(
        made("Gemma2", _LM, **layers(3, 384), **_DECODER, num_key_value_heads=4, head_dim=48), language
    ),
    "Mixtral 2 x 256": Architecture(
        made("Mixtral", _LM, **layers(2, 256), **_DECODER, num_key_value_heads=4, num_local_experts=4), language
    ),
    "CLIP 3+3 x 256": Architecture(made("CLIP", "Model", **_CLIP), _captions),
    "wav2vec2 3 x 256": Architecture(
        made("Wav2Vec2", "ForSequenceClassification", **layers(3, 256, 4), conv_dim=(128,) * 7), _speech
    ),
    "ConvNeXt": Architecture(made("ConvNext", _IMAGE), images),
}


def _mixture(kind: str, width: int, experts: int, expert_width: int, **settings: int) -> Architecture:
    # batched_mm gathers the weights of the expert of each token: larger ones, or more tokens, take more than 24 GiB.
    sizes = {**layers(2, width), "intermediate_size": expert_width, **_DECODER, "num_key_value_heads": 4, **settings}
    names = {"num_local_experts": experts} if kind == "Mixtral" else {"num_experts": experts}
    return Architecture(made(kind, _LM, **sizes, **names), lambda: language(2, 128))


MIXTURES: dict[str, Architecture] = {
    "small experts: OLMoE 2 x 256, 8 of 256": _mixture("Olmoe", 256, 8, 256, num_experts_per_tok=2),
    "large experts: Mixtral 2 x 384, 4 of 1536": _mixture("Mixtral", 384, 4, 1536),
    "many experts: Qwen3-MoE 2 x 256, 64 of 256": _mixture(
        "Qwen3Moe", 256, 64, 256, head_dim=32, moe_intermediate_size=256, num_experts_per_tok=4
    ),
}


def make_step(
    architecture: Architecture, contender: str, device: str = DEFAULT_DEVICE, *, times: int = 1, **settings: Any
) -> Step:
    """One training step of a fresh model; ``times`` as for its batch, ``settings`` as for the loop."""
    torch.manual_seed(0)
    model = architecture.model().to(device).train()
    inputs = {name: value.to(device) for name, value in architecture.batch(times).items()}
    return make_loop(contender, model, inputs, **settings)


def compare(
    architecture: Architecture, rounds: int, device: str, times: int = 1, batched: bool = False
) -> dict[str, Any]:
    """Medians and spreads of all contenders and of the floor, and their ratios; ratios of peaks."""
    names = (*CONTENDERS, FLOOR, *((BATCHED_PEER,) if batched else ()))
    peaks = {contender: peak_bytes(architecture, contender, device, times) for contender in CONTENDERS}
    steps = {contender: make_step(architecture, contender, device, times=times) for contender in names}
    seconds = alternate(steps, rounds=rounds, warmup=2, untimed=1)
    return {
        "contenders": rows_of(seconds),
        **ratios_of(seconds, {**RATIOS, **BATCHED_RATIO}),
        "peak_bytes": peaks,
        **{ratio: peaks[one] / peaks[other] for ratio, (one, other) in PEAKS.items()},
    }


def peak_bytes(architecture: Architecture, contender: str, device: str, times: int) -> int:
    """Bytes of all tensors of a training of two steps, at most at once: model, inputs and optimizer state too."""

    def train() -> None:
        step = make_step(architecture, contender, device, times=times)
        step()
        step()

    return peak_tensor_bytes(train, torch.device(device))


def native_dtypes(device: str) -> list[str]:
    """Dtypes with fast matrix products on ``device``; torch's others may take a hundred times as long."""
    return [name for name, dtype in DTYPES.items() if runs_natively(dtype, device)]


def choose(only: str | None, names: Iterable[str]) -> list[str]:
    """The names that begin with one of the comma-separated parts of ``only``; all for None."""
    names = list(names)
    chosen = names if only is None else [n for n in names if n.startswith(tuple(map(str.strip, only.split(","))))]
    if not chosen:
        raise typer.BadParameter(f"{only!r} is the beginning of none of {', '.join(names)}")
    return chosen


def measure(
    only: Annotated[str | None, typer.Option(help="beginnings of names, comma-separated; default: all")] = None,
    rounds: Annotated[int, typer.Option(help="timed steps of each contender")] = 7,
    times: Annotated[int, typer.Option(help="how many times the inputs of a forward")] = 1,
    device: str = DEFAULT_DEVICE,
    mixtures: Annotated[bool, typer.Option(help="mixtures of experts")] = False,
) -> Iterator[dict[str, Any]]:
    """Train a step of each architecture the four ways, in turns: medians, spreads and ratios; yields after each."""
    models = MIXTURES if mixtures else ARCHITECTURES
    ratios = (*RATIOS, *PEAKS, *(BATCHED_RATIO if mixtures else ()))
    found: dict[str, dict[str, Any]] = {}
    for name in choose(only, models):
        print(f"{name} ...", flush=True)
        found[name] = compare(models[name], rounds, device, times, batched=mixtures)
        medians = {ratio: statistics.median(row[ratio] for row in found.values()) for ratio in ratios}
        yield {"architectures": found, "medians": medians, "times": times}
