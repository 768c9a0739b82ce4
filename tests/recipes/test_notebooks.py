"""The notebooks run from top to bottom, at a small size, and are stored without what they printed."""

from __future__ import annotations

import json
import os
import re
import sysconfig
from pathlib import Path

import pytest

NOTEBOOKS = sorted(Path(__file__).resolve().parents[2].joinpath("notebooks").glob("*.ipynb"))
PRINTS = {
    "finetune_gpt2": [
        r"parameters in torch\.float32",
        r"evaluation loss \d",
        r"0 of 6 steps skipped",
        r"MemoryFootprint",
    ],
    "why_is_my_loss_nan": [
        r"produced by 'addmm' in module\s+'transformer\.h\.1\.mlp\.c_proj', in the forward pass",
        r"c_proj in FP32: 0 skipped steps",
        r"The weight or buffer 'transformer\.h\.0\.ln_1\.bias' is not finite",
        r"loss is computed outside|gradient of an output|outside of the model",
        r"smaller loss scale",
    ],
}


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path: Path) -> None:
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("HF_MP_NOTEBOOK", "small")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(path.parents[1]), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PATH", os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]))  # of `hf-mp env`
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=250, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.get("text", "") for output in outputs)
    assert not [output.text for output in outputs if output.get("name") == "stderr" and "rror" in output.text]
    for words in PRINTS[path.stem]:
        assert re.search(words, printed), printed
