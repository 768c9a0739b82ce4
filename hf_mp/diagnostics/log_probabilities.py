"""``log_probability_gap``: how far the log-probabilities of training are from those of generation."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CLIP_RANGE = 0.2  # of the ratio in PPO and in TRL's GRPO


@dataclass(frozen=True)
class LogProbabilityGap:
    """The differences log r of tokens' log-probabilities, training's less generation's.

    Attributes:
        tokens: how many were compared.
        mean: of their magnitudes.
        rms: root of the mean square.
        maximum: the largest magnitude.
        alpha, beta: log r = alpha + beta * log-probability in generation, by least squares; NaN where all of these are
            equal.
        clipped_share: tokens whose ratio r leaves 1 - clip .. 1 + clip by this alone.
        dtype: of the logits in generation, as torch prints it, without "torch."; of the log-probabilities, if given.
    """

    tokens: int
    mean: float
    rms: float
    maximum: float
    alpha: float
    beta: float
    clipped_share: float
    dtype: str


@torch.no_grad()
def log_probability_gap(
    model: Any,
    batch: Mapping[str, Tensor],
    generated: Tensor | None = None,
    *,
    new_tokens: int = 32,
    clip: float = CLIP_RANGE,
    **generation: Any,
) -> LogProbabilityGap:
    """Compare the log-probabilities of a policy's training forward with those that its generator computed.

    In reinforcement learning the difference acts as a wrong importance ratio: tokens are clipped, or weighted, for
    rounding alone (arXiv 2510.26788).

    Args:
        model: a causal model of Transformers, attached or not. It runs in evaluation mode, without dropout.
        batch: ``input_ids`` of shape (B, T), and ``attention_mask`` where they are padded on the left.
        generated: log-probabilities of the last N tokens of ``input_ids``, of shape (B, N), as an inference engine
            returned them; NaN for a token that does not count. Default None: the model itself generates ``new_tokens``
            after each prompt in ``batch``, one by one, with its KV cache.
        new_tokens: how many; default 32.
        clip: half the range of the ratio in which PPO and GRPO do not clip; default 0.2.
        generation: further arguments of ``model.generate``; by default it samples from all tokens.

    Returns:
        A :class:`LogProbabilityGap`.

    Raises:
        ValueError: for log-probabilities of another shape, positive or infinite ones, and where no token counts.
    """
    was_training = model.training
    model.eval()
    try:
        if generated is None:
            ids, mask, found, dtype = _generate(model, batch, new_tokens, generation)
        else:
            ids, mask, found, dtype = batch["input_ids"], _mask(batch), generated, generated.dtype
            _check(ids, found)
        trained = _of_chosen(_forward(model, ids, mask)[:, -found.shape[1] - 1 : -1], ids[:, -found.shape[1] :])
    finally:
        model.train(was_training)
    counts = ~found.isnan()
    before = found[counts].double()
    return _compare(trained[counts].double() - before, before, clip, str(dtype).removeprefix("torch."))


def _generate(
    model: Any, batch: Mapping[str, Tensor], new_tokens: int, settings: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
    prompt, mask = batch["input_ids"], _mask(batch)
    settings = {"do_sample": True, "top_k": 0, "use_cache": True, **settings}
    drawn = model.generate(
        prompt,
        attention_mask=mask,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
        **settings,
    )
    logits = torch.stack(drawn.logits, 1)
    mask = torch.cat([mask, mask.new_ones(len(mask), new_tokens)], 1)
    return drawn.sequences, mask, _of_chosen(logits, drawn.sequences[:, -new_tokens:]), drawn.logits[0].dtype


def _mask(batch: Mapping[str, Tensor]) -> Tensor:
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"]) if mask is None else mask


def _forward(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    # As generate() counts positions: padding on the left has none.
    takes = inspect.signature(model.forward).parameters
    positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if "position_ids" in takes else {}
    logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False, **positions).logits
    return logits


def _of_chosen(logits: Tensor, chosen: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, chosen[..., None]).squeeze(-1)


def _check(ids: Tensor, found: Tensor) -> None:
    rows, length = ids.shape
    if found.dim() != 2 or len(found) != rows or not 0 < found.shape[1] < length:
        raise ValueError(
            f"generated has shape {tuple(found.shape)}, and input_ids {tuple(ids.shape)}: give a log-probability for "
            f"each of the last N tokens, N from 1 to {length - 1}, as ({rows}, N)"
        )
    if (found > 0).any() or found.isinf().any():
        raise ValueError(
            "generated has values above 0 or infinite ones, which are no log-probabilities of tokens that were drawn: "
            "give them as the engine returned them, and NaN for padding"
        )
    if found.isnan().all():
        raise ValueError("generated is NaN throughout: no token counts")


def _compare(log_r: Tensor, before: Tensor, clip: float, dtype: str) -> LogProbabilityGap:
    spread = before - before.mean()
    beta = (spread * (log_r - log_r.mean())).sum() / spread.square().sum()  # 0 / 0 where all are equal
    return LogProbabilityGap(
        tokens=len(log_r),
        mean=log_r.abs().mean().item(),
        rms=log_r.square().mean().sqrt().item(),
        maximum=log_r.abs().max().item(),
        alpha=(log_r.mean() - beta * before.mean()).item(),
        beta=beta.item(),
        clipped_share=(log_r.expm1().abs() > clip).double().mean().item(),
        dtype=dtype,
    )
