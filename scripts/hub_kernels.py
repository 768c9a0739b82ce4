"""Lay the kernels out for the Hugging Face kernels hub: ``build.toml`` and ``torch-ext/``, as ``kernel-builder`` reads.

    python scripts/hub_kernels.py outputs/hub_kernels

``hf_mp/kernels`` imports nothing else of hf_mp, so the package is the same files with relative imports. Published, it
is loaded by ``kernels.get_kernel("OWNER/hf-mp-kernels", version=1)``. Its functions are those of ``hf_mp.kernels``:
each uses its Triton kernel on a GPU, once that has agreed with the reference there, and the reference elsewhere.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import hf_mp
from hf_mp.kernels import registry

KERNELS = Path(hf_mp.__file__).resolve().parent / "kernels"
NAME = "hf-mp-kernels"
BUILD = f"""\
[general]
name = "{NAME}"
version = 1
license = "apache-2.0"
backends = ["cuda"]

[torch-noarch]
"""
_NAMES = sorted([*registry.KERNELS, "registry"])
INIT = f'''\
"""The kernels of hf_mp, each with its plain reference."""

from . import {", ".join(_NAMES)}

__all__ = {json.dumps(_NAMES)}
'''


def lay_out(folder: Path) -> Path:
    """Write the project into ``folder`` and return its Python package."""
    package = folder / "torch-ext" / NAME.replace("-", "_")
    package.mkdir(parents=True, exist_ok=True)
    (folder / "build.toml").write_text(BUILD, encoding="utf-8")
    (folder / "LICENSE").write_bytes((KERNELS.parents[1] / "LICENSE").read_bytes())
    for source in sorted(KERNELS.glob("*.py")):
        text = source.read_text(encoding="utf-8")
        text = re.sub(r"^(\s*)from hf_mp\.kernels\.", r"\1from .", text, flags=re.MULTILINE)
        text = re.sub(r"^(\s*)from hf_mp\.kernels import", r"\1from . import", text, flags=re.MULTILINE)
        (package / source.name).write_text(INIT if source.stem == "__init__" else text, encoding="utf-8")
    return package


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(lay_out(Path(sys.argv[1])))
