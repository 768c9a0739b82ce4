"""Slabs in host memory, and the chunks that are copied from and to them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_mp.weights.offload import host_memory
from hf_mp.weights.offload.chunks import GRADIENT, REMAINDER, bundle, cut
from hf_mp.weights.offload.host_memory import free_bytes, padded, reserve

CPU = torch.device("cpu")
SHAPES = [torch.Size(shape) for shape in ((3, 50), (64,), (5, 100), ())]


def make_rooms(kinds: dict[str, torch.dtype]) -> list[tuple[Tensor, Any]]:
    rooms = reserve([(dtype, shape) for dtype in kinds.values() for shape in SHAPES], CPU)
    by_key = {key: rooms[place * len(SHAPES) :] for place, key in enumerate(kinds)}
    return [(torch.empty(shape), {key: by_key[key][n] for key in kinds}) for n, shape in enumerate(SHAPES)]


def test_each_dtype_is_one_allocation() -> None:
    kinds = {REMAINDER: torch.int16, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    rooms = [room for _, rooms in make_rooms(kinds) for room in rooms.values()]
    assert len({room.slab.data_ptr() for room in rooms}) == 2
    assert all(room.begin % 64 == 0 and not room.view.any() for room in rooms)
    places = sorted((room.slab.data_ptr(), room.begin, room.begin + room.numel) for room in rooms)
    assert all(one[2] <= other[1] for one, other in pairwise(places) if one[0] == other[0])
    assert sum(room.slab.nbytes for room in {id(room.slab): room for room in rooms}.values()) == (
        sum(padded(shape.numel()) for shape in SHAPES) * 10
    )


@pytest.mark.parametrize("window", [4000, 10_000])
def test_chunks_have_all_elements_once_and_neighbours_are_one_copy(window: int) -> None:
    kinds = {REMAINDER: torch.int16, "exp_avg": torch.float32, GRADIENT: torch.float16}
    pairs = make_rooms(kinds)
    chunks = list(cut(pairs, window))
    pieces = [piece for chunk in chunks for piece in chunk.pieces]
    for parameter, _ in pairs:
        own = [(piece.begin, piece.end) for piece in pieces if piece.parameter is parameter]
        assert [begin for begin, _ in own] == [0, *[end for _, end in own[:-1]]] and own[-1][1] == parameter.numel()
    for chunk in chunks:
        assert chunk.bytes <= window
        memory = torch.zeros(window, dtype=torch.uint8)
        slabs, inside, written = chunk.place(memory)
        assert [slab.dtype for slab in slabs] == [torch.int16, torch.float32] and written == 2
        for number, part in enumerate(inside):
            part.fill_(number + 1)
        chunk.reads = {GRADIENT}
        slabs, inside, written = chunk.place(memory)
        assert [slab.dtype for slab in slabs] == [torch.int16, torch.float32, torch.float16] and written == 2
        assert all(torch.equal(part, torch.full_like(part, n + 1)) for n, part in enumerate(inside[:2]))  # apart
        assert not inside[2].any()


def test_whole_parameters_are_together_up_to_a_limit() -> None:
    pairs = make_rooms({REMAINDER: torch.int16, "state1": torch.uint8})
    chunks = list(bundle(pairs, 10_000, 300))
    assert [[piece.parameter.numel() for piece in chunk.pieces] for chunk in chunks] == [[150, 64], [500], [1]]
    assert all(
        not chunk.is_sliced and piece.end == piece.parameter.numel() for chunk in chunks for piece in chunk.pieces
    )
    assert len(list(bundle(pairs, 600, 10**6))) == 4  # one is in a window of its own, however large it is


def test_memory_that_is_not_there_is_an_error_with_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 2**20)
    reserve([(torch.float32, torch.Size((2**18,)))], CPU)
    with pytest.raises(
        MemoryError, match=r"needs 0\.00 GiB \(1,048,832 bytes\).* \(1,048,576 bytes\) are free: free som"
    ):
        reserve([(torch.float32, torch.Size((2**18 + 1,)))], CPU)


def test_a_limit_of_the_process_is_an_error_with_the_bytes_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_bytes", lambda: None)
    with pytest.raises(MemoryError, match=r"\(9,223,372,036,854,774,784 bytes\).*, and .*llocate"):
        reserve([(torch.uint8, torch.Size((2**63 - 1024,)))], CPU)


@pytest.mark.skipif(free_bytes() is None, reason="no /proc/meminfo here")
def test_free_memory_is_that_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_bytes()
    assert free is not None and 0 < free < 2**50
    files = {"memory.max": "5000\n", "memory.current": "3000\n", "memory.stat": "anon 7\ninactive_file 1000\n"}
    read = host_memory.Path.read_text
    monkeypatch.setattr(host_memory.Path, "read_text", lambda path: files.get(path.name) or read(path))
    assert free_bytes() == 3000
    files["memory.max"] = "max\n"
    assert (free_bytes() or 0) > 2**20
