"""What autocast changes in torch: put on with the first use, taken off with the last, looked for by feature."""

from __future__ import annotations

import gc
import re
import runpy
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch._C._dynamo import eval_frame

import hf_mp
from hf_mp.casting import compile_exclusion, torch_patches
from hf_mp.casting.torch_patches import PATCHES, TABLE, Patch, Patches
from hf_mp.integrations import accelerated


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
import gc, sys, torch, torch._dynamo, transformers, accelerate
from transformers import GPT2LMHeadModel, Trainer
from tests_snapshot import attributes, differences
before, own = attributes(), torch.autocast.__enter__
optimizers = sys.modules["torch.optim.optimizer"]
# docs/design.md names what is added to them for good.
lists = (optimizers._foreach_supported_types, torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS)
lengths, hooks = [len(one) for one in lists], len(optimizers._global_optimizer_pre_hooks)
after_step = optimizers._global_optimizer_post_hooks
assert not after_step
import hf_mp
for name in hf_mp.__all__:
    getattr(hf_mp, name)
assert not differences(before), ("import", differences(before))
assert [len(one) for one in lists] == lengths and len(optimizers._global_optimizer_pre_hooks) == hooks
assert not after_step
model = GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9, n_positions=8))
optimizer = torch.optim.AdamW(model.parameters())
for precision in ("fp16", "bf16", "fp16-lean"):
    runtime = hf_mp.MixedPrecision(precision)
    runtime.attach(model)
    assert len(after_step) == 1
    stepping = runtime.attach_optimizer(torch.optim.AdamW(model.parameters()))
    assert torch.autocast.__enter__ is not own, "not patched while attached"
    assert precision != "fp16" or differences(before), "the snapshot sees nothing"
    for _ in range(2):
        ids = torch.randint(0, 9, (2, 8))
        model(input_ids=ids, labels=ids).loss.backward()
        stepping.step()
        stepping.zero_grad()
    runtime.detach()
    assert not differences(before) and not after_step, (precision, differences(before))
with hf_mp.autocast():
    assert torch.autocast.__enter__ is not own, "autocast alone patches as well"
    runtime.attach(model)
assert torch.autocast.__enter__ is not own, "the attached model still needs them"
runtime.detach()
runtime.detach()
assert not differences(before), ("detached twice", differences(before))
hf_mp.MixedPrecision("bf16").attach(model)
assert torch.autocast.__enter__ is not own
del model, optimizer, stepping, ids
gc.collect()
assert not differences(before), ("the model is gone", differences(before))
runtime.detach()
assert not after_step, "a collection may have left the hook; the next attach or detach removes it"
with hf_mp.autocast():
    torch.nn.Linear(2, 2)(torch.ones(1, 2))
assert len(after_step) == 1
added = [[getattr(new, "__name__", str(new)) for new in one[length:]] for one, length in zip(lists, lengths)]
assert added == [["DataTrackedParameter", "SplitParameter"], ["DispatchKey.AutocastIPU"]], added
assert len(optimizers._global_optimizer_pre_hooks) == hooks + 1
"""


def test_the_design_names_each_file_that_changes_others_code() -> None:
    root = Path(hf_mp.__file__).parent
    page = (root.parent / "docs/design.md").read_text(encoding="utf-8")
    section = page.partition("### What is changed of others' code")[2].partition("\n### ")[0]
    changes = re.compile(
        r"^[^#]*(\bPatch\(|setattr\(torch\b|Optimizer\.step_was_skipped =|register_optimizer_step_(?:pre|post)_hook\(|"
        r"\btypes\.append\(|FALLTHROUGH_DISPATCH_KEYS\.append)", re.MULTILINE,
    )  # fmt: skip
    found = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if changes.search(path.read_text())}
    assert found == set(re.findall(r"\| [^|]*`(\w+/[\w/]+\.py)` \|", section))


def test_nothing_of_torch_is_different_after_import_and_after_detach(tmp_path: Any) -> None:
    # In a process of its own: a model that another test left attached would keep the patches on.
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


def test_the_table_stays_until_the_last_user_has_left(holder: types.SimpleNamespace) -> None:
    patches, seen = Patches((Patch(("a_torch:present",), lambda original: "ours", ""),)), []
    for more in (1, 1, -1, -1, 1, -1):
        patches.add_users(more)
        seen.append(holder.present)
    assert seen == ["ours"] * 3 + ["original", "ours", "original"]


@pytest.mark.slow
def test_it_stays_for_compiled_code_that_enters_an_autocast() -> None:
    # In a process of its own: here other tests have compiled such code.
    code = """
import torch, torch._dynamo.testing, hf_mp
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


def test_a_patch_of_somebody_elses_over_ours_is_left(holder: types.SimpleNamespace) -> None:
    patches = Patches((Patch(("a_torch:present",), lambda original: "ours", ""),))
    patches.acquire()
    assert holder.present == "ours"
    holder.present = "theirs"
    patches.release()
    assert holder.present == "theirs"


@pytest.mark.parametrize("is_followed", [False, True])
def test_a_model_that_goes_while_another_is_compiled_leaves_the_table_until_that_has_ended(
    holder: types.SimpleNamespace, is_followed: bool
) -> None:
    patches = Patches((Patch(("a_torch:present",), lambda original: "ours", ""),))
    release = torch_patches.acquire(patches)
    with torch._guards.compile_context(torch._guards.CompileContext(None)):
        release()  # the compiler is about to guard what it has read
        assert holder.present == "ours"
        if is_followed:
            release = torch_patches.acquire(patches)
    assert holder.present == ("ours" if is_followed else "original")
    release()
    assert holder.present == "original"


def test_an_optimizer_that_is_collected_while_code_is_compiled_leaves_accelerates_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Without the optimizers that earlier tests have left.
    monkeypatch.setattr(accelerated, "_WRAPPERS", Patches(accelerated._WRAPPERS.table))
    own, model = vars(AcceleratedOptimizer)["step_was_skipped"], nn.Linear(2, 2)
    left = [hf_mp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))]
    del model

    def compiler(graph: Any, inputs: Any) -> Any:
        assert vars(AcceleratedOptimizer)["step_was_skipped"] is not own
        left.clear()
        gc.collect()
        assert vars(AcceleratedOptimizer)["step_was_skipped"] is not own
        return graph.forward

    torch.compile(lambda x: x + 1, backend=compiler)(torch.ones(2))
    assert not left and vars(AcceleratedOptimizer)["step_was_skipped"] is own


def test_what_a_torch_lacks_costs_one_warning_and_nothing_else(holder: types.SimpleNamespace) -> None:
    table = (
        Patch(("a_torch:Gone.method", "a_torch:gone_too"), lambda original: original, "nested autocasts are lost"),
        Patch(("moved_away:function", "a_torch:Gone.__init__"), lambda original: original, "tracing is lost"),
        Patch(("a_torch:present",), lambda original: "ours", ""),
    )
    patches = Patches(table)
    with pytest.warns(
        UserWarning, match=r"has no a_torch\.Gone\.method or a_torch\.gone_too: nested autocasts are lost"
    ) as caught:
        for _ in range(2):
            patches.acquire()
            assert holder.present == "ours"
            patches.release()
    assert len(caught) == 2 and holder.present == "original"


def test_this_torch_lacks_nothing(recwarn: pytest.WarningsRecorder) -> None:
    torch_patches._warn_missing.cache_clear()
    with hf_mp.autocast():
        places = {place for patch in TABLE for place in patch.places}
        assert len(PATCHES._replaced) >= len(TABLE) and len(places) >= len(TABLE)
    assert not [warning for warning in recwarn if "has no" in str(warning.message)]


def test_a_compiler_without_strategies_costs_one_warning_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(eval_frame, "set_code_exec_strategy")
    with pytest.warns(UserWarning, match="has no set_code_exec_strategy") as told:
        found = runpy.run_path(compile_exclusion.__file__)
    assert len(told) == 1 and found["uncompiled"](len) is len
