"""A GPU whose kernels take no time, for a machine without one: what is left of a step is the host's time, and memory.

    python scripts/fake_gpu.py scripts/bench.py host_gpu        # or any other program in Python, and its options

Compiles ``tests/gpu/fake_cuda.cpp`` and starts Python with it in the place of CUDA's driver, runtime and cuBLAS:
``torch.cuda`` has one device of 80 GiB (``FAKE_GPU_GIB=192``: another size), whose memory reads as zeros and is never
written. Launches, allocations and the host's time are those of a GPU; values mean nothing. Needs torch for CUDA 13
(``make bench-host-gpu`` makes an environment), a C++ compiler and ``nm``. A function that gives something back, and
that the source lacks, fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "tests" / "gpu" / "fake_cuda.cpp"
LIBRARIES = ("libcuda.so.1", "libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13")
COUNTS = ("torch_kernels", "triton_kernels", "products", "copies")  # in the order of the source

_PRODUCT = re.compile(r"cublas\w*([gG]emm|gemv|[dD]ot)")
_GIVES_NOTHING = re.compile(r"__cuda|cu\w*(Set|Destroy|Unload|Encode|Record|Query|Synchronize|WaitEvent|LastError)")


def build(folder: Path) -> Path:
    """Compile into ``folder`` what is missing there or older than the source: one file, under four libraries' names.

    Exits where torch was not built for CUDA 13, and where there is no compiler.
    """
    packages = Path(sysconfig.get_path("purelib"))
    cuda, triton = packages / "nvidia" / "cu13", packages / "triton" / "backends" / "nvidia"
    if not cuda.is_dir():
        sys.exit(f"{sys.executable} has no torch for CUDA 13: use `make bench-host-gpu`, which installs one")
    if missing := [tool for tool in ("c++", "nm") if shutil.which(tool) is None]:
        sys.exit(
            f"the fake GPU is compiled here, and {' and '.join(missing)} cannot be found: install g++ and binutils"
        )
    library = folder / LIBRARIES[0]
    if library.exists() and library.stat().st_mtime > max(SOURCE.stat().st_mtime, Path(__file__).stat().st_mtime):
        return folder
    header = (cuda / "include" / "cuda.h").read_text(encoding="utf-8")
    names = {library.name: sorted(set(re.findall(r"\bcu[A-Z]\w*(?=\()", header)))}
    for real in LIBRARIES[1:]:
        listed = subprocess.check_output(["nm", "-D", "--defined-only", cuda / "lib" / real], text=True)
        names[real] = re.findall(r" [TW] (\w+)", listed)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        stubs, versions, compiled = (Path(made, name) for name in ("stubs.cpp", "versions", library.name))
        stubs.write_text("\n".join(_stubs(name for of_one in names.values() for name in of_one)), encoding="utf-8")
        # torch asks for the runtime's and cuBLAS's names in the version of their library, and for the driver's in none.
        nodes = [f"{name} {{ {'; '.join(names[name])}; }};" for name in LIBRARIES[1:]]
        versions.write_text("\n".join(nodes), encoding="utf-8")
        command = ["c++", "-O2", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", str(SOURCE), str(stubs)]
        command += [f"-I{cuda / 'include'}", f"-I{triton / 'include'}"]  # each lacks headers that the other has
        command += [f"-Wl,--version-script={versions}", "-ldl", "-o", str(compiled)]
        subprocess.run(command, check=True)
        compiled.replace(library)  # a running program keeps the older file
    for name in LIBRARIES[1:]:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(library.name)
    return folder


def _stubs(names: Iterable[str]) -> Iterator[str]:
    """Functions for the names that the source does not have."""
    yield 'extern "C" { int fake_product(); int fake_failure(const char *);'
    for name in names:
        result = "0" if _GIVES_NOTHING.match(name) else f'fake_failure("{name}")'
        result = "fake_product()" if _PRODUCT.match(name) else result
        yield f'__attribute__((weak, visibility("default"))) int {name}() {{ return {result}; }}'
    yield "}"


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process that has the libraries in ``folder`` for CUDA's."""
    # By the bare names that torch asks for: to the loader, a path would be another library.
    paths = ":".join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))
    return {
        **os.environ,
        "LD_LIBRARY_PATH": paths,
        "LD_PRELOAD": " ".join(LIBRARIES),
        "TRITON_LIBCUDA_PATH": str(folder),
    }


def is_loaded() -> bool:
    """Whether this process has the libraries."""
    return hasattr(ctypes.CDLL(None), "fake_counts")


@contextlib.contextmanager
def fake_gpu() -> Iterator[ctypes.Array[ctypes.c_ulonglong]]:
    """Have this process do on its fake GPU what it would on a real one; gives what was launched so far, as in `COUNTS`.

    Exits where the libraries are not loaded.
    """
    import torch

    from hf_mp.casting.cpu.upcast import CPU_PRODUCTS

    if not is_loaded():
        sys.exit("no fake GPU is loaded here: use `make bench-host-gpu`, or `python scripts/fake_gpu.py PROGRAM`")
    with (
        torch.backends.cudnn.flags(enabled=False),  # cuDNN itself is the real one, which wants a real driver
        # Kernels that compute nothing would fail the comparison with their reference.
        mock.patch.dict(os.environ, HF_MP_KERNELS="triton"),
        # What stands for 16-bit products on this CPU is not to be in the time of a GPU's host.
        mock.patch.dict(CPU_PRODUCTS, dict.fromkeys(CPU_PRODUCTS, True)),
    ):
        torch.backends.cuda.enable_cudnn_sdp(False)
        yield (ctypes.c_ulonglong * len(COUNTS)).in_dll(ctypes.CDLL(None), "fake_counts")


def main(arguments: list[str]) -> None:
    """Build, and become the program."""
    if not arguments:
        sys.exit(__doc__)
    folder = build(ROOT / "build" / "fake_cuda")
    os.execve(sys.executable, [sys.executable, *arguments], environment(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
