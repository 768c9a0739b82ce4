"""Tensors of several processes in a directory: each writes its own shards, and other numbers of processes read them.

The engine is ``torch.distributed.checkpoint`` with its safetensors format, so that nothing is pickled: every file tells
for each of its tensors where in the whole one it lies.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_mp.ranks.parallelism import get_rank, get_world_size, is_distributed, local_part
from hf_mp.trainer.checkpoints.manifest import CheckpointError, FileEntry, entry_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

SUFFIX = ".safetensors"
_FILE_BYTES = 2**30  # torch makes a file in memory, and writes it then: of more bytes, there are several


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, FileEntry]:
    """Write each element of ``tensors`` once: a collective call.

    Args:
        folder: a new one, on a file system that all ranks share.
        tensors: by name, contiguous; DTensors, or tensors that are the same on all ranks. Tensors that share memory are
            copied, because safetensors refuses them.

    Returns:
        Size and checksum of every rank's files, by name, on all ranks.

    Raises:
        CheckpointError: on all ranks if one failed.
    """
    import torch.distributed.checkpoint as dcp

    with _as_checkpoint_errors(folder, "could not be saved"):
        settings: Any = {"save_distributed": True, "fqn_to_index_mapping": _files_of(tensors)}
        dcp.save(_copy_shared_memory(tensors), storage_writer=dcp.HuggingFaceStorageWriter(str(folder), **settings))
    with raise_on_all_ranks():
        # torch begins the names of a rank's files with its number, from 1. Each rank reads what it has just written
        # itself, which its system still has in memory.
        mine = {path.name: entry_of(path) for path in folder.glob(f"shard-{get_rank() + 1:05d}-*")}
    files = {name: entry for of_rank in gather_from_ranks(mine) for name, entry in of_rank.items()}
    with raise_on_all_ranks():
        if unseen := [name for name in sorted(files) if not (folder / name).is_file()]:
            raise CheckpointError(
                f"{unseen[0]} was written by another rank and is not there for this one: save to a file system that "
                "all ranks share"
            )
    return files


def _copy_shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors``, those that share memory with an earlier one copied."""
    taken: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        # Such as the tables that 8-bit optimizers share among parameters.
        place = local_part(tensor).data_ptr()
        found[name] = tensor.clone() if place in taken else tensor
        taken.add(place)
    return found


def _files_of(tensors: Mapping[str, Tensor]) -> dict[str, int] | None:
    """The number of the file for each tensor, from 1; None for one file."""
    numbers, number, size = dict[str, int](), 1, 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > _FILE_BYTES:
            number, size = number + 1, 0
        numbers[name], size = number, size + tensor.nbytes
    return numbers if number > 1 else None


def read_shard_metadata(folder: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors in ``folder``, by name: size, dtype and offset of each chunk. Reads only the headers of its files.

    Raises:
        CheckpointError: for a tensor with missing elements.
    """
    # Inside of functions: not every build of torch has torch.distributed.checkpoint.
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    found: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    for name, one in found.items():
        # dcp.load would leave what is missing as it was in memory, without a word.
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

    with _as_checkpoint_errors(folder, "cannot be loaded"):
        dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(folder)))


def gather_from_ranks(value: Any) -> list[Any]:
    """What each rank has given, in their order: a collective call."""
    found = [value] * get_world_size()
    if is_distributed():
        torch.distributed.all_gather_object(found, value)
    return found


def merge_problems(problems: Iterable[str]) -> list[str]:
    """The problems that all ranks found, each once: a collective call."""
    return sorted({line for lines in gather_from_ranks(list(problems)) for line in lines})


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise on all ranks if one raises, on the others a CheckpointError; the end of the block is a collective call."""
    told: CheckpointError | None = None
    other: Exception | None = None  # it is raised as it is, once the others know
    try:
        yield
    except CheckpointError as error:
        told = error
    except Exception as error:
        told, other = CheckpointError(f"{type(error).__name__}: {error}"), error
    found = [one for one in gather_from_ranks(told) if one is not None]
    if other is not None:
        raise other
    if found:
        # Of the class that was raised: that there is no checkpoint yet is no damage, on any rank.
        raise type(found[0])("; ".join(sorted(set(map(str, found))))) from told


@contextmanager
def _as_checkpoint_errors(folder: Path, failed: str) -> Iterator[None]:
    """Turn torch's error into a CheckpointError, and leave out its warning that there is only one process."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            yield
        except CheckpointException as error:  # by rank
            said = [f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items())]
            raise CheckpointError(f"{folder} {failed}: {'; '.join(said)}") from error
