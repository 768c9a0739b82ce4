"""Pickles that are small in the file and large in memory."""

from __future__ import annotations

import collections
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_mp.trainer.checkpoints.pickles import MAX_DEPTH, PickleProblem, check_pickle


def check(content: bytes) -> None:
    check_pickle(io.BytesIO(content))


def nested(value: Any, width: int, levels: int) -> Any:
    for _ in range(levels):
        value = [value] * width if levels % 2 else (value,) * width
    return value


def cyclic() -> Any:
    found: dict[str, Any] = {}
    found["itself"] = [found]
    return found


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (nested(0, 8, 28), "unfold to more than"),
        (nested(0, 8, 27), "unfold to more than"),
        ({"a": {"b": nested("x", 8, 28)}}, "unfold to more than"),
        (["x" * 100_000] * 1000, "unfold to more than"),
        (nested((), 1, MAX_DEPTH + 1), "nested more than 100 levels deep"),
        (cyclic(), "an object that holds itself"),
    ],
    ids=["tuples", "lists", "in a dict", "a long text", "deep", "cyclic"],
)
def test_what_unfolds_is_refused(value: Any, message: str, protocol: int) -> None:
    with pytest.raises(PickleProblem, match=message):
        check(pickle.dumps(value, protocol))


@pytest.mark.parametrize("function", ["builtins bytearray", "__builtin__ bytearray", "torch FloatTensor"])
def test_memory_made_of_a_number_is_refused(function: str) -> None:
    name = function.replace(" ", "\n").encode()
    with pytest.raises(PickleProblem, match=f"calls {function.split()[1]}, which can fill the memory"):
        check(b"\x80\x02c" + name + b"\n\x8a\x05\x00\x00\x00\x00\x10\x85R.")


@pytest.mark.parametrize("function", ["builtins set", "collections Counter", "torch Size"])
def test_what_iterates_is_given_literals_alone(function: str) -> None:
    name, inner = function.replace(" ", "\n").encode(), b"ctorch._utils\n_rebuild_tensor_v2\n)R"
    with pytest.raises(PickleProblem, match="on what a call returned"):
        check(b"\x80\x02c" + name + b"\n" + inner + b"\x85R.")
    check(b"\x80\x02c" + name + b"\n](K\x01K\x02e\x85R.")


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x02", b"\x80\x02R.", b"\x80\x02h\x05.", b"no pickle", b"\x80\x02K\x01K\x02a."]
)
def test_what_is_no_pickle_is_an_error(content: bytes) -> None:
    with pytest.raises((ValueError, LookupError)):
        check(content)


def test_what_trainers_write_passes(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 3])  # a Counter
    state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "size": torch.Size([2, 3])}
    torch.save({**state, "set": {1, 2}, "ordered": collections.OrderedDict(a=1)}, tmp_path / "state.pt")
    with zipfile.ZipFile(tmp_path / "state.pt") as archive, archive.open("state/data.pkl") as file:
        check_pickle(file)
