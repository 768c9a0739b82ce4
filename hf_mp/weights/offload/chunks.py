"""Which parts of which slabs are in a window together: pieces of parameters, in the order of the slabs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_mp.weights.offload.host_memory import ALIGNED, Room, padded
from hf_mp.weights.offload.transfers import ALIGNED_BYTES

REMAINDER = "remainder"
# Keys of rooms that an update reads and does not write. All others are written back.
GRADIENT, LOWER_GRADIENT = "gradient", "lower half of a gradient"

Rooms = dict[str, Room]  # of one parameter, by key
_GAPS = 5 * ALIGNED_BYTES  # between kinds of rooms: remainder, two moments, both halves of a gradient


@dataclass(eq=False)
class Piece:
    """The elements ``begin`` to ``end`` of a parameter, and of its rooms.

    Attributes:
        inside: once its chunk is in a window, the parts of the window by key, flat.
    """

    parameter: Any
    rooms: Rooms
    begin: int
    end: int
    inside: dict[str, Tensor] = field(default_factory=dict)

    def elements(self, key: str) -> int:
        """How many elements it has of a room. One of another size than the parameter is there as a whole."""
        room = self.rooms[key]
        return self.end - self.begin if room.numel == self.parameter.numel() else room.numel


class Chunk:
    """Pieces that are in a window together.

    Attributes:
        is_sliced: whether the pieces may be parts of parameters, so that only a kernel can update them.
        bytes: of the window.
        stepping: the pieces of parameters that are updated.
        reads: the keys of gradients to copy.
    """

    def __init__(self, pieces: Sequence[Piece], *, is_sliced: bool) -> None:
        self.pieces, self.is_sliced = pieces, is_sliced
        self.stepping, self.reads = list(pieces), set[str]()
        self._kinds: dict[tuple[str, torch.dtype], list[Piece]] = {}  # the pieces with rooms of this key and dtype
        for piece in pieces:
            for key, room in piece.rooms.items():
                self._kinds.setdefault((key, room.view.dtype), []).append(piece)
        self.bytes = sum(
            padded(sum(padded(piece.elements(key)) for piece in those) * dtype.itemsize, ALIGNED_BYTES)
            for (key, dtype), those in self._kinds.items()
        )
        self._window: Tensor | None = None

    def place(self, window: Tensor) -> tuple[list[Tensor], list[Tensor], int]:
        """Return the parts of slabs to copy, the part of ``window`` for each, and how many are written back.

        Those that are written back come first; then the gradients in ``reads``. Called by
        :meth:`hf_mp.weights.offload.transfers.Transfers.stream`.
        """
        if self._window is not window:
            self._window, self._copies = window, list(self._placed(window))
        written = [copy for copy in self._copies if copy[0] not in (GRADIENT, LOWER_GRADIENT)]
        copied = written + [copy for copy in self._copies if copy[0] in self.reads]
        return [copy[1] for copy in copied], [copy[2] for copy in copied], len(written)

    def _placed(self, window: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Give each piece its parts of ``window``; yields keys, parts of slabs, and parts of ``window`` for them."""
        place = 0
        for (key, dtype), pieces in self._kinds.items():
            runs: list[tuple[Tensor, int, int, int]] = []  # neighbours in a slab: begin, end, and place in the window
            for piece in pieces:
                room, count = piece.rooms[key], piece.elements(key)
                begin = room.begin + piece.begin
                piece.inside[key] = window[place : place + count * dtype.itemsize].view(dtype)
                start = (room.slab, begin, begin, place)
                if runs and runs[-1][0] is room.slab and runs[-1][2] == begin:
                    start = runs.pop()
                runs.append((start[0], start[1], begin + padded(count), start[3]))
                place += padded(count) * dtype.itemsize
            for slab, begin, end, first in runs:
                yield key, slab[begin:end], window[first : first + (end - begin) * dtype.itemsize].view(dtype)
            place = padded(place, ALIGNED_BYTES)


def cut(sliced: Iterable[tuple[Any, Rooms]], window_bytes: int) -> Iterator[Chunk]:
    """Chunks of parameters that are updated element by element, each chunk of at most ``window_bytes``."""
    pieces: list[Piece] = []
    free = window_bytes - _GAPS
    for parameter, rooms in sliced:
        width = sum(room.view.element_size() for room in rooms.values())
        begin, elements = 0, parameter.numel()
        while begin < elements:
            if (most := free // width // ALIGNED * ALIGNED) > 0:
                end = min(begin + most, elements)
                pieces.append(Piece(parameter, rooms, begin, end))
                free -= padded(end - begin) * width
                begin = end
            if begin < elements:  # the window is full
                yield Chunk(pieces, is_sliced=True)
                pieces, free = [], window_bytes - _GAPS
    if pieces:
        yield Chunk(pieces, is_sliced=True)


def bundle(whole: Iterable[tuple[Any, Rooms]], window_bytes: int, most_elements: int) -> Iterator[Chunk]:
    """Chunks of whole parameters, each of at most ``window_bytes`` and ``most_elements``, or of one parameter."""
    pieces: list[Piece] = []
    free, free_elements = window_bytes, most_elements
    for parameter, rooms in whole:
        # A kind of its own for each room is the most that alignment can take.
        needed = sum(padded(padded(room.numel) * room.view.element_size(), ALIGNED_BYTES) for room in rooms.values())
        if pieces and (needed > free or parameter.numel() > free_elements):
            yield Chunk(pieces, is_sliced=False)
            pieces, free, free_elements = [], window_bytes, most_elements
        pieces.append(Piece(parameter, rooms, 0, parameter.numel()))
        free, free_elements = free - needed, free_elements - parameter.numel()
    if pieces:
        yield Chunk(pieces, is_sliced=False)
