"""The examples of the README and of docs/ run as they stand."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import torch

import hf_mp

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


class InOneProcess(torch.nn.parallel.DistributedDataParallel):
    """Gives the model back, where no process group is."""

    def __new__(cls, model):
        return model


def examples() -> list:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        if page.stem == "start":  # its steps are one program
            code = "\n".join(block[1] for block in blocks)
            found.append(pytest.param(page, 1, 0, code, id="start"))
        for number, block in enumerate(blocks, start=1):
            line = text[: block.start(1)].count("\n")
            found.append(pytest.param(page, number, line, block[1], id=f"{page.stem}-{number}"))
    return found


@pytest.mark.parametrize(("page", "number", "line", "code"), examples())
def test_the_example_runs(page, number, line, code, gpt2, batch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{name: values[0] for name, values in batch.items()}] * 4
    optimizer = torch.optim.SGD(gpt2.parameters(), lr=0.1)
    names = {"model": gpt2, "optimizer": optimizer, "batch": batch, "loader": [batch, batch], "data": rows}
    if number > 1:  # the first block of a page imports what it uses
        names |= {"hf_mp": hf_mp, "torch": torch, "MixedPrecisionCallback": hf_mp.MixedPrecisionCallback}
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", InOneProcess)
    # at the lines of the page, so that a traceback names them
    exec(compile("\n" * line + code, str(page), "exec"), names)


@pytest.mark.exhaustive
def test_the_loss_of_the_tutorial_falls_as_far_as_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/start.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    names: dict = {}
    exec(code.replace("max_steps=20", "max_steps=300"), names)
    last = [entry["loss"] for entry in names["trainer"].state.log_history if "loss" in entry][-1]
    assert "below 5" in text and 4 < last < 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_modules_named_in_the_text_are_there(page):
    text = page.read_text(encoding="utf-8")
    files = re.findall(r"`((?:hf_mp|tests|scripts|recipes)/[\w./]*)`", text)
    modules = re.findall(r"`hf_mp\.([a-z_]+\.[a-z_.]+)`", text)  # hf_mp.autocast.explain is a name of the package
    # NAME is a name to choose: one that was chosen stands for it.
    missing = [file for file in files if not any(ROOT.glob(file.replace("NAME", "[a-z]*")))]
    missing += [
        m
        for m in modules
        if m.split(".")[0] not in hf_mp.__all__ and not (ROOT / "hf_mp" / f"{m.replace('.', '/')}.py").exists()
    ]
    assert not missing


def test_each_recipe_is_in_the_table_of_recipes():
    page = (ROOT / "docs" / "trainer_and_loops.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| \[\w+\.py\]\(\.\./recipes/(\w+)\.py\)", page, re.MULTILINE)
    assert named == sorted(path.stem for path in (ROOT / "recipes").glob("[a-z]*.py"))


def test_the_paths_of_the_design_lead_to_definitions():
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    hops = re.findall(r"\[`([\w.]+)`\]\(\.\./(hf_mp/[\w/]+\.py)\)", page)
    assert len(hops) > 20
    for name, file in hops:
        found = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        for part in name.split("."):
            kinds = (ast.ClassDef, ast.FunctionDef)
            found = [inner for node in found if isinstance(node, kinds) and node.name == part for inner in node.body]
            assert found, f"{file} has no {name}"


def test_the_readme_stays_at_600_words_and_two_pictures():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pictures = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", text)
    assert len(pictures) == 2 and all((ROOT / path).exists() for _, path in pictures)
    shown = re.sub(r"!\[[^\]]*\]\([^)]*\)|<!--.*?-->|```.*?```", "", text, flags=re.DOTALL)
    assert len(re.sub(r"\]\([^)]*\)", "]", shown).split()) <= 600


def test_the_readme_names_each_figures_cpu_and_no_gpu_that_has_not_run_it():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    devices = [json.loads(path.read_text())["device"] for path in (ROOT / "scripts/results").rglob("*.json")]
    measured = " ".join(name for device in devices for key, name in device.items() if key.startswith("GPU"))
    assert set(re.findall(r"\b(?:[TVALHB]\d{1,3}0?|RTX \w+)\b", text)) == {"H200"} and "H200" in measured
