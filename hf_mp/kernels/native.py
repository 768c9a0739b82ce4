"""Compilation of ``native.cpp`` at its first use, into torch's cache of extensions.

Each torch needs its own file: the stable ABI has neither op handles nor dispatch key guards.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock

from hf_mp._warnings import warn_caller

VARIABLE = "HF_MP_NATIVE"
SETTINGS = ("auto", "0", "1")
COMPILE_SECONDS = 600.0  # timeout of a compilation

_SOURCE = Path(__file__).with_suffix(".cpp")
_NAME = "hf_mp_native"  # module name, as in the source


@functools.cache
def native() -> ModuleType | None:
    """Return the compiled module; None if not used (:func:`unavailable_reason`), or with one warning if it fails.

    Raises:
        ValueError: for an ``HF_MP_NATIVE`` that is not ``auto``, ``0`` or ``1``.
    """
    if unavailable_reason() is not None:
        return None
    try:
        path = _path()
        if not path.exists():
            _compile(path)
        spec = importlib.util.spec_from_file_location(_NAME, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (OSError, ImportError, TimeoutError, subprocess.SubprocessError) as error:
        message = getattr(error, "stderr", None) or str(error)
        warn_caller(
            f"hf_mp's casts in C++ are not used, and small models train slower ({VARIABLE}=0 silences this): {message}"
        )
        return None
    return module


def unavailable_reason() -> str | None:
    """Return why the C++ kernels are not used, and how to enable them; None if they are used."""
    setting = os.environ.get(VARIABLE, "auto")
    if setting not in SETTINGS:
        raise ValueError(f"{VARIABLE}={setting!r} is not known: use one of {', '.join(SETTINGS)}")
    if setting == "0":
        return f"{VARIABLE}=0 is set"
    if setting == "auto" and not torch.cuda.is_available():
        return f"there is no GPU: {VARIABLE}=1 compiles them anyway"
    if setting == "auto" and shutil.which(_compiler()) is None:
        return f"there is no C++ compiler ({_compiler()}): install one, or set CXX"
    return None


def is_compiled() -> bool:
    return _path().exists()


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _path() -> Path:
    # The folder of torch.utils.cpp_extension, which takes 0.25 s to import.
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or f"{os.environ.get('XDG_CACHE_HOME', '~/.cache')}/torch_extensions"
    key = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    return Path(root).expanduser() / _NAME / f"{key}{sysconfig.get_config_var('EXT_SUFFIX')}"


def _compile(path: Path) -> None:
    """Compile the extension to ``path``; other processes wait."""
    from torch.utils.cpp_extension import include_paths, library_paths

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock", timeout=COMPILE_SECONDS), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        if path.exists():  # compiled by another process
            return
        print(
            f"hf_mp compiles its casts in C++ for torch {torch.__version__}: half a minute, once ({VARIABLE}=0 trains "
            "without them)",
            file=sys.stderr,
        )
        compiled = Path(folder) / path.name
        headers = [f"-isystem{each}" for each in (*include_paths(), sysconfig.get_path("include"))]
        libraries = [f"-L{each}" for each in library_paths()]
        command = [_compiler(), "-O2", "-std=c++20", "-shared", "-fPIC", *headers, str(_SOURCE), "-o", str(compiled)]
        command += [*libraries, "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        compiled.replace(path)
