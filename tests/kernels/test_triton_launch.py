"""Launches of what Triton has compiled before, on objects that stand for its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from hf_mp.kernels import triton_tables
from hf_mp.kernels.triton_tables import launch


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(triton_tables, "_COMPILED", {})
    yield


class Kernel:
    """As ``triton.jit`` of ``def kernel(values, count, SIZE, DTYPE)``: counts both ways to launch it."""

    arg_names = ("values", "count", "SIZE", "DTYPE")

    def __init__(self, runs: Callable[..., None] | None = None, **attributes: Any) -> None:
        self.ordinary: list[Any] = []
        self.direct: list[Any] = []
        handles = {"function": 17, "packed_metadata": "metadata", **attributes}
        self.compiled = SimpleNamespace(run=runs or self.run, **handles)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def ordinary(*args: Any, **constants: Any) -> Any:
            self.ordinary.append((grid, args, constants))
            return self.compiled

        return ordinary

    def run(self, *args: Any) -> None:
        self.direct.append(args)


def settings(**changed: Any) -> dict[str, Any]:
    return {"SIZE": 4096, "DTYPE": torch.float16, "num_warps": 8, "enable_fp_fusion": False, **changed}


def test_the_second_launch_of_a_kind_goes_to_what_was_compiled() -> None:
    kernel, first, second = Kernel(), torch.ones(64), torch.zeros(32)
    launch(kernel, 3, 0, first, 5, **settings())
    (grid, args, constants), *others = kernel.ordinary
    assert grid == (3,) and args == (first, 5) and not others and not kernel.direct
    assert constants == settings(DTYPE=triton_tables.DTYPES[torch.float16])
    launch(kernel, 7, 99, second, 6, **settings())
    (direct,) = kernel.direct
    assert len(kernel.ordinary) == 1
    assert direct[:9] == (7, 1, 1, 99, 17, "metadata", None, None, None)
    assert direct[9] is second and direct[10] == 6 and len(direct) == 9 + len(kernel.arg_names)


UNLIKE: dict[str, Callable[[], tuple[Tensor, dict[str, Any]]]] = {
    "another dtype": lambda: (torch.ones(64).double(), {}),
    "another alignment": lambda: (torch.ones(65)[1:], {}),
    "another constant": lambda: (torch.ones(64), {"SIZE": 1024}),
    "another dtype among constants": lambda: (torch.ones(64), {"DTYPE": torch.bfloat16}),
    "another option": lambda: (torch.ones(64), {"num_warps": 4}),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_what_triton_compiles_anew_is_launched_by_triton(what: str) -> None:
    kernel = Kernel()
    launch(kernel, 3, 0, torch.ones(64), 5, **settings())
    values, changed = UNLIKE[what]()
    launch(kernel, 3, 0, values, 5, **settings(**changed))
    assert len(kernel.ordinary) == 2 and not kernel.direct
    other = Kernel()
    launch(other, 3, 0, torch.ones(64), 5, **settings())
    assert len(other.ordinary) == 1 and not kernel.direct


def refused(*args: Any) -> None:
    raise TypeError("function takes exactly 12 arguments")


@pytest.mark.parametrize("kernel", [Kernel(refused), Kernel(packed_metadata=None)], ids=["arguments", "attributes"])
def test_a_triton_that_launches_otherwise_launches_as_ever(kernel: Kernel) -> None:
    if kernel.compiled.packed_metadata is None:
        del kernel.compiled.packed_metadata
    for _ in range(3):
        launch(kernel, 3, 0, torch.ones(64), 5, **settings())
    assert len(kernel.ordinary) == 3 and not kernel.direct


def test_what_compiles_nothing_is_launched_each_time() -> None:
    kernel = Kernel()
    kernel.compiled = None  # type: ignore[assignment]  # Triton's interpreter
    for _ in range(2):
        launch(kernel, 3, 0, torch.ones(64), 5, **settings())
    assert len(kernel.ordinary) == 2
