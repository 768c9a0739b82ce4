"""``log_probability_gap``: compares the log-probabilities of training with those of generation."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_mp.diagnostics.step_snapshot import restoring_module_state
from hf_mp.models.positions import positions_of

IGNORED = -100  # ignored label in Transformers and torch
CLIP_RANGE = 0.2  # of the ratio in PPO and in TRL's GRPO
_SUPPORTED = ("input_ids", "attention_mask", "labels")  # tensors of a batch


@dataclass(frozen=True)
class LogProbabilityGap:
    """Statistics of log r = log-probability in training - log-probability in generation, over tokens.

    Attributes:
        tokens: number of compared tokens.
        mean: mean magnitude of log r.
        rms: root mean square of log r.
        maximum: largest magnitude of log r.
        alpha, beta: least-squares fit of log r = alpha + beta * log-probability in generation; NaN if all of these
            log-probabilities are equal.
        clipped_share: share of tokens with a ratio r outside 1 - clip .. 1 + clip; NaN if a log r is NaN.
    """

    tokens: int
    mean: float
    rms: float
    maximum: float
    alpha: float
    beta: float
    clipped_share: float


@torch.no_grad()
def log_probability_gap(
    model: Any,
    batch: Mapping[str, Any],
    generated: Tensor | None = None,
    *,
    new_tokens: int | None = None,
    clip: float = CLIP_RANGE,
    temperature: float = 1.0,
) -> LogProbabilityGap:
    """Compare the log-probabilities of a policy in a training forward with those in generation.

    In reinforcement learning a difference acts as a wrong importance ratio (arXiv 2510.26788).

    Args:
        model: a causal model of Transformers, attached or not. It runs in evaluation mode, without dropout.
        batch: ``input_ids`` of shape (B, T), and ``attention_mask`` if they are padded on the left. With ``labels`` of
            the same shape, tokens with a label other than -100 are compared, and the training forward gets the batch
            unchanged (also TRL's ``fused_lm_head``).
        generated: log-probabilities of the last N tokens of ``input_ids`` from an inference engine, of shape (B, N);
            NaN for tokens to ignore. Default None: the model computes them, token by token.
        new_tokens: number of tokens to sample after each prompt if ``batch`` has no ``labels``; default 32. The global
            RNG state is restored.
        clip: half the range of the ratio in which PPO and GRPO do not clip; default 0.2.
        temperature: divisor of the logits in TRL's ``fused_lm_head``; default 1.

    Raises:
        ValueError: for ``new_tokens`` if nothing is sampled; positive or infinite log-probabilities; other shapes;
            unsupported tensors in ``batch`` (images, ``position_ids`` of packed sequences); and no token to compare.
        TypeError: if ``generated`` is not a tensor.
    """
    if not isinstance(generated, Tensor | None):
        raise TypeError(
            f"generated is a {type(generated).__name__}: give the log-probabilities that it returned for the last N "
            "tokens of input_ids, as a tensor of shape (B, N)"
        )
    if new_tokens is not None and ("labels" in batch or generated is not None):
        raise ValueError(
            "new_tokens has no effect where batch has labels or generated is given, as nothing is drawn: leave it out"
        )
    with restoring_module_state(model):
        model.eval()
        if generated is not None:
            batch = _label_generated(model, batch, generated)
        elif "labels" not in batch:
            batch = _sample(model, batch, new_tokens)
        is_compared = _find_compared_tokens(batch)
        first = int(is_compared.any(0).nonzero()[0])
        training = _compute_at_once(model, batch, first)
        if generated is not None:
            generation = generated[:, first - is_compared.shape[1] :]
        else:
            divisor = temperature if batch.get("fused_lm_head") else 1.0  # the fused head divides logits by it
            generation = _compute_one_by_one(model, batch, first, divisor)
    is_compared = is_compared[:, first:]
    reference = generation[is_compared].double()
    return _compare(training[is_compared].double() - reference, reference, clip)


def _label_generated(model: Any, batch: Mapping[str, Tensor], generated: Tensor) -> dict[str, Tensor]:
    ids = batch["input_ids"]
    rows, length = ids.shape
    if generated.dim() != 2 or len(generated) != rows or not 0 < generated.shape[1] < length:
        raise ValueError(
            f"generated has shape {tuple(generated.shape)}, and input_ids {tuple(ids.shape)}: give a log-probability "
            f"for each of the last N tokens, N from 1 to {length - 1}, as ({rows}, N)"
        )
    if (generated > 0).any() or generated.isinf().any():
        raise ValueError(
            "generated has values above 0 or infinite ones, which are no log-probabilities of tokens that were drawn: "
            "give them as the engine returned them, and NaN for padding"
        )
    labels = torch.full_like(ids, IGNORED)
    labels[:, -generated.shape[1] :] = ids[:, -generated.shape[1] :].masked_fill(generated.isnan(), IGNORED)
    return _make_batch(model, ids, _mask(batch), labels)


def _sample(model: Any, batch: Mapping[str, Tensor], new_tokens: int | None) -> dict[str, Tensor]:
    new_tokens = 32 if new_tokens is None else new_tokens
    prompt, mask = batch["input_ids"], _mask(batch)
    ids = model.generate(
        prompt,
        attention_mask=mask,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        do_sample=True,
        top_k=0,  # the default of generate() is 50
        use_cache=True,
    )
    labels = ids.clone()
    labels[:, : prompt.shape[1]] = IGNORED
    return _make_batch(model, ids, torch.cat([mask, mask.new_ones(len(mask), new_tokens)], 1), labels)


def _make_batch(model: Any, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **_positions(model, mask)}


def _compute_at_once(model: Any, batch: Mapping[str, Any], first: int) -> Tensor:
    """Return the log-probabilities of the tokens from column ``first`` on, of shape (B, T - first)."""
    if batch.get("fused_lm_head"):
        log_probs: Tensor = model(**batch).log_probs
        return log_probs[:, first - 1 :]
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "logits_to_keep")}
    logits = model(**{**inputs, "use_cache": False}).logits
    return _of_chosen(logits[:, first - 1 : -1], batch["input_ids"][:, first:])


def _find_compared_tokens(batch: Mapping[str, Any]) -> Tensor:
    """Return a bool tensor of the shape of ``labels``: True for tokens with a label, except in column 0."""
    ids, labels = batch["input_ids"], batch["labels"]
    if labels.shape != ids.shape:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, and input_ids {tuple(ids.shape)}: one label for each token, "
            f"{IGNORED} where it does not count"
        )
    supported = {*_SUPPORTED, "position_ids"} if _has_usual_positions(batch) else _SUPPORTED
    others = [
        name for name, value in batch.items() if isinstance(value, Tensor) and value.dim() and name not in supported
    ]
    if others:
        raise ValueError(
            f"batch has {', '.join(others)}, which generation token by token does not take: unpack sequences that "
            "share a row (packing=False, padding_free=False); models of more than text are not measured"
        )
    is_compared: Tensor = (labels != IGNORED) & (torch.arange(labels.shape[1], device=labels.device) > 0)
    if not is_compared.any():
        raise ValueError(f"all labels are {IGNORED}, or all of generated is NaN: no token counts")
    return is_compared


def _has_usual_positions(batch: Mapping[str, Any]) -> bool:
    """Return whether ``position_ids`` are those of generation, except for padding."""
    mask, positions = _mask(batch), batch.get("position_ids")
    return not isinstance(positions, Tensor) or not ((positions != positions_of(mask)) & (mask != 0)).any()


def _compute_one_by_one(model: Any, batch: Mapping[str, Any], first: int, temperature: float) -> Tensor:
    """Return the same as :func:`_compute_at_once`, token by token with a cache."""
    ids, mask = batch["input_ids"], _mask(batch)
    columns, cache, start = [], None, 0
    # generate() masks padding on the left only. Tokens after padding on the right are not compared.
    mask = (mask.cumsum(-1) > 0).to(mask.dtype)
    parameters = _parameters_of_forward(model)
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    cache_name = "cache" if "cache" in parameters else "past_key_values"  # before Transformers 5.24
    for column in range(first, ids.shape[1]):
        inputs = {cache_name: cache, **_positions(model, mask[:, :column], start), **last_only}
        output = model(input_ids=ids[:, start:column], attention_mask=mask[:, :column], use_cache=True, **inputs)
        logits = output.logits[:, -1:].float() / temperature
        columns.append(_of_chosen(logits, ids[:, column : column + 1]))
        cache, start = output[cache_name], column
    return torch.cat(columns, 1)


def _mask(batch: Mapping[str, Tensor]) -> Tensor:
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"]) if mask is None else mask


def _positions(model: Any, mask: Tensor, start: int = 0) -> dict[str, Tensor]:
    takes_positions = "position_ids" in _parameters_of_forward(model)
    return {"position_ids": positions_of(mask)[:, start:]} if takes_positions else {}


def _parameters_of_forward(model: Any) -> Mapping[str, Any]:
    # PEFT's forward has **kwargs.
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inspect.signature(base.forward).parameters


def _of_chosen(logits: Tensor, chosen: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, chosen[..., None]).squeeze(-1)


def _compare(log_r: Tensor, reference: Tensor, clip: float) -> LogProbabilityGap:
    centered = reference - reference.mean()
    beta = (centered * (log_r - log_r.mean())).sum() / centered.square().sum()  # 0 / 0 if all are equal
    return LogProbabilityGap(
        tokens=len(log_r),
        mean=log_r.abs().mean().item(),
        rms=log_r.square().mean().sqrt().item(),
        maximum=log_r.abs().max().item(),
        alpha=(log_r.mean() - beta * reference.mean()).item(),
        beta=beta.item(),
        clipped_share=(log_r.expm1().abs() > clip).double().where(~log_r.isnan(), math.nan).mean().item(),
    )
