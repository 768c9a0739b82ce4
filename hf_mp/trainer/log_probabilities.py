"""``log_probability_gap``: how far the log-probabilities of training are from those of generation."""

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

IGNORED = -100  # of Transformers and torch: a label that does not count
CLIP_RANGE = 0.2  # of the ratio in PPO and in TRL's GRPO
_SEEN = ("input_ids", "attention_mask", "labels")  # by generation


@dataclass(frozen=True)
class LogProbabilityGap:
    """How tokens' log-probabilities differ: log r = log-probability in training - log-probability in generation.

    Attributes:
        tokens: number of tokens that were compared.
        mean: mean magnitude of log r.
        rms: root mean square of log r.
        maximum: largest magnitude of log r.
        alpha, beta: least-squares fit of log r = alpha + beta * log-probability in generation; NaN if all of these
            log-probabilities are equal.
        clipped_share: share of tokens whose ratio r lies outside of 1 - clip .. 1 + clip by this difference alone; NaN
            if a difference is NaN.
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
    """Compare the log-probabilities of a policy's training forward with those that its generator computed.

    In reinforcement learning the difference acts as a wrong importance ratio: it clips or weights tokens because of
    rounding alone (arXiv 2510.26788).

    Args:
        model: a causal model of Transformers, attached or not. It runs in evaluation mode, without dropout.
        batch: ``input_ids`` of shape (B, T), and ``attention_mask`` where they are padded on the left. With ``labels``
            of the same shape, tokens with a label (not -100) are compared: the training forward gets the whole batch
            unchanged, TRL's ``fused_lm_head`` included, and generation gets the tokens one by one.
        generated: log-probabilities of the last N tokens of ``input_ids``, of shape (B, N), as an inference engine
            returned them; NaN for a token that does not count. Default None: the model itself generates.
        new_tokens: number of tokens to sample after each prompt if ``batch`` has no ``labels``; default 32. They are
            sampled one by one from the whole vocabulary, with a KV cache; the global random state is restored
            afterwards.
        clip: half the range of the ratio in which PPO and GRPO do not clip; default 0.2.
        temperature: the one by which TRL's ``fused_lm_head`` divides the logits; default 1.

    Returns:
        A :class:`LogProbabilityGap`.

    Raises:
        ValueError: for ``new_tokens`` if nothing is sampled; for log-probabilities of another shape, and positive or
            infinite ones; if no token counts; for a ``batch`` with labels of another shape, or with tensors that
            generation does not read (images; ``position_ids`` other than the mask's, as packed sequences have).
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
            batch = _as_given(model, batch, generated)
        elif "labels" not in batch:
            batch = _drawn(model, batch, new_tokens)
        counts = _counted(batch)
        first = int(counts.any(0).nonzero()[0])
        trained = _trained(model, batch, first)
        if generated is None:
            # What TRL's fused head returns is divided by the temperature already.
            again = _generated_again(model, batch, first, temperature if batch.get("fused_lm_head") else 1.0)
        else:
            again = generated[:, first - counts.shape[1] :]
    counts = counts[:, first:]
    before = again[counts].double()
    return _compare(trained[counts].double() - before, before, clip)


def _as_given(model: Any, batch: Mapping[str, Tensor], generated: Tensor) -> dict[str, Tensor]:
    """``batch`` with labels where ``generated`` has a log-probability; a ValueError where it cannot have any."""
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
    return _labelled(model, ids, _mask(batch), labels)


def _drawn(model: Any, batch: Mapping[str, Tensor], new_tokens: int | None) -> dict[str, Tensor]:
    """``batch`` continued by tokens that ``model`` draws, which are its labels."""
    new_tokens = 32 if new_tokens is None else new_tokens
    prompt, mask = batch["input_ids"], _mask(batch)
    ids = model.generate(
        prompt,
        attention_mask=mask,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        do_sample=True,
        top_k=0,  # generate() would leave out all but the 50 likeliest tokens
        use_cache=True,
    )
    labels = ids.clone()
    labels[:, : prompt.shape[1]] = IGNORED
    return _labelled(model, ids, torch.cat([mask, mask.new_ones(len(mask), new_tokens)], 1), labels)


def _labelled(model: Any, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **_positions(model, mask)}


def _trained(model: Any, batch: Mapping[str, Any], first: int) -> Tensor:
    """The log-probabilities of the tokens from column ``first`` on, all computed at once."""
    if batch.get("fused_lm_head"):
        log_probs: Tensor = model(**batch).log_probs
        return log_probs[:, first - 1 :]
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "logits_to_keep")}
    logits = model(**{**inputs, "use_cache": False}).logits
    return _of_chosen(logits[:, first - 1 : -1], batch["input_ids"][:, first:])


def _counted(batch: Mapping[str, Any]) -> Tensor:
    """Which tokens are compared, of the shape of ``labels``: those with one, but for the first of a row.

    Raises:
        ValueError: for labels of another shape, for tensors that generation does not see, and where no token counts.
    """
    ids, labels = batch["input_ids"], batch["labels"]
    if labels.shape != ids.shape:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, and input_ids {tuple(ids.shape)}: one label for each token, "
            f"{IGNORED} where it does not count"
        )
    others = [name for name, one in batch.items() if isinstance(one, Tensor) and one.dim() and name not in _SEEN]
    if "position_ids" in others:
        # Those of generation, wherever there is no padding, are no others.
        mask = _mask(batch)
        if not ((batch["position_ids"] != positions_of(mask)) & (mask != 0)).any():
            others.remove("position_ids")
    if others:
        raise ValueError(
            f"batch has {', '.join(others)}, which generation token by token does not take: unpack sequences that "
            "share a row (packing=False, padding_free=False); models of more than text are not measured"
        )
    counts: Tensor = (labels != IGNORED) & (torch.arange(labels.shape[1], device=labels.device) > 0)
    if not counts.any():
        raise ValueError(f"all labels are {IGNORED}, or all of generated is NaN: no token counts")
    return counts


def _generated_again(model: Any, batch: Mapping[str, Any], first: int, temperature: float) -> Tensor:
    """The log-probabilities of the tokens from column ``first`` on, one by one with a cache, as ``generate()`` does."""
    ids, mask = batch["input_ids"], _mask(batch)
    columns, cache, start = [], None, 0
    # generate() has ones for all that follows the prompt, and hides padding on the left. Tokens behind the zeros on
    # the right do not count.
    mask = (mask.cumsum(-1) > 0).to(mask.dtype)
    takes = _takes(model)
    last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    cache_name = "cache" if "cache" in takes else "past_key_values"  # before Transformers 5.24
    for column in range(first, ids.shape[1]):
        inputs = {cache_name: cache, **_positions(model, mask[:, :column], start), **last}
        output = model(input_ids=ids[:, start:column], attention_mask=mask[:, :column], use_cache=True, **inputs)
        cache, start, logits = output[cache_name], column, output.logits[:, -1:]
        columns.append(_of_chosen(logits.float() / temperature, ids[:, column : column + 1]))
    return torch.cat(columns, 1)


def _mask(batch: Mapping[str, Tensor]) -> Tensor:
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"]) if mask is None else mask


def _positions(model: Any, mask: Tensor, start: int = 0) -> dict[str, Tensor]:
    takes_positions = "position_ids" in _takes(model)
    return {"position_ids": positions_of(mask)[:, start:]} if takes_positions else {}


def _takes(model: Any) -> Mapping[str, Any]:
    # PEFT's forward passes on what it does not name.
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inspect.signature(base.forward).parameters


def _of_chosen(logits: Tensor, chosen: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, chosen[..., None]).squeeze(-1)


def _compare(log_r: Tensor, before: Tensor, clip: float) -> LogProbabilityGap:
    spread = before - before.mean()
    beta = (spread * (log_r - log_r.mean())).sum() / spread.square().sum()  # 0 / 0 where all are equal
    return LogProbabilityGap(
        tokens=len(log_r),
        mean=log_r.abs().mean().item(),
        rms=log_r.square().mean().sqrt().item(),
        maximum=log_r.abs().max().item(),
        alpha=(log_r.mean() - beta * before.mean()).item(),
        beta=beta.item(),
        clipped_share=(log_r.expm1().abs() > clip).double().where(~log_r.isnan(), math.nan).mean().item(),
    )
