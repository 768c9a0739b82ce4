"""Pieces of Markdown that say what stored results hold."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from _stored import Stored, StoredResults

WIDTH = 120
MIB = 2**20
GIB = 2**30


def paragraph(text: str) -> str:
    """``text`` in lines of the pages' width."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; the first column of the header may be empty."""
    return "\n".join([_row(header), "|" + "---|" * len(header), *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|"


def script(name: str) -> str:
    """A link from a page of docs/ to one of the scripts."""
    return f"[`scripts/{name}.py`](../scripts/{name}.py)"


def ratio(ours: Stored, peer: Stored, field: str = "median_seconds") -> str:
    """One figure over another, with two digits, or as a fraction where it is small."""
    found = ours[field].number / peer[field].number
    return f"{found:.2f}" if found >= 0.1 else f"1/{1 / found:.0f}"


def torch_version(stored: Stored) -> str:
    """The torch that a result was measured with, without its build."""
    return f"torch {stored.root['versions']['torch'].text.partition('+')[0]}"


def hardware(stored: Stored) -> str:
    """What a result was measured on."""
    device = stored.root["device"]
    products = device["FP16 products on the CPU"].text
    return (
        f"{device['CPU'].text}, {device['CPU threads'].text} threads ({device['CPU instructions'].text}; FP16 products "
        f"{products})"
    )


def otherwise(stored: Stored, results: StoredResults) -> str:
    """How the conditions of a result differ from those of ``bench_step``; empty where they do not."""
    if "bench_step" not in results:
        return ""
    usual = results("bench_step")
    device, of_usual, versions = stored.root["device"], usual.root["device"], stored.root["versions"]
    different = [device["CPU"].text] if device["CPU"].text != of_usual["CPU"].text else []
    if (threads := device["CPU threads"].text) != of_usual["CPU threads"].text:
        different.append(f"{threads} threads")
    for package in ("torch", "transformers"):
        if versions[package].text != usual.root["versions"][package].text:
            different.append(f"{package} {versions[package].text}")
    return "".join(f", {difference}" for difference in different)


def workload(stored: Stored) -> str:
    """Which GPT-2 was trained on what."""
    found = {name: part.number for name, part in stored["workload"].parts() if name not in ("device",)}
    accumulation = found["accumulation"]
    micro = "" if accumulation == 1 else f", {accumulation:.0f} micro-batches"
    dropout = f", dropout {found['dropout']:g}" if found["dropout"] else ""
    return (
        f"GPT-2 with {found['layers']:.0f} layers of width {found['width']:.0f}, vocabulary {found['vocab']:.0f}, "
        f"{found['batch']:.0f} x {found['seq']:.0f} tokens{micro}{dropout}"
    )


def timing(row: Stored, digits: int = 2) -> str:
    """Seconds and their spread."""
    return f"{row['median_seconds'].number:.{digits}f} ± {row['spread_seconds'].number:.{digits}f}"
