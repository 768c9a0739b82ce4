"""``hf-mp check``: the risky states of a model or a checkpoint in a folder, and the way out of each."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_mp.diagnostics.contract.folders import evidence_of, read_folder
from hf_mp.diagnostics.contract.risks import Risk, find_risks
from hf_mp.policy import spell

_UNDECIDED = (
    "no risk was found; to train these 16-bit weights on may be one: name its learning rate, as --learning-rate 1e-5"
)
_ROLES = {"weights": "weights", "masters": "masters", "firsts": "first moments", "seconds": "second moments"}


@dataclass(frozen=True)
class FolderCheck:
    """What :func:`check_folder` found; prints as lines.

    Attributes:
        path: of what was looked at: of a run, its newest checkpoint.
        held: elements by role and dtype, as ``{"weights": {"bf16": 124439808}}``.
        risks: states that lose bits.
        needs_learning_rate: whether 16-bit weights are a risk depends on a learning rate that is not known.
    """

    path: str
    held: Mapping[str, Mapping[str, int]]
    risks: tuple[Risk, ...]
    needs_learning_rate: bool = False

    def __str__(self) -> str:
        stored = (
            f"  {role}: {', '.join(f'{count:,} {dtype}' for dtype, count in dtypes.items())}"
            for role, dtypes in self.held.items()
        )
        none = _UNDECIDED if self.needs_learning_rate else "no risk was found"
        return "\n".join((f"{self.path} holds", *stored, *(map(str, self.risks) if self.risks else [none])))


def check_folder(
    path: Path,
    learning_rate: float | None = None,
    *,
    keeps_bits: bool = False,
) -> FolderCheck:
    """Find the risky states of a model or a checkpoint, by headers and samples; nothing of it is run.

    Args:
        path: a folder of a model, a run, or a checkpoint: a Trainer's, FSDP2's and other shards of
            ``torch.distributed.checkpoint``, DeepSpeed's, or ours.
        learning_rate: at which updates are lost or not; default: the checkpoint's. A folder of a model has none, and
            16-bit weights are a risk there only if it is given.
        keeps_bits: the optimizer rounds stochastically, which its state does not show.

    Raises:
        ValueError: where there are no weights, for a file that cannot be read, and for a learning rate that is not
            positive and finite.
    """
    # Negated, so that NaN is refused as well.
    if learning_rate is not None and not 0.0 < learning_rate < math.inf:
        raise ValueError(f"a learning rate must be positive and finite, as 1e-5, not {learning_rate}")
    folder = read_folder(path)
    evidence = evidence_of(folder, learning_rate, keeps_bits=keeps_bits)
    held: dict[str, Counter[str]] = defaultdict(Counter)
    for role, words in _ROLES.items():
        for one in getattr(evidence, role):
            held[words][spell(one.dtype)] += one.elements
    return FolderCheck(
        str(folder.path),
        dict(held),
        find_risks(evidence),
        # A folder of a model alone may be there to be served: only who trains it on loses updates.
        needs_learning_rate=bool(evidence.narrow_weights) and not (evidence.is_training or keeps_bits),
    )
