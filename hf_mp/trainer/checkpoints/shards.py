"""Save and load sharded tensors by ``torch.distributed.checkpoint`` as safetensors, without pickle.

Each rank writes its shards with their offsets, so any number of ranks can read them.
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
_FILE_BYTES = 2**30  # largest file of several tensors: torch builds each in host memory


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, FileEntry]:
    """Write each tensor once to the empty ``folder``, which all ranks share. A collective call.

    ``tensors`` are contiguous: DTensors, or equal on all ranks. Returns the entries of the files of all ranks by name.
    """
    import torch.distributed.checkpoint as dcp

    with _as_checkpoint_errors(folder, "could not be saved"):
        settings: Any = {"save_distributed": True, "fqn_to_index_mapping": _file_numbers(tensors)}
        dcp.save(_copy_shared_memory(tensors), storage_writer=dcp.HuggingFaceStorageWriter(str(folder), **settings))
    with raise_on_all_ranks():
        # torch numbers ranks from 1. Own files are still in the page cache.
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
    """Copy tensors that share memory (tables of 8-bit optimizers): safetensors rejects them."""
    addresses: set[int] = set()
    copied = {}
    for name, tensor in tensors.items():
        address = local_part(tensor).data_ptr()
        copied[name] = tensor.clone() if address in addresses else tensor
        addresses.add(address)
    return copied


def _file_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int] | None:
    """Return the file number of each tensor, from 1; None if one file is enough."""
    numbers: dict[str, int] = {}
    number, size_bytes = 1, 0
    for name, tensor in tensors.items():
        if size_bytes and size_bytes + tensor.nbytes > _FILE_BYTES:
            number, size_bytes = number + 1, 0
        numbers[name] = number
        size_bytes += tensor.nbytes
    return numbers if number > 1 else None


def read_shard_metadata(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return dtype, size and chunks of the tensors by name, from the headers of the files."""
    # Some builds of torch do not have this module.
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    metadata: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    for name, stored in metadata.items():
        # dcp.load leaves missing elements unchanged.
        elements = sum(chunk.sizes.numel() for chunk in stored.chunks)
        if elements != stored.size.numel():
            raise CheckpointError(
                f"{folder} holds {elements} of the {stored.size.numel()} elements of {name}: files are missing, or of "
                "another checkpoint; take an earlier one"
            )
    return metadata


def read_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill ``tensors`` (plain, or DTensors on any mesh) in place. A collective call."""
    import torch.distributed.checkpoint as dcp

    with _as_checkpoint_errors(folder, "cannot be loaded"):
        dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(folder)))


def gather_from_ranks(value: Any) -> list[Any]:
    """Return the ``value`` of each rank. A collective call."""
    values = [value] * get_world_size()
    if is_distributed():
        torch.distributed.all_gather_object(values, value)
    return values


def merge_problems(problems: Iterable[str]) -> list[str]:
    """A collective call."""
    return sorted({line for lines in gather_from_ranks(list(problems)) for line in lines})


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise a CheckpointError on all ranks if the block raises on one; its end is a collective call.

    A rank with an exception of another class raises that exception.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    is_other = own is not None and not isinstance(own, CheckpointError)
    sent = CheckpointError(f"{type(own).__name__}: {own}") if is_other else own
    errors = [error for error in gather_from_ranks(sent) if error is not None]
    if own is not None and is_other:
        raise own
    if errors:
        # Keep the class: NoCheckpointError is raised on all ranks.
        raise type(errors[0])("; ".join(sorted(set(map(str, errors))))) from own


@contextmanager
def _as_checkpoint_errors(folder: Path, failed: str) -> Iterator[None]:
    """Convert torch's error, and suppress its warning for a single process."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            yield
        except CheckpointException as error:
            reasons = [f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items())]
            raise CheckpointError(f"{folder} {failed}: {'; '.join(reasons)}") from error
