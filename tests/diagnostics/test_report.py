"""The page of a run: what it says, what it names as missing, and that it stands alone."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from html_outline import Outline
from planted_faults import Mlp, vectors
from range_models import Gated, batches
from torch import nn
from typer.testing import CliRunner

import hf_mp
from hf_mp.cli import app
from hf_mp.diagnostics import report_charts as charts
from hf_mp.diagnostics.contract.lost_update_count import LostUpdateCount
from hf_mp.diagnostics.magnitudes import histogram
from hf_mp.diagnostics.report import (
    OPEN_ROWS,
    PAGE_NAME,
    findings,
    render_report,
    write_report,
)
from hf_mp.diagnostics.run_log import LOG_NAME, RunRecords, StepRecord
from hf_mp.diagnostics.step_magnitudes import Kind, StepMagnitudes, TensorMagnitudes

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NAN = float("nan")


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with a step that its data spoiled, two recorded steps, and a name to escape."""
    path = tmp_path_factory.mktemp("runs") / "<b>run & co"
    torch.manual_seed(1)
    model = Mlp()
    model.add_module("<script>alert(1)", nn.Linear(4, 4))
    model.forward = lambda x, own=model: getattr(own, "<script>alert(1)")(Mlp.forward(own, x))  # type: ignore[method-assign]
    model, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))  # type: ignore[assignment]
    hf_mp.explain_overflows(model)
    recorder = hf_mp.record_precision(model, path, histogram_steps=3, settings={"<i>": "<u>"})
    for seed, factor in enumerate((1.0, 1.0, NAN, 1.0, 1.0)):
        (model(vectors(seed)["x"]).square().mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    recorder.end()
    recorder.write_report()
    return path


@pytest.fixture(scope="module")
def page(run_directory: Path) -> str:
    return (run_directory / PAGE_NAME).read_text(encoding="utf-8")


def test_every_tag_is_closed(page: str) -> None:
    assert Outline(page).open == []


def test_names_are_escaped(page: str) -> None:
    assert "<script" not in page and "<b>run" not in page and "<i>" not in page and "<u>" not in page
    text = Outline(page).text
    assert "Precision of <b>run & co" in text and "<script>alert(1)" in text


def test_the_page_stands_alone(page: str) -> None:
    outline = Outline(page)
    assert not re.search(r"(https?:|//|url\(|@import)", re.sub(r"<!doctype html>", "", page))
    assert all(not value.startswith(("http", "/")) for _, attrs in outline.tags for value in attrs.values() if value)
    assert "script" not in [tag for tag, _ in outline.tags]
    assert page.count("prefers-color-scheme: dark") >= 2


def test_the_page_tells_what_happened(page: str) -> None:
    text = re.sub(r"\s+", " ", Outline(page).text)
    assert "1 of 5 steps skipped." in text
    assert "The loss is computed outside the model" in text and "Step 3" in text
    for kind in Kind:
        assert f"{kind.value} of all layers" in page or f"{kind.value} of all" in page
    assert version("torch") in text and "Lost updates" in text
    assert "Missing" not in text


def test_a_run_with_nothing_but_a_log_of_steps_has_a_page(tmp_path: Path) -> None:
    line = '{"record":"step","step":1,"loss_scale":2.0,"headroom":null,"skipped":true,"cause":"<why>"}'
    (tmp_path / LOG_NAME).write_text(line + '\n{"record":"st')
    path = write_report(tmp_path)
    outline = Outline(path.read_text(encoding="utf-8"))
    (tmp_path / LOG_NAME).write_text("")
    assert "No step was recorded." in write_report(tmp_path).read_text(encoding="utf-8")
    assert outline.open == []
    for sentence in ("Settings were not recorded", "line 2 of 2 is half-written", "<why>", "there are no histograms"):
        assert sentence in outline.text


# Many layers


def many_layers(count: int) -> StepMagnitudes:
    found = histogram(torch.exp2(torch.randn(500, generator=torch.Generator().manual_seed(0)) * 4 - 20))
    tensors = [
        TensorMagnitudes(kind, f"h.{layer}", "weight", 3, found, LostUpdateCount(count - layer, count))
        if kind is Kind.UPDATES
        else TensorMagnitudes(kind, f"h.{layer}", "weight", 3, found)
        for layer in range(count)
        for kind in Kind
    ]
    return StepMagnitudes(5, 2.0**10, tuple(tensors))


def test_too_many_layers_are_folded_and_counted(tmp_path: Path) -> None:
    page = render_report(RunRecords(tmp_path, magnitudes=many_layers(150)))
    assert Outline(page).open == []
    assert page.count(f"<summary>{150 - OPEN_ROWS} more layers</summary>") == len(Kind) + 1
    assert page.count("<code>h.149</code>") == len(Kind) + 1
    lost = page[page.index('id="updates"') :]  # those that lose most come first
    assert lost.index("<code>h.0</code>") < lost.index("<code>h.1</code>")
    assert page.count("times the loss scale</li>") == 2  # of the gradients' kinds alone
    assert len(page) < 2**20


# Sentences


def test_findings_say_what_16_bits_would_lose(tmp_path: Path) -> None:
    values = torch.tensor([2.0**-26] * 3 + [1.0])
    gradient = TensorMagnitudes(Kind.WEIGHT_GRADIENTS, "a", "w", 1, histogram(values))
    update = TensorMagnitudes(Kind.UPDATES, "a", "w", 1, histogram(values), LostUpdateCount(2, 4))
    step = StepMagnitudes(7, 1024.0, (gradient, update))
    steps = [StepRecord(1, 2.0, 3.0, False, ""), StepRecord(2, 4.0, None, True, "x")]
    assert findings(RunRecords(tmp_path, steps={record.step: record for record in steps}, magnitudes=step)) == [
        "1 of 2 steps skipped.",
        "Of the weight gradients of step 7, FP16 would lose 75% without loss scaling and 0% at the scale of 1024.",
        "Of the updates of step 7, weights stored in BF16 without masters would lose 50%.",
    ]
    assert step.log_entries() == {"underflowed_share": 0.0, "swamped_share": 0.5}
    assert replace(step, tensors=()).log_entries() == {}
    assert findings(RunRecords(tmp_path, magnitudes=replace(step, tensors=()))) == []


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0%"), (1e-9, "<0.01%"), (0.00042, "0.042%"), (0.5, "50%"), (0.1234, "12.3%"),
     (0.9999, ">99.9%"), (1.0, "100%")],
)  # fmt: skip
def test_shares_are_readable_and_never_rounded_to_none_or_all(share: float, text: str) -> None:
    assert charts.percent(share) == text


# Pictures


def test_a_silhouette_is_the_histogram_shifted_by_the_loss_scale() -> None:
    found = histogram(torch.tensor([1.0] * 10 + [2.0] * 5 + [0.0] * 50))
    assert charts.silhouette(found) == "M480,100V0h10V50h10V100"
    assert charts.silhouette(found, 4) == "M520,100V0h10V50h10V100"
    beyond = charts.silhouette(histogram(torch.tensor([2.0**-60] * 2 + [2.0**40] * 10)))
    assert beyond.startswith("M0,100V80h10V100h10") and beyond.endswith("V100h10V0h10V100")
    assert charts.silhouette(histogram(torch.zeros(3))) == ""


def test_a_long_run_is_drawn_with_few_points_that_keep_its_extremes() -> None:
    generator = np.random.default_rng(0)
    left = generator.uniform(3.0, 9.0, 20_000)
    left[12_345] = 0.5
    steps = [StepRecord(i + 1, 2.0 ** (i % 7), float(y), i % 10_000 == 5, "") for i, y in enumerate(left)]
    scale, headroom = charts.scale_charts({step.step: step for step in steps})
    assert scale is not None and headroom is not None and len(scale["skips"]) == 2
    for chart in (scale, headroom):
        assert len(chart["curve"].split()) <= 2 * charts.MOST_POINTS
        assert (chart["first_step"], chart["last_step"]) == (1, 20_000)
    assert (scale["bottom"], scale["top"], headroom["bottom"], headroom["top"]) == (0, 7, 0, 9)
    assert "12346,-0.500" in headroom["curve"].split()


# The command


def test_the_command_writes_the_page_and_names_what_is_missing(run_directory: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(run_directory), "--html", str(tmp_path / "own.html")])
    assert result.exit_code == 0 and "own.html is written" in result.output and "missing" not in result.output
    (tmp_path / LOG_NAME).write_text('{"record":')
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 0 and "missing: line 1 of 1 is half-written" in result.output
    assert (tmp_path / PAGE_NAME).is_file()


def test_the_command_refuses_what_is_no_run(tmp_path: Path, run_directory: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2 and "hf-mp report: error:" in result.stderr and "holds no run" in result.stderr
    assert not list(tmp_path.iterdir())
    result = CliRunner().invoke(app, ["report", str(run_directory), "--html", str(tmp_path)])
    assert result.exit_code == 2 and "Is a directory" in result.stderr


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [390, 1200])
def test_nothing_sticks_out_in_a_browser(run_directory: Path, width: int, tmp_path: Path) -> None:
    page = (run_directory / PAGE_NAME).read_text(encoding="utf-8").replace("<details>", "<details open>")
    script = "<script>document.title='wide '+(document.documentElement.scrollWidth-innerWidth)</script></body>"
    (tmp_path / "page.html").write_text(page.replace("</body>", script), encoding="utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--dump-dom", f"--window-size={width},900",
               f"--user-data-dir={tmp_path}/chromium", f"file://{tmp_path}/page.html"]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert re.search(r"<title>wide (-?\d+)</title>", shown)[1] in ("0", "-15")  # type: ignore[index]


def test_healed_places_are_shown(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, optimizer = hf_mp.prepare(
        net := Gated(factor=2.0**18), torch.optim.SGD(net.parameters(), lr=0.0), on_overflow="heal"
    )
    recorder = hf_mp.record_precision(model, tmp_path)
    for batch in batches(2):
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    recorder.end()
    page = Outline(recorder.write_report().read_text(encoding="utf-8"))
    assert "Healed places" in page.text and "down: linear" in page.text and not page.open
