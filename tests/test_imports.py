"""The directions of imports: who may know whom, and what `import hf_mp` does not need."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_mp

ROOT = Path(hf_mp.__file__).parent
# Who may import whom, besides itself: the package's parts from the ground up.
_FLOOR = {"_warnings", "dtypes", "kernels", "model_index", "policy", "scaling", "scale_boundary"}
_WEIGHTS = _FLOOR | {"casting", "models", "ranks", "weights"}
_STEP = _WEIGHTS | {"integrations", "step"}
ALLOWED = {
    "_version": set(),
    "_warnings": set(),
    "dtypes": set(),
    "kernels": {"_warnings"},
    "model_index": {"dtypes", "kernels"},
    "scaling": {"_warnings", "dtypes", "kernels"},
    "policy": {"dtypes", "scaling"},
    "scale_boundary": {"_warnings", "dtypes", "kernels"},
    "casting": _FLOOR,
    "environment": {"_version", "casting", "dtypes", "kernels", "policy"},
    "models": _FLOOR | {"casting"},
    "ranks": _FLOOR | {"casting", "models"},
    "weights": _WEIGHTS,
    "integrations": _WEIGHTS,
    "step": _STEP,
    "memory": _STEP | {"environment"},
    "diagnostics": _STEP | {"environment", "memory"},
    "trainer": _STEP | {"_version", "environment", "memory", "diagnostics"},
    "cli": {"_version", "diagnostics", "environment", "memory"},
    "__init__": {"_version", "casting", "diagnostics", "memory", "policy", "scaling", "step", "trainer", "weights"},
}
MAY_IMPORT_TRANSFORMERS = {"trainer", "diagnostics", "memory"}


def name_of(path: Path) -> str:
    parts = ("hf_mp", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def imports_of(tree: ast.AST) -> Iterator[str]:
    """The modules that are imported, also those for type checkers alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.fixture(scope="module")
def modules() -> dict[str, set[str]]:
    return {name_of(path): set(imports_of(ast.parse(path.read_text()))) for path in ROOT.rglob("*.py")}


def part_of(module: str) -> str:
    return module.split(".")[1]


def test_every_import_points_down(modules: dict[str, set[str]]) -> None:
    for module, imported in modules.items():
        parts = {part_of(name) for name in imported if name.startswith("hf_mp.")}
        assert parts <= ALLOWED[part_of(module)] | {part_of(module)}, module
        assert "hf_mp" not in imported, f"{module} imports the package that imports it"


def folder_of(module: str) -> str:
    """The folder of a module below ``hf_mp``; of one that lies in ``hf_mp`` itself, its name."""
    path = ROOT / Path(*module.split(".")[1:])
    return "/".join((path if path.is_dir() or path.parent == ROOT else path.parent).relative_to(ROOT).parts)


def circles(modules: dict[str, set[str]]) -> set[frozenset[str]]:
    """The largest sets of modules that all import each other, directly or through others of the set."""

    def reach(module: str) -> set[str]:
        seen, todo = set[str](), [module]
        while todo:
            new = (modules[todo.pop()] & modules.keys()) - seen
            seen |= new
            todo += new
        return seen

    reached = {module: reach(module) for module in modules}
    return {
        frozenset({module, *(other for other in reached[module] if module in reached[other])})
        for module in modules
        if any(module in reached[other] for other in reached[module] - {module})
    }


def test_no_circle(modules: dict[str, set[str]]) -> None:
    # The package itself imports its public names when they are asked for.
    inner = {module: imported - {module} for module, imported in modules.items() if module != "hf_mp.__init__"}
    assert not circles(inner)


def test_sub_folders_are_layers(modules: dict[str, set[str]]) -> None:
    pairs = {
        (folder_of(module), folder_of(name))
        for module, imported in modules.items()
        for name in imported & modules.keys()
        if folder_of(module) != folder_of(name)
    }
    assert not {frozenset(pair) for pair in pairs if pair[::-1] in pairs}


def test_nobody_outside_names_a_part_of_the_owner_of_the_weights(modules: dict[str, set[str]]) -> None:
    parts = ("gathered_weights", "inference_layout", "sharded_layouts")
    classes = {"hf_mp.weights.weight_uses.WeightUses", "hf_mp.weights.working_copies.WorkingCopies"}
    hidden = {f"hf_mp.weights.{name}" for name in parts} | classes
    for module, imported in modules.items():
        assert module.startswith("hf_mp.weights.") or not imported & hidden, module


def test_a_circle_is_found_also_through_imports_for_type_checkers() -> None:
    tree = ast.parse("if TYPE_CHECKING:\n    from hf_mp.a import b")
    assert set(imports_of(tree)) == {"hf_mp.a", "hf_mp.a.b"}
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}}) == {frozenset("abc")}


def test_nothing_opens_a_connection_but_the_hub_library(modules: dict[str, set[str]]) -> None:
    network = {"aiohttp", "ftplib", "http", "httpx", "requests", "smtplib", "socket", "ssl", "urllib", "urllib3"}
    for module, imported in modules.items():
        assert not {name.split(".")[0] for name in imported} & network, module
        uses_hub = any(name.startswith("huggingface_hub") for name in imported)
        assert not uses_hub or module == "hf_mp.memory.models", module


def test_the_step_needs_torch_alone(modules: dict[str, set[str]]) -> None:
    for module, imported in modules.items():
        if part_of(module) not in MAY_IMPORT_TRANSFORMERS:
            assert not any(name.split(".")[0] in ("transformers", "accelerate") for name in imported), module


def test_the_package_has_nineteen_parts() -> None:
    entries = {path.name for path in ROOT.iterdir()} - {"__init__.py", "__pycache__", "py.typed"}
    assert len(entries) <= 19


def test_tables_and_pages_are_not_needed_to_train() -> None:
    code = "import sys, hf_mp; hf_mp.prepare, hf_mp.autocast, hf_mp.MasterWeightOptimizer, hf_mp.DynamicLossScaler; "
    code += "import hf_mp.diagnostics.contract.check; "  # a folder is looked at in seconds, which transformers takes
    code += "print([name for name in ('rich', 'typer', 'jinja2', 'transformers', 'accelerate') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
