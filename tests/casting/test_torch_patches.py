"""What autocast changes in torch: put on with the first use, looked for by feature."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
import types
from typing import Any

import pytest
from torch._C._dynamo import eval_frame

from hf_mp.casting import uncompiled
from hf_mp.casting.torch_patches import Patch, put_on


def attributes() -> dict[tuple[str, str], Any]:
    """Every function and class of torch, transformers and accelerate by name, and what the classes hold."""
    found: dict[tuple[str, str], Any] = {}
    for name, module in list(sys.modules.items()):
        if (
            name.partition(".")[0] not in ("torch", "transformers", "accelerate")
            or type(module) is not types.ModuleType
        ):
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
                found[name, key] = value
            if isinstance(value, types.FunctionType):
                found[name, f"{key}.__code__"] = value.__code__
            if isinstance(value, type) and value.__module__ == name:
                for member, entry in list(vars(value).items()):
                    if callable(entry) or isinstance(entry, (classmethod, staticmethod, property)):
                        found[name, f"{key}.{member}"] = entry
    return found


def differences(before: dict[Any, Any]) -> list[Any]:
    after = attributes()
    return [key for key, value in before.items() if after.get(key) is not value]


SNAPSHOT = """
import torch, torch._dynamo, transformers, accelerate
from transformers import Trainer
from tests_snapshot import attributes, differences
before = attributes()
import hf_mp
for name in hf_mp.__all__:
    getattr(hf_mp, name)
assert not differences(before), ("import", differences(before))
hf_mp.autocast()
assert differences(before), "the snapshot sees nothing"
"""


def test_nothing_of_torch_is_different_after_import(tmp_path: Any) -> None:
    # In a process of its own: other tests have put the patches on.
    shutil.copy(__file__, tmp_path / "tests_snapshot.py")
    done = subprocess.run(
        [sys.executable, "-c", SNAPSHOT], cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def holder(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A module ``a_torch`` with a name to patch."""
    holder = types.SimpleNamespace(present="original")
    monkeypatch.setitem(sys.modules, "a_torch", holder)  # type: ignore[arg-type]
    return holder


def test_it_is_put_on_by_compiled_code_that_makes_an_autocast() -> None:
    # In a process of its own: other tests have put it on.
    code = """
import torch, torch._dynamo.testing, hf_mp, warnings
warnings.filterwarnings("error", message="torch .* has no")  # this torch lacks nothing
own, count = torch.autocast.__enter__, torch._dynamo.testing.CompileCounter()
@torch.compile(backend=count)
def compute(x):
    with hf_mp.autocast(torch.bfloat16):
        return x @ x
for _ in range(3):
    assert compute(torch.ones(2, 2)).dtype is torch.bfloat16 and torch.autocast.__enter__ is not own
assert count.frame_count == 1, count.frame_count
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_a_torch_lacks_costs_one_warning_and_nothing_else(holder: types.SimpleNamespace) -> None:
    table = (
        Patch(("a_torch:Gone.method", "a_torch:gone_too"), lambda original: original, "islands are lost"),
        Patch(("moved_away:function", "a_torch:Gone.__init__"), lambda original: original, "tracing is lost"),
        Patch(("a_torch:present",), lambda original: "ours", ""),
    )
    with pytest.warns(
        UserWarning, match=r"has no a_torch\.Gone\.method or a_torch\.gone_too: islands are lost"
    ) as caught:
        for _ in range(2):
            put_on(table)
            assert holder.present == "ours"
    assert len(caught) == 2


def test_a_compiler_without_strategies_costs_one_warning_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(eval_frame, "set_code_exec_strategy")
    with pytest.warns(UserWarning, match="has no set_code_exec_strategy: where compiled code breaks off") as told:
        found = runpy.run_path(uncompiled.__file__)
    assert len(told) == 1 and found["uncompiled"](len) is len
