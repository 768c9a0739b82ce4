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
from hf_mp.weights.ranks.placement import get_world_size, is_running, local_part

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
    """Write each element of ``tensors`` once: a collective call.

    Args:
        folder: a new one, on a file system that all ranks share.
        tensors: by name, contiguous; DTensors, or tensors that are the same on all ranks. Tensors that share memory are
            copied, because safetensors refuses them.
        finish: called on the first rank when all is written, with the size and checksum of every rank's files, by name.
        asynchronous: return once the tensors are copied to the CPU, and write in a thread.

    Returns:
        A future, done when ``finish`` has returned; it raises a :class:`CheckpointError` on all ranks if one failed.
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
            # Logged as well: nobody may ask for the result of the last save.
            logger.error(str(error))
            done.set_exception(error)

    with _as_checkpoint_error(folder), _quiet():
        world = torch.distributed.group.WORLD if torch.distributed.is_available() else None
        upload: Any = dcp.async_save(tensors, storage_writer=writer, process_group=_group_for_thread(world))
    upload.add_done_callback(take_over)
    return done


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors``, those that share memory with an earlier one copied."""
    taken: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        place = local_part(tensor).data_ptr()
        found[name] = tensor.clone() if place in taken else tensor
        taken.add(place)
    return found


def read_layout(folder: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors in ``folder``, by name: size, dtype and offset of each chunk. Reads only the headers of its files.

    Raises:
        CheckpointError: for a tensor with missing elements.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    found: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    for name, one in found.items():
        held = sum(chunk.sizes.numel() for chunk in one.chunks)
        if held != one.size.numel():
            raise CheckpointError(
                f"{folder} holds {held} of the {one.size.numel()} elements of {name}: files are missing, or of another "
                "checkpoint; take an earlier one"
            )
    return found


def read_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill ``tensors``, plain or DTensors on any mesh, in place from the files in ``folder``: a collective call.

    Raises:
        CheckpointError: on all ranks, for files that cannot be read and sizes that differ.
    """
    import torch.distributed.checkpoint as dcp

    with _as_checkpoint_error(folder, saving=False), _quiet():
        dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(folder)))


def together(problems: Iterable[str]) -> list[str]:
    """The problems that all ranks found, each once: a collective call."""
    mine = list(problems)
    found = [mine] * get_world_size()
    if is_running():
        torch.distributed.all_gather_object(found, mine)
    return sorted({line for lines in found for line in lines})


@contextmanager
def refused_together() -> Iterator[None]:
    """Raise on all ranks if one raises, on the others a CheckpointError; the end of the block is a collective call."""
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
        yield
    except CheckpointException as error:  # by rank
        said = [f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items())]
        what = "could not be saved" if saving else "cannot be loaded"
        raise CheckpointError(f"{folder} {what}: {'; '.join(said)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore torch's warning that there is only one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


@lru_cache(maxsize=1)
def _group_for_thread(world: ProcessGroup | None) -> ProcessGroup | None:
    """A second group of the ranks of ``world``: collectives of two threads on one group would mix."""
    return None if world is None else torch.distributed.new_group(backend="gloo")


def _writer_class() -> Any:
    """The writer; made here because not every build of torch has its base class."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    class Writer(HuggingFaceStorageWriter):
        """Passes the files that were written to ``finish``, with the checksums that each rank computes of its own."""

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
