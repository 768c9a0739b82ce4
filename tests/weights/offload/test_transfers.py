"""Races: copies and kernels in every order that the events allow give what they give one after the other."""

from __future__ import annotations

import pytest
import torch
from simulated_streams import SimulatedStreams
from torch import Tensor

from hf_mp.weights.offload.chunks import GRADIENT, REMAINDER, Chunk, bundle, cut
from hf_mp.weights.offload.host_memory import reserve
from hf_mp.weights.offload.streams import COMPUTE, Streams
from hf_mp.weights.offload.transfers import Transfers

CPU = torch.device("cpu")
SIZES = (130, 260, 130, 65)  # elements
SLICED = 3  # the first of them may be cut
WINDOW = 4000  # bytes: of a hundred elements
ORDERS = range(500)


class Training:
    """Steps on whole numbers, in which each result depends on all before: on the device weights, all else in slabs."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.transfers = streams, Transfers(CPU, streams)
        self.weights = [torch.arange(size, dtype=torch.int32) for size in SIZES]
        kinds = {REMAINDER: torch.int16, "state": torch.int32, GRADIENT: torch.int32}
        rooms = reserve([(dtype, one.shape) for dtype in kinds.values() for one in self.weights], CPU)
        by_key = {key: rooms[number * len(SIZES) :] for number, key in enumerate(kinds)}
        self.rooms = [{key: by_key[key][number] for key in kinds} for number in range(len(SIZES))]
        pairs = list(zip(self.weights, self.rooms, strict=True))
        # Sliced parameters and whole ones, one after the other in the same windows.
        self.chunks = [*cut(pairs[:SLICED], WINDOW), *bundle(pairs[SLICED:], WINDOW, 100)]
        self.transfers.grow(max(chunk.bytes for chunk in self.chunks))
        self.read_by_host: list[Tensor] = []

    def train(self, steps: int = 2) -> list[Tensor]:
        """What the host reads after each step, and all memory at the end."""
        for step in range(steps):
            written: dict[int, object] = {}
            for micro_batch in range(2):
                # The last gradient of a micro-batch is the first that is read in the next one.
                for number in range(len(SIZES))[:: -1 if micro_batch else 1]:
                    self.backward(number, step + micro_batch, written)
            for chunk in self.chunks:
                chunk.reads = {GRADIENT}
            self.transfers.stream(self.chunks, self.update)
            # Other code on the host reads the state as soon as the step has returned.
            self.read_by_host += [rooms[key].view.clone() for rooms in self.rooms for key in ("state", REMAINDER)]
        self.streams.enter()
        return [*self.read_by_host, *self.weights, *[room.view for rooms in self.rooms for room in rooms.values()]]

    def backward(self, number: int, factor: int, written: dict[int, object]) -> None:
        """Write the gradient of a weight to its slab, added to that of the micro-batch before."""
        weight, room = self.weights[number], self.rooms[number][GRADIENT]
        gradient, before = torch.empty_like(weight), torch.zeros_like(weight)
        if number in written:
            self.transfers.read([before], [room.view], written[number])
        # On the device, after the update that wrote the weight.
        self.streams.run(COMPUTE, lambda: gradient.copy_(weight * (factor + 2) + before))
        written[number] = self.transfers.write(gradient, [room.view], lambda part, inside: inside.copy_(part))

    def update(self, chunk: Chunk) -> None:
        for piece in chunk.pieces:
            state, remainder, gradient = (piece.inside[key] for key in ("state", REMAINDER, GRADIENT))
            state.mul_(5).add_(gradient, alpha=3).add_(1)
            remainder.add_(state.to(torch.int16))
            piece.parameter[piece.begin : piece.end] += state + remainder


@pytest.fixture(scope="module")
def serial() -> list[Tensor]:
    return [tensor.clone() for tensor in Training(Streams()).train()]


def differs(found: list[Tensor], expected: list[Tensor]) -> bool:
    return not all(map(torch.equal, found, expected))


def test_windows_are_filled_several_times_and_parameters_are_cut() -> None:
    training = Training(Streams())
    assert len(training.chunks) >= 5
    cuts = [piece for chunk in training.chunks for piece in chunk.pieces if piece.end < piece.parameter.numel()]
    assert cuts and all(piece.end % 64 == 0 for piece in cuts)


def check_orders(serial: list[Tensor], orders: range) -> None:
    for seed in orders:
        assert not differs(Training(SimulatedStreams(seed)).train(), serial), f"order {seed}"


def test_every_order_that_the_events_allow_gives_the_serial_result(serial: list[Tensor]) -> None:
    check_orders(serial, ORDERS)


@pytest.mark.exhaustive
def test_many_more_orders(serial: list[Tensor]) -> None:
    check_orders(serial, range(ORDERS.stop, 20_000))


def waits() -> list[str]:
    """The places that wait for an event."""
    Training(streams := SimulatedStreams(0)).train()
    return sorted(streams.places)


@pytest.mark.parametrize("place", waits())
def test_each_event_is_needed(serial: list[Tensor], place: str) -> None:
    """A mutant that does not wait there gives another result in some order."""
    assert any(differs(Training(SimulatedStreams(seed, place)).train(), serial) for seed in ORDERS)


def test_all_waits_are_found() -> None:
    assert len(waits()) == 8
