import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from html_outline import Outline

from hf_mp.memory.ledger import Category
from hf_mp.memory.page import HEADROOM, HEIGHT, WIDTH, areas, render_page, stretches
from hf_mp.memory.report import gather_report

from .conftest import CONFIGS

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def report():
    return gather_report(
        CONFIGS["gpt2-4"](), config_only=True, train=True, gpu_bytes=3 * 2**20,
        presets=("fp32", "fp16", "fp16-lean"), batch_size=4, seq_len=32,
    )  # fmt: skip


@pytest.fixture(scope="module")
def page(report):
    return render_page(report)


@pytest.fixture(scope="module")
def outline(page):
    return Outline(page)


def test_every_tag_is_closed(outline):
    assert outline.open == []


def test_the_page_asks_the_network_for_nothing(page, outline):
    assert not re.search(r"https?://|url\(|@import", page)
    assert not [tag for tag, _ in outline.tags if tag in ("script", "iframe", "img", "object", "embed")]
    assert [attrs["href"] for tag, attrs in outline.tags if tag == "link"] == ["data:,"]
    assert not [attrs for _, attrs in outline.tags if "src" in attrs]


def test_names_from_outside_are_escaped(report):
    evil = '<script>alert(1)</script>"&'
    page = render_page(replace(report, model=evil, unavailable={evil: evil}, training={}))
    assert "<script" not in page and "One training step" not in page and 'gpu-line"' not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&#34;&amp;" in page


def widths(page, label):
    """The percentages of the segments in a bar, by their names."""
    bar = page.split(f'aria-label="{label}: ')[1].split("</div>")[0]
    return {name: float(width) for width, name in re.findall(r'width:([\d.]+)%" title="([\w ]+):', bar)}


def test_bars_are_as_wide_as_their_bytes(report, page):
    memory = report.training["fp16"].estimate
    scale = 1.02 * max(row.estimate.peak_bytes for row in report.training.values())
    shares = widths(page, "hf_mp fp16")
    assert sum(shares.values()) == pytest.approx(100 * memory.peak_bytes / scale, abs=0.01)
    state = memory.bytes_by_category[Category.OPTIMIZER_STATE]
    assert shares["optimizer state"] == pytest.approx(100 * state / scale, abs=0.001)
    assert '<span>hf_mp fp16</span><b class="over">' in page  # it does not fit
    footprint, largest = report.footprints["int8"], max(found.total_bytes for found in report.footprints.values())
    loaded = widths(page, "INT8")
    assert set(loaded) == {"float16", "float32", "int8"}
    assert sum(loaded.values()) == pytest.approx(100 * footprint.total_bytes / (1.02 * largest), abs=0.01)


def test_a_timeline_is_a_stack_that_fills_the_picture(report):
    step = report.training["fp16"].estimate
    found = areas(step.timeline).values()
    assert [phase.value for phase, _, _ in stretches(step.timeline)] == ["forward", "backward", "update"]
    assert sum(length for _, _, length in stretches(step.timeline)) == pytest.approx(100)
    points = [tuple(map(float, point.split(","))) for corners in found for point in corners.split()]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT + 0.05 for x, y in points)
    assert min(y for _, y in points) == pytest.approx(HEIGHT * (1 - 1 / HEADROOM), abs=0.06)


def test_the_gpu_is_a_line_across_all_bars(report, outline):
    lines = [attrs["style"] for _, attrs in outline.tags if attrs.get("class") == "gpu-line"]
    scale = 1.02 * max(report.gpu_bytes, *(row.estimate.peak_bytes for row in report.training.values()))
    assert lines == [f"left:{100 * report.gpu_bytes / scale:.3f}%"] * 3


_PROBE = """
<script>
addEventListener("load", () => {
  const bars = [...document.querySelectorAll("#trained + section .bar")];
  document.documentElement.setAttribute("data-probe", JSON.stringify({
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    bars: bars.map(bar => [...bar.children].reduce((sum, piece) => sum + piece.getBoundingClientRect().width, 0)),
    widths: bars.map(bar => bar.getBoundingClientRect().width),
    line: document.querySelector(".gpu-line").getBoundingClientRect().left - bars[0].getBoundingClientRect().left,
    requests: performance.getEntriesByType("resource").length,
  }));
});
</script></body>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium (Debian: apt-get install chromium)")
def test_the_page_opens_in_a_browser(page, report, tmp_path):
    (tmp_path / "probed.html").write_text(page.replace("</body>", _PROBE))
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=3000", "--window-size=1200,900", "--dump-dom", (tmp_path / "probed.html").as_uri(),
    ]  # fmt: skip
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = json.loads(re.search(r'data-probe="([^"]*)"', dumped).group(1).replace("&quot;", '"'))
    assert found["requests"] == 0 and found["overflow"] <= 0
    scale = 1.02 * max(report.gpu_bytes, *(row.estimate.peak_bytes for row in report.training.values()))
    for row, bar, width in zip(report.training.values(), found["bars"], found["widths"], strict=True):
        assert bar == pytest.approx(width * row.estimate.peak_bytes / scale, abs=1.5)
    assert found["line"] == pytest.approx(found["widths"][0] * report.gpu_bytes / scale, abs=2)
