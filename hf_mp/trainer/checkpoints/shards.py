"""Tensors of several processes in a directory: each writes its own shards, and other numbers of processes read them.

The engine is ``torch.distributed.checkpoint`` with its safetensors format, so that nothing is pickled: every file tells
for each of its tensors where in the whole one it lies.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_mp.trainer.checkpoints.manifest import CheckpointError, FileEntry, sha256
from hf_mp.weights.distributed import get_world_size, is_running, local_part
from hf_mp.weights.missing_ranks import naming_missing_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # not in every build of torch
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

logger = logging.get_logger(__name__)
SUFFIX = ".safetensors"
Finish = Callable[[Mapping[str, FileEntry]], None]


def write_shards(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    finish: Finish = lambda files: None,
    asynchronous: bool = False,
) -> Future[None]:
    """Write ``tensors``, whole ones that all ranks have alike and DTensors, each element once: a collective call.

    Args:
        folder: a new one, on a file system that all ranks share.
        tensors: by name, contiguous; what begins in the same place as another is copied, which safetensors refuses.
        finish: called on the first rank when all is written, with the files of all ranks by name, as their writers know
            them.
        asynchronous: return once the tensors are copied to the CPU, and write in a thread.

    Returns:
        Done when ``finish`` has returned; a :class:`CheckpointError` on all ranks where one of them failed.
    """
    import torch.distributed.checkpoint as dcp

    writer, tensors = _writer_class()(folder, finish), _apart(tensors)
    done: Future[None] = Future()
    if not asynchronous:
        with _as_checkpoint_error(folder), _quiet():
            dcp.save(tensors, storage_writer=writer)
        done.set_result(None)
        return done

    def take_over(upload: Future[Any]) -> None:
        try:
            with _as_checkpoint_error(folder):
                upload.result()
            done.set_result(None)
        except BaseException as error:  # whatever ended the thread: the caller's result() raises it
            logger.error(str(error))  # that of the last save may never be asked for
            done.set_exception(error)

    with _as_checkpoint_error(folder), _quiet():
        world = torch.distributed.group.WORLD if torch.distributed.is_available() else None
        upload: Any = dcp.async_save(tensors, storage_writer=writer, process_group=_group_for_thread(world))
    upload.add_done_callback(take_over)
    return done


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    taken: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        place = local_part(tensor).data_ptr()
        found[name] = tensor.clone() if place in taken else tensor
        taken.add(place)
    return found


def read_layout(folder: Path) -> dict[str, TensorStorageMetadata]:
    """What is in ``folder``, by name: size, dtype and place of each chunk. Reads the heads of its files.

    Raises:
        CheckpointError: for a tensor of which elements are missing.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    found: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    for name, one in found.items():
        held = sum(chunk.sizes.numel() for chunk in one.chunks)
        if held != one.size.numel():
            raise CheckpointError(
                f"{folder} holds {held} of the {one.size.numel()} elements of {name}: files are missing, or of another "
                "checkpoint"
            )
    return found


def read_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill ``tensors``, whole ones or DTensors of any mesh, in place from what was written: a collective call.

    Raises:
        CheckpointError: on all ranks, for what cannot be read and for sizes that differ.
    """
    import torch.distributed.checkpoint as dcp

    with _as_checkpoint_error(folder, saving=False), _quiet():
        dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(folder)))


def together(problems: Iterable[str]) -> list[str]:
    """What all ranks have found, each line once: a collective call."""
    mine = list(problems)
    found = [mine] * get_world_size()
    if is_running():
        with naming_missing_ranks():
            torch.distributed.all_gather_object(found, mine)
    return sorted({line for lines in found for line in lines})


@contextmanager
def refused_together() -> Iterator[None]:
    """Have what one rank raises end all, the others with a CheckpointError: a collective call, when the block ends."""
    error: Exception | None = None
    try:
        yield
    except Exception as failure:  # it is raised below, once the others know
        error = failure
    known = isinstance(error, CheckpointError)
    said = together([] if error is None else [str(error) if known else f"{type(error).__name__}: {error}"])
    if error is not None and not known:
        raise error
    if said:
        raise CheckpointError("; ".join(said)) from error


@contextmanager
def _as_checkpoint_error(folder: Path, *, saving: bool = True) -> Iterator[None]:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with naming_missing_ranks():
            yield
    except CheckpointException as error:  # by rank
        said = [f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items())]
        what = "could not be saved" if saving else "cannot be loaded"
        raise CheckpointError(f"{folder} {what}: {'; '.join(said)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that a single process is single."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


@lru_cache(maxsize=1)
def _group_for_thread(world: ProcessGroup | None) -> ProcessGroup | None:
    """A second group of the ranks of ``world``: collectives of two threads on one group would mix."""
    return None if world is None else torch.distributed.new_group(backend="gloo")


def _writer_class() -> Any:
    """A class of torch's, which not every build of it has."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    class Writer(HuggingFaceStorageWriter):
        """Tells which files it wrote, with their checksums, which each rank computes of its own."""

        def __init__(self, folder: Path, finish: Finish) -> None:
            super().__init__(str(folder), save_distributed=True)
            self._finish = finish

        def write_data(self, plan: Any, planner: Any) -> Any:
            results = super().write_data(plan, planner).wait()
            names = {result.storage_data.relative_path for result in results}
            paths = {name: Path(self.path, name) for name in names}
            entries = {name: FileEntry(path.stat().st_size, sha256(path)) for name, path in paths.items()}
            written: Any = torch.futures.Future()
            written.set_result(
                [replace(one, storage_data=(name := one.storage_data.relative_path, entries[name])) for one in results]
            )
            return written

        def finish(self, metadata: Any, results: Any) -> None:
            files = dict(result.storage_data for of_rank in results for result in of_rank)
            if unseen := [name for name in sorted(files) if not Path(self.path, name).is_file()]:
                raise CheckpointError(
                    f"{unseen[0]} was written by another rank and is not there for the first one: save to a file "
                    "system that all ranks share"
                )
            self._finish(files)

    return Writer
