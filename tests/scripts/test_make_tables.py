"""The tables of the README and of docs/ are those of the stored results."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from jinja2 import meta

import make_tables
from _results import RESULTS, ROOT
from _tables import _JINJA, Regions, StoredResultError, _source
from make_tables import MARKER, REGION, pages, rewritten, stale_pages


def record(result: dict, **changes) -> dict:
    base = {
        "date": "2026-01-02T03:04:05+00:00",
        "command": "python scripts/bench_thing.py",
        "device": {"CPU": "A CPU", "CPU threads": "2 of 2", "CPU instructions": "AVX2",
                   "FP16 matmuls on the CPU": "native", "GPU 0": "NVIDIA H200"},
        "versions": {"torch": "2.13.0+cpu", "transformers": "5.23.0"},
    }  # fmt: skip
    return {**base, **changes, "result": result}


def write(directory: Path, name: str, result: dict, **changes) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.json").write_text(json.dumps(record(result, **changes)))


def test_the_pages_are_those_of_the_stored_results():
    assert not stale_pages(Regions(RESULTS), pages()), "run `make tables`"


def test_each_region_is_on_a_page():
    found = [match["name"] for page in pages() for match in REGION.finditer(page.read_text())]
    assert sorted(found) == sorted(Regions(RESULTS).regions)


class Noted(dict):
    """The records, which note the ones that are read."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> dict:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default=None):
        self.read.add(name)
        return super().get(name, default)


def test_each_stored_result_is_shown_or_needed():
    regions = Regions(RESULTS)
    records = regions.names["records"] = Noted(regions.records)
    needed = {
        "bench_trace",  # a report for who reads the code
        "compare_experts",  # docs/experts.md says how far the losses are off FP32's
    }
    for name, parts in regions.regions.items():
        regions(name)
        needed |= meta.find_undeclared_variables(_JINJA.parse(_source(parts)))
    assert not records.keys() - records.read - needed, "no page shows them: delete them"


def test_the_page_of_benchmarks_is_written_from_results_alone():
    text = (ROOT / "docs" / "benchmarks.md").read_text().partition("\n## Your GPU\n")[0]
    assert len(MARKER.findall(text)) > 10
    names = r"`\w+`|FP32|FP16|BF16|16-bit|GPT-2 124M"
    assert not re.search(r"\d", re.sub(names, "", REGION.sub("", text)))


def test_the_readme_takes_its_figures_from_results():
    text = REGION.sub("", (ROOT / "README.md").read_text().partition("## Works with")[0])
    assert not re.search(
        r"\d", re.sub(r"`[^`]*`|```.*?```|FP32|FP16|BF16|GPT-2|16 bits|16-bit|two", "", text, flags=re.DOTALL)
    )


@pytest.fixture
def regions(tmp_path) -> Regions:
    write(tmp_path, "bench_callback", {
        "contenders": {"callback": {"ratio_to_subclass": 1.25}},
        "callback_over_subclass_per_round": {"median": 1.5, "spread": 0.125},
    })  # fmt: skip
    return Regions(tmp_path)


PAGE = "before 9.9\n\n<!-- figures: callback -->\nold 7.7\n<!-- end of figures -->\n\nafter 9.9\n"


def test_what_is_between_the_markers_is_replaced(regions):
    text = rewritten(PAGE, regions, "page.md")
    assert "1.25 times the subclass's" in text and "1.50 ± 0.12" in text and "7.7" not in text
    assert text.startswith("before 9.9\n\n<!-- figures: callback -->\n\n")
    assert text.endswith("\n\n<!-- end of figures -->\n\nafter 9.9\n")
    assert rewritten(text, regions, "page.md") == text


def test_a_stale_page_is_found_and_a_fresh_one_is_not(regions, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    (fresh,) = stale_pages(regions, [page]).values()
    assert "1.25" in fresh
    page.write_text(fresh)
    assert not stale_pages(regions, [page])
    page.write_text(fresh.replace("1.25", "1.26"))
    assert stale_pages(regions, [page])


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (
            "<!-- figures: moon -->\n<!-- end of figures -->",
            r"there is no region 'moon': use one of architectures",
        ),
        ("<!-- figures: callback -->\n", r"page.md has markers of figures that do not come in pairs"),
        ("<!-- end of figures -->\n", r"page.md has markers of figures that do not come in pairs"),
        (
            "<!-- figures: llama 7b -->\n<!-- end of figures -->",
            r"region 'llama 7b': 'memory_llama_7b' is undefined: run the script",
        ),
    ],
)
def test_pages_that_cannot_be_made_are_refused(regions, page, message):
    with pytest.raises(StoredResultError, match=message):
        rewritten(page, regions, "page.md")


def test_a_field_that_is_missing_is_named(tmp_path):
    write(tmp_path, "bench_callback", {"contenders": {"callback": {}}})
    with pytest.raises(StoredResultError, match=r"region 'callback': 'dict object'"):
        Regions(tmp_path)("callback")


def described(tmp_path: Path, **part) -> Regions:
    """A region ``of`` with one part."""
    # A string or a list is written alike in JSON and in TOML.
    lines = [f"{key} = {json.dumps(value)}" for key, value in part.items()]
    (tmp_path / "tables.toml").write_text("\n".join(["[[of]]", *lines]))
    return Regions(tmp_path, tmp_path / "tables.toml")


@pytest.mark.parametrize(("value", "shown"), [("fast", "fast"), (True, "True"), ({"a": 1}, r"\{'a': 1\}")])
def test_a_field_that_is_no_number_is_named(tmp_path, value, shown):
    write(tmp_path, "x", {"seconds": value})
    with pytest.raises(StoredResultError, match=rf"region 'of': {shown} is not a number"):
        described(tmp_path, text="{{ x.seconds | f }}")("of")


# Every field that a region reads is missed where it is not there: nothing is made up.
@pytest.mark.parametrize("name", ["bench_step", "bench_step_memory"])
def test_no_region_is_made_from_a_result_that_is_empty(name, tmp_path):
    for file in RESULTS.glob("*.json"):
        shutil.copy(file, tmp_path)
    write(tmp_path, name, {"contenders": {}})
    region = {"bench_step_memory": "step memory"}.get(name, name.removeprefix("bench_"))
    with pytest.raises(StoredResultError, match=rf"region '{region}': .* has no "):
        Regions(tmp_path)(region)


def test_check_changes_nothing_and_fails(regions, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    monkeypatch.setattr(make_tables, "pages", lambda: [page])
    monkeypatch.setattr(make_tables, "unused_regions", lambda regions, files: [])  # this page has one of them
    with pytest.raises(SystemExit, match="run `make tables`"):
        make_tables.main(check=True, results_dir=tmp_path)
    assert page.read_text() == PAGE
    make_tables.main(check=False, results_dir=tmp_path)
    assert "1.25" in page.read_text()
    with pytest.raises(SystemExit) as ended:
        make_tables.main(check=True, results_dir=tmp_path)
    assert ended.value.code == 0


def test_check_fails_for_a_region_that_no_page_has(regions, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(rewritten(PAGE, regions, "page.md"))
    monkeypatch.setattr(make_tables, "pages", lambda: [page])
    with pytest.raises(SystemExit, match=r"no page has the regions architectures, .*: delete them in scripts/tables"):
        make_tables.main(check=True, results_dir=tmp_path)


def test_a_region_has_filled_paragraphs_and_a_table_with_a_line_for_each_row(tmp_path):
    write(tmp_path, "x", {"many": {"a": 1.5, "b": 3, "none": None}})
    part = {
        "text": "A first   paragraph,\nof {{ x.many | length }}.",
        "head": "| number | times",
        "rows": [
            [
                "name, value in x.many.items()",
                "times in (1, 2)",
                "{{ name }} | {{ value | f if value > 2 }}\n| {{ times }}",
            ],
            ["all | {{ x.many.values() | sum | f }} |"],
        ],
        "after": "The end.\n\n\nOf it.",
    }
    assert described(tmp_path, **part)("of").splitlines() == [
        "A first paragraph, of 2.", "",
        "| | number | times |", "|---|---|---|",
        "| a | | 1 |", "| a | | 2 |", "| b | 3.00 | 1 |", "| b | 3.00 | 2 |", "| all | 4.50 | |", "",
        "The end.", "", "Of it.",
    ]  # fmt: skip


def test_a_part_uses_what_it_and_those_before_it_set(tmp_path):
    write(tmp_path, "x", {"seconds": 2})
    parts = 'set = { one = "x.seconds", two = "one * 2" }\ntext = "{{ two }}"\n[[of]]\ntext = "{{ one }}"'
    (tmp_path / "tables.toml").write_text(f"[[of]]\n{parts}")
    assert Regions(tmp_path, tmp_path / "tables.toml")("of") == "4\n\n2"


def test_a_table_without_rows_is_refused(tmp_path):
    write(tmp_path, "x", {"many": {}})
    with pytest.raises(StoredResultError, match=r"region 'of': the table \| number \| has no rows"):
        described(tmp_path, head="number", rows=[["value in x.many.values()", "{{ value }}"]])("of")


def test_conditions_that_differ_are_said(tmp_path):
    write(tmp_path, "bench_step", {"a": 1})
    device = {**record({})["device"], "CPU": "another", "CPU threads": "1 of 2"}
    write(tmp_path, "other", {"a": 1}, device=device, versions={"torch": "2.11.0", "transformers": "5.23.0"})
    text = "1{{ otherwise('%s') }}"
    assert described(tmp_path, text=text % "bench_step")("of") == "1"
    assert described(tmp_path, text=text % "other")("of") == "1, another, 1 of 2 threads, torch 2.11.0"
    (tmp_path / "bench_step.json").unlink()
    assert described(tmp_path, text=text % "other")("of") == "1"


def test_gpu_results_fill_a_table_and_gaps_are_named(tmp_path):
    def row(seconds: float, peak: int) -> dict:
        return {"median_seconds": seconds, "peak_bytes": peak, "ratio_to_floor": 1.25}

    shape = {"layers": 12, "width": 768, "vocab": 50257, "batch": 8, "seq": 1024, "accumulation": 1, "dropout": 0.1}
    write(tmp_path / "h200", "bench_step_gpt2", {
        "workload": shape,
        "contenders": {"Trainer fp16=True": row(2.0, 100), "MixedPrecisionTrainer fp16": row(1.5, 60)},
    })  # fmt: skip
    update = {"hf_mp fp16": row(1.0, 0), "torch.amp": row(4.0, 0)}
    write(tmp_path / "h200", "bench_update_gpt2_large", {"contenders": update})
    text = Regions(tmp_path)("gpu")
    assert "NVIDIA H200" in text and "8 x 1024 tokens, dropout 0.1" in text
    assert "| `fp16` step / Trainer `fp16=True` | 0.75 | not measured |" in text
    assert "| `fp16` peak memory / Trainer `fp16=True` | 0.60 | not measured |" in text
    assert "| `fp16-lean` step | not measured | not measured |" in text
    assert "| update / GradScaler, clip, fused AdamW, cast | not measured | 0.25 |" in text
    assert "| update / its bandwidth floor | not measured | 1.25 |" in text
