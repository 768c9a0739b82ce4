"""``Chunk``: parts of slabs that are in a window together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_mp.weights.offload.host_memory import ALIGNED, Room, padded
from hf_mp.weights.offload.transfers import ALIGNED_BYTES

# Keys of rooms; others are those of the optimizer's state.
REMAINDER = "remainder"
GRADIENT, LOWER_GRADIENT = "gradient", "lower half of a gradient"  # read by an update, and not written

Rooms = dict[str, Room]  # of one parameter, by key
_GAPS = 5 * ALIGNED_BYTES  # between kinds of rooms: remainder, two moments, both halves of a gradient


@dataclass(eq=False)
class Piece:
    """The elements ``begin`` to ``end`` of a parameter and its rooms; ``inside`` a window, by key."""

    parameter: Any
    rooms: Rooms
    begin: int
    end: int
    inside: dict[str, Tensor] = field(default_factory=dict)

    def elements(self, key: str) -> int:
        """Number of its elements in a room: all, if the room has another size than the parameter."""
        room = self.rooms[key]
        return self.end - self.begin if room.numel == self.parameter.numel() else room.numel


class _Copy(NamedTuple):
    """A part of a slab, and its place in a window; both flat."""

    key: str
    slab: Tensor
    inside: Tensor


class Chunk:
    """Pieces that are in a window together.

    Attributes:
        is_sliced: whether the pieces may be parts of parameters, which only a kernel can update.
        bytes: of the window.
        stepping: the pieces of parameters that are updated.
        reads: the keys of gradients to copy.
    """

    def __init__(self, pieces: Sequence[Piece], *, is_sliced: bool) -> None:
        self.pieces, self.is_sliced = pieces, is_sliced
        self.stepping, self.reads = list(pieces), set[str]()
        self._by_kind: dict[tuple[str, torch.dtype], list[Piece]] = {}  # by key and dtype of a room
        for piece in pieces:
            for key, room in piece.rooms.items():
                self._by_kind.setdefault((key, room.view.dtype), []).append(piece)
        elements = {kind: sum(padded(one.elements(kind[0])) for one in its) for kind, its in self._by_kind.items()}
        self.bytes = sum(padded(n * dtype.itemsize, ALIGNED_BYTES) for (_, dtype), n in elements.items())
        self._window: Tensor | None = None

    def place(self, window: Tensor) -> tuple[list[Tensor], list[Tensor], int]:
        """Return parts of slabs, their places in ``window``, and how many of them, from the first, are written back."""
        if self._window is not window:
            self._window, self._copies = window, list(self._place_pieces(window))
        written = [copy for copy in self._copies if copy.key not in (GRADIENT, LOWER_GRADIENT)]
        copied = written + [copy for copy in self._copies if copy.key in self.reads]
        return [copy.slab for copy in copied], [copy.inside for copy in copied], len(written)

    def _place_pieces(self, window: Tensor) -> Iterator[_Copy]:
        """Set ``inside`` of each piece, and yield one copy for all neighbours in a slab."""
        place = 0  # in the window, in bytes
        for (key, dtype), pieces in self._by_kind.items():
            runs: list[tuple[Tensor, int, int, int]] = []  # slab, begin, end, and place in the window
            for piece in pieces:
                room, count = piece.rooms[key], piece.elements(key)
                piece.inside[key] = window[place : place + count * dtype.itemsize].view(dtype)
                begin = room.begin + piece.begin
                slab, first, end, first_place = runs[-1] if runs else (None, 0, 0, 0)
                if slab is room.slab and end == begin:
                    runs[-1] = room.slab, first, begin + padded(count), first_place
                else:
                    runs.append((room.slab, begin, begin + padded(count), place))
                place += padded(count) * dtype.itemsize
            for slab, begin, end, first in runs:
                yield _Copy(key, slab[begin:end], window[first : first + (end - begin) * dtype.itemsize].view(dtype))
            place = padded(place, ALIGNED_BYTES)


def cut(sliced: Iterable[tuple[Any, Rooms]], window_bytes: int) -> Iterator[Chunk]:
    """Yield chunks of parameters that are updated element by element, each of at most ``window_bytes``."""
    pieces: list[Piece] = []
    free = window_bytes - _GAPS
    for parameter, rooms in sliced:
        width = sum(room.view.element_size() for room in rooms.values())  # bytes an element
        begin, elements = 0, parameter.numel()
        while begin < elements:
            end = min(begin + free // width // ALIGNED * ALIGNED, elements)
            if end > begin:
                pieces.append(Piece(parameter, rooms, begin, end))
                free -= padded(end - begin) * width
                begin = end
            if begin < elements:  # the window is full
                yield Chunk(pieces, is_sliced=True)
                pieces, free = [], window_bytes - _GAPS
    if pieces:
        yield Chunk(pieces, is_sliced=True)


def bundle(whole: Iterable[tuple[Any, Rooms]], window_bytes: int, most_elements: int) -> Iterator[Chunk]:
    """Yield chunks of whole parameters, each of at most ``window_bytes`` and ``most_elements``, or of one parameter."""
    pieces: list[Piece] = []
    free, free_elements = window_bytes, most_elements
    for parameter, rooms in whole:
        # Alignment takes most if each room is of another kind.
        needed = sum(padded(padded(room.numel) * room.view.element_size(), ALIGNED_BYTES) for room in rooms.values())
        if pieces and (needed > free or parameter.numel() > free_elements):
            yield Chunk(pieces, is_sliced=False)
            pieces, free, free_elements = [], window_bytes, most_elements
        pieces.append(Piece(parameter, rooms, 0, parameter.numel()))
        free, free_elements = free - needed, free_elements - parameter.numel()
    if pieces:
        yield Chunk(pieces, is_sliced=False)
