"""The kernels, laid out for the kernels hub: whole without hf_mp, and the same functions."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hf_mp.kernels import registry
from hub_kernels import KERNELS, lay_out

# What a program does with the loaded kernels, where hf_mp cannot be found.
USE = """
import sys
sys.path.insert(0, {folder!r})
sys.modules["hf_mp"] = None  # an import of it raises
import torch
import hf_mp_kernels

gradients = [torch.tensor([3.0, -4.0]), torch.tensor([[12.0]])]
largest, norm = hf_mp_kernels.gradient_scan.largest_magnitude_and_norm(gradients)
modules = map(hf_mp_kernels.registry.module_of, sorted(hf_mp_kernels.registry.KERNELS))
print(largest.item(), norm.item(), [module.__name__ for module in modules])
"""


def test_the_package_needs_no_hf_mp(tmp_path: Path) -> None:
    package = lay_out(tmp_path)
    assert {path.name for path in package.iterdir()} == {path.name for path in KERNELS.glob("*.py")}
    assert tomllib.loads((tmp_path / "build.toml").read_text())["general"]["name"] == "hf-mp-kernels"
    code = USE.format(folder=str(package.parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"12.0 13.0 {[f'hf_mp_kernels.triton_{name}' for name in sorted(registry.KERNELS)]}\n"


def test_the_kernels_package_loads_it(tmp_path: Path) -> None:
    kernels = pytest.importorskip("kernels")
    package = lay_out(tmp_path)
    variant = tmp_path / "build" / "torch-cpu"
    variant.parent.mkdir()
    package.rename(variant)
    about = {"name": "hf-mp-kernels", "id": "hf_mp_kernels_1", "version": 1, "license": "apache-2.0"}
    about |= {"python-depends": [], "backend": {"type": "cpu"}}
    (variant / "metadata.json").write_text(json.dumps(about))
    loaded = kernels.get_local_kernel(tmp_path, backend="cpu")
    assert set(loaded.registry.KERNELS) == set(registry.KERNELS)
