"""Which ranks did not come, when one that has waited for them fails: they died, or hang."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # not in every build of torch

_GRACE_SECONDS = 10.0  # for the others to fail too, where init_process_group does not give them less
# What gloo's errors, plain RuntimeErrors, have in them; those of NCCL and of a store have classes of their own.
_OF_GLOO = ("gloo/transport", "Connection closed by peer", "Application timeout")


@contextmanager
def naming_missing_ranks(group: ProcessGroup | None = None) -> Iterator[None]:
    """Have the error of a collective that ended without some of its ranks name them, and say what to do.

    How long a collective waits is what ``init_process_group(timeout=...)`` says; this waits for 10 s more at most.

    Raises:
        RuntimeError: from torch's, naming the ranks of ``group`` (default: all) that have not failed along.
    """
    try:
        yield
    except RuntimeError as error:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise
        if not isinstance(error, torch.distributed.DistError) and not any(words in str(error) for words in _OF_GLOO):
            raise
        raise RuntimeError(
            f"processes that train one model have lost each other: {_missing(group)}. What they printed last says why. "
            "Start all of them anew from the newest whole checkpoint (train(resume_from_checkpoint=True), or "
            "hf_mp.load_checkpoint of the run's directory). How long the others wait: init_process_group(timeout=...), "
            "or ddp_timeout of TrainingArguments"
        ) from error


def default_store() -> Any:
    """The store of all processes; None where there is none to ask: MPI, a fake process group, another torch."""
    distributed: Any = torch.distributed
    find_store = getattr(distributed.distributed_c10d, "_get_default_store", None)  # private
    return None if find_store is None or distributed.get_backend() == "fake" else find_store()


def _missing(group: ProcessGroup | None) -> str:
    distributed: Any = torch.distributed
    group = distributed.group.WORLD if group is None else group
    ranks, mine = distributed.get_process_group_ranks(group), distributed.get_rank()
    store, keys = default_store(), {rank: f"hf_mp/lost/{rank}" for rank in ranks}
    if store is None:
        return f"rank {mine} is there, and one of {ranks} died or hangs"
    end = time.monotonic() + min(store.timeout.total_seconds(), _GRACE_SECONDS)
    try:
        store.set(keys[mine], "here")  # does not wait for an answer
        if not _comes(store, keys[mine], end):
            raise distributed.DistNetworkError("it does not answer")
        missing = [rank for rank, key in keys.items() if not _comes(store, key, end)]
    except distributed.DistNetworkError as error:
        return f"the process that keeps their addresses (rank 0, or torchrun) has ended ({error})"
    with suppress(distributed.DistNetworkError):  # where its process has said the same and ended
        _clear(store, [*keys.values()], len(ranks) - len(missing))
    if not missing:
        return f"all of ranks {ranks} are there, and the connection between them broke"
    return f"rank {mine} is there, and rank {', '.join(map(str, missing))} of {ranks} died or hangs"


def _comes(store: Any, key: str, end: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=max(end - time.monotonic(), 0.05)))
    except torch.distributed.DistNetworkError:
        raise
    except RuntimeError:  # it did not come in time: that is the answer
        return False
    return True


def _clear(store: Any, keys: list[str], present: int) -> None:
    """Have the last rank that has looked at ``keys`` delete them, for the next failure in the same store."""
    counter = f"{keys[0]}/looked"
    if store.add(counter, 1) == present:
        for key in (*keys, counter):
            store.delete_key(key)
