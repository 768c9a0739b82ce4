"""The directions of imports: who may know whom, and what `import hf_mp` does not need."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hf_mp

ROOT = Path(hf_mp.__file__).parent
# Who may import whom, besides itself. The names of policies and rules are the ground floor.
ALLOWED = {
    "_version": set(),
    "_warnings": set(),
    "kernels": {"_warnings"},
    "policy": {"scaling"},
    "scaling": {"_warnings", "kernels", "policy"},
    "casting": {"_warnings", "kernels", "policy", "scaling"},
    "weights": {"_warnings", "kernels", "policy", "scaling", "casting"},
    "environment": {"_version", "kernels", "policy", "casting"},
    "step": {"_warnings", "kernels", "policy", "scaling", "casting", "weights"},
    "memory": {"kernels", "policy", "scaling", "casting", "weights", "step", "environment"},
    "diagnostics": {"kernels", "policy", "scaling", "casting", "weights", "step", "environment", "memory"},
    "trainer": {"kernels", "policy", "scaling", "casting", "weights", "step", "environment", "memory", "diagnostics"}
    | {"_version", "_warnings"},
    "cli": {"_version", "diagnostics", "environment", "memory"},
    "__init__": {"_version", "casting", "diagnostics", "memory", "policy", "scaling", "step", "trainer", "weights"},
}
MAY_IMPORT_TRANSFORMERS = {"trainer", "diagnostics", "memory"}


def name_of(path: Path) -> str:
    parts = ("hf_mp", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def imports_of(tree: ast.AST) -> Iterator[str]:
    """The modules that are imported when code runs; not those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        yield from imports_of(node)


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


def test_no_two_modules_import_each_other(modules: dict[str, set[str]]) -> None:
    known = {module: {name for name in imported if name in modules} - {module} for module, imported in modules.items()}
    TopologicalSorter(known).prepare()


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


def test_the_package_has_thirteen_parts() -> None:
    entries = {path.name for path in ROOT.iterdir()} - {"__init__.py", "__pycache__", "py.typed"}
    assert len(entries) <= 13


def test_tables_and_pages_are_not_needed_to_train() -> None:
    code = "import sys, hf_mp; hf_mp.prepare, hf_mp.autocast, hf_mp.MasterWeightOptimizer, hf_mp.DynamicLossScaler; "
    code += "import hf_mp.diagnostics.contract.check; "  # a folder is looked at in seconds, which transformers takes
    code += "print([name for name in ('rich', 'typer', 'jinja2', 'transformers', 'accelerate') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
