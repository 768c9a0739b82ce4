"""``hf-mp check``: the risky states of a model or a checkpoint in a folder, and the way out of each."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hf_mp.diagnostics.contract.folders import evidence_of, read_folder
from hf_mp.diagnostics.contract.risks import ASSUMED, Held, Risk, find_risks, mean
from hf_mp.dtypes import spell

_ROLES = {"weights": "weights", "masters": "masters", "firsts": "first moments", "seconds": "second moments"}


@dataclass(frozen=True)
class FolderCheck:
    """What :func:`check_folder` found; prints as lines.

    Attributes:
        path: of what was looked at: of a run, its newest checkpoint.
        held: elements by role and dtype, as ``{"weights": {"bf16": 124439808}}``.
        risks: states that lose bits.
        assumed_learning_rate: the learning rate at which updates of 16-bit weights were counted, if neither the caller
            nor the folder gave one; else None.
        norms: how many weights of norms there are.
        norms_at_one: how many of them are 1 throughout, as they were initialized.
        unchanged: the share of elements that are bit for bit the base's, by kind of module; empty without a base.
    """

    path: str
    held: Mapping[str, Mapping[str, int]]
    risks: tuple[Risk, ...]
    assumed_learning_rate: float | None = None
    norms: int = 0
    norms_at_one: int = 0
    unchanged: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        stored = (
            f"  {role}: {', '.join(f'{count:,} {dtype}' for dtype, count in dtypes.items())}"
            for role, dtypes in self.held.items()
        )
        lines = [f"{self.path} holds", *stored]
        if self.norms_at_one and not self.unchanged:
            lines.append(
                f"  {self.norms_at_one} of {self.norms} norm weights are exactly 1: they were not trained, or "
                "rounding dropped their updates (--base FOLDER, the model that training began from, tells which)"
            )
        if self.unchanged:
            lines.append("bit for bit as in the base, by samples:")
            lines += [f"  {share:7.2%} of {kind}" for kind, share in self.unchanged.items()]
        rate = self.assumed_learning_rate
        none = "no risk was found" + (f" at learning rate {rate:g}, {ASSUMED}" if rate is not None else "")
        return "\n".join((*lines, *(map(str, self.risks) if self.risks else [none])))


def check_folder(
    path: Path,
    learning_rate: float | None = None,
    *,
    keeps_bits: bool = False,
    base: Path | None = None,
) -> FolderCheck:
    """Find the risky states of a model or a checkpoint, by headers and samples; nothing of it is run.

    Args:
        path: a folder of a model, a run, or a checkpoint: a Trainer's, FSDP2's and other shards of
            ``torch.distributed.checkpoint``, DeepSpeed's, or ours.
        learning_rate: at which updates are lost or not; default: the checkpoint's, or 1e-5, usual in fine-tuning, for a
            folder that has none.
        keeps_bits: the optimizer rounds stochastically, which its state does not show.
        base: a folder of what training began from; tells which weights never moved.

    Raises:
        ValueError: where there are no weights, for a file that cannot be read, for a learning rate that is not
            positive and finite, and for a base that has none of the weights.
    """
    # Negated, so that NaN is refused as well.
    if learning_rate is not None and not 0.0 < learning_rate < math.inf:
        raise ValueError(f"a learning rate must be positive and finite, such as 1e-5, not {learning_rate}")
    folder = read_folder(path)
    began_from = {} if base is None else read_folder(base).parts
    evidence = evidence_of(folder, learning_rate, keeps_bits=keeps_bits, base=began_from)
    held: dict[str, Counter[str]] = defaultdict(Counter)
    for role, words in _ROLES.items():
        for one in getattr(evidence, role):
            held[words][spell(one.dtype)] += one.elements
    at_one = [bool((one.values == 1).all()) for one in evidence.weights if one.is_norm]
    return FolderCheck(
        str(folder.path),
        dict(held),
        find_risks(evidence),
        assumed_learning_rate=evidence.learning_rate if evidence.assumes_learning_rate else None,
        norms=len(at_one),
        norms_at_one=sum(at_one),
        unchanged={} if base is None else _unchanged(evidence.weights, folder.path, base),
    )


def _unchanged(weights: Iterable[Held], path: Path, base: Path) -> dict[str, float]:
    """The share of weights that are as in the base, by kind of module (``q_proj.weight``); the largest first."""
    shares: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for one in weights:
        if one.unchanged_share is not None:
            kind = [word for word in one.name.split(".") if not word.isdecimal()][-2:]
            shares[".".join(kind)].append((one.elements, one.unchanged_share))
    if not shares:
        raise ValueError(
            f"no weight of {path} has the name and the size of one in {base}: pass the model that training began from. "
            "If shards of several ranks hold it, save it with save_pretrained first"
        )
    return dict(sorted(((kind, mean(found)) for kind, found in shares.items()), key=lambda entry: -entry[1]))
