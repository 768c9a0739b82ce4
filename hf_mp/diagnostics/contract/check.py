"""Risky states of a model or a checkpoint in a folder."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hf_mp.diagnostics.contract.folders import evidence_of, read_folder
from hf_mp.diagnostics.contract.risks import ASSUMED, Risk, TensorSample, find_risks, mean
from hf_mp.dtypes import spell

_ROLES = {"weights": "weights", "masters": "masters", "firsts": "first moments", "seconds": "second moments"}


@dataclass(frozen=True)
class FolderCheck:
    """Result of :func:`check_folder`; prints as lines.

    Attributes:
        path: the checked folder; the newest checkpoint of a run.
        held: number of elements by role and dtype, for example ``{"weights": {"bf16": 124439808}}``.
        risks: states that lose bits.
        assumed_learning_rate: for lost updates; None if one was given.
        norms, norms_at_one: number of norm weights, and of those that are all 1, their initial value.
        unchanged: share of elements equal to the base, by kind of module; empty without a base.
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
        if self.risks:
            return "\n".join((*lines, *map(str, self.risks)))
        rate = self.assumed_learning_rate
        assumption = "" if rate is None else f" at learning rate {rate:g}, {ASSUMED}"
        return "\n".join((*lines, f"no risk was found{assumption}"))


def check_folder(
    path: Path,
    learning_rate: float | None = None,
    *,
    keeps_bits: bool = False,
    base: Path | None = None,
) -> FolderCheck:
    """Find risky states by headers and samples, without running code of the checkpoint.

    Args:
        path: folder of a model, a run, or a checkpoint of a Trainer, ``torch.distributed.checkpoint`` (FSDP2),
            DeepSpeed or hf_mp.
        learning_rate: size of the updates; default: the checkpoint's, or 1e-5, usual in fine-tuning.
        keeps_bits: whether the optimizer rounds stochastically, which is not in its state; default False.
        base: folder of the model before training, to find weights that did not change; default None.

    Raises:
        ValueError: if there are no weights, a file cannot be read, the learning rate is not positive and finite, or no
            weight is in the base.
    """
    if learning_rate is not None and not 0.0 < learning_rate < math.inf:
        raise ValueError(f"a learning rate must be positive and finite, such as 1e-5, not {learning_rate}")
    folder = read_folder(path)
    evidence = evidence_of(
        folder, learning_rate, keeps_bits=keeps_bits, base={} if base is None else read_folder(base).parts
    )
    elements: dict[str, Counter[str]] = defaultdict(Counter)
    for role, role_name in _ROLES.items():
        for one in getattr(evidence, role):
            elements[role_name][spell(one.dtype)] += one.elements
    at_one = [bool((one.values == 1).all()) for one in evidence.weights if one.is_norm]
    return FolderCheck(
        str(folder.path),
        dict(elements),
        find_risks(evidence),
        assumed_learning_rate=evidence.learning_rate if evidence.assumes_learning_rate else None,
        norms=len(at_one),
        norms_at_one=sum(at_one),
        unchanged={} if base is None else _unchanged(evidence.weights, folder.path, base),
    )


def _unchanged(weights: Iterable[TensorSample], path: Path, base: Path) -> dict[str, float]:
    """Return shares of elements equal to the base by kind of module, largest first."""
    shares: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for one in weights:
        if one.unchanged_share is not None:
            kind = [part for part in one.name.split(".") if not part.isdecimal()][-2:]
            shares[".".join(kind)].append((one.elements, one.unchanged_share))
    if not shares:
        raise ValueError(
            f"no weight of {path} has the name and the size of one in {base}: pass the model that training began from. "
            "If shards of several ranks hold it, save it with save_pretrained first"
        )
    return dict(sorted(((kind, mean(found)) for kind, found in shares.items()), key=lambda entry: -entry[1]))
