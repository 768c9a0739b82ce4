"""The documentation site: built as `make docs` builds it, complete, and without the network."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import griffe
import pytest
from mkdocstrings import Inventory
from transformers import TrainingArguments

import hf_mp
from hf_mp.cli import app
from hf_mp.memory.ledger import Category, Phase
from hf_mp.memory.training import estimate_training_memory
from hf_mp.policy import PRESETS

# What `make docs` has built already, where .ci/run says so.
BUILT = os.environ.get("BUILT_SITE")
pytestmark = [] if BUILT else [pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = sorted(name for name in hf_mp.__all__ if not name.startswith("__"))

# what a browser fetches by itself, unlike the address of a link
LOADING = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}
FROM_ELSEWHERE = ("http:", "https:", "//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if BUILT:
        return Path(BUILT)
    folder = tmp_path_factory.mktemp("docs") / "site"
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert build.returncode == 0, build.stderr
    assert "WARNING" not in build.stderr
    return folder


def is_old_address(page: Path) -> bool:
    """Whether a page only leads to where its text has gone."""
    return 'http-equiv="refresh"' in page.read_text(encoding="utf-8")


def text_of(page: Path) -> str:
    """What a reader sees of the article of a page, without its code blocks."""
    article = re.search(r"<article.*?</article>", page.read_text(encoding="utf-8"), re.DOTALL)
    assert article is not None
    return re.sub(r"<[^>]+>", "", re.sub(r"<pre>.*?</pre>", "", article[0], flags=re.DOTALL))


# Complete


def test_each_public_name_has_an_entry_in_the_reference(site: Path) -> None:
    with (site / "objects.inv").open("rb") as file:
        entries = Inventory.parse_sphinx(file)
    assert not {f"hf_mp.{name}" for name in PUBLIC} - set(entries)
    for name in PUBLIC:
        page, _, place = entries[f"hf_mp.{name}"].uri.partition("#")
        assert f'id="{place.replace("$", f"hf_mp.{name}")}"' in (site / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [command.name or command.callback.__name__ for command in app.registered_commands])
def test_each_command_is_on_the_page_about_the_command(site: Path, name: str) -> None:
    page = (site / "reference/command_line.html").read_text(encoding="utf-8")
    assert f'id="hf-mp-{name}"' in page


def test_each_argument_of_ours_is_on_the_page_with_its_help(site: Path) -> None:
    page = (site / "reference/training.html").read_text(encoding="utf-8")
    fields = hf_mp.MixedPrecisionArguments.__dataclass_fields__
    ours = fields.keys() - TrainingArguments.__dataclass_fields__.keys()
    own = {name for name in ours if "help" in fields[name].metadata}
    assert {"precision", "loss_scale"} <= own
    for name in own:
        entry = page.partition(f'id="hf_mp.MixedPrecisionArguments.{name}"')[2]
        help_text = fields[name].metadata["help"]
        assert help_text.split(" (")[0].split(":")[0][:40] in entry[:6000]


# Well rendered


@pytest.fixture(scope="module")
def package() -> griffe.Object:
    extensions = griffe.load_extensions(str(ROOT / "scripts" / "docs_docstrings.py"))
    found = griffe.load("hf_mp", search_paths=[ROOT], docstring_parser="google", extensions=extensions)
    assert isinstance(found, griffe.Object)
    return found


def parameters(callable_: Callable[..., Any]) -> set[str]:
    if inspect.isclass(callable_) and not inspect.isfunction(callable_.__init__):
        return set()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = inspect.signature(callable_).parameters.items()
    return {name for name, parameter in named if parameter.kind not in kinds}


# Arguments of the stock Trainer are documented there; errors and reports are made by the library alone.
NOT_OURS = {"MixedPrecisionArguments": None, "MixedPrecisionTrainer": {"precision"}, "Preempted": set()}


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_explain_each_parameter(package: griffe.Object, name: str) -> None:
    entry: Any = package[name]
    sections = {section.kind: section.value for section in entry.docstring.parsed}
    explained = {
        item.name.lstrip("*")
        for kind in (griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.attributes)
        for item in sections.get(kind, [])
    }
    expected = NOT_OURS.get(name, parameters(getattr(hf_mp, name)))
    assert not (expected or set()) - explained


def test_no_markup_of_other_systems_is_left(site: Path) -> None:
    pages = [site / "index.html", *site.glob("*.html"), *site.glob("reference/*.html")]
    for page in pages:
        if page.name != "404.html" and not is_old_address(page):
            assert not re.findall(r":(?:class|func|meth|attr|data|mod):|``|::\s*$", text_of(page), re.MULTILINE), page


# From the site alone


class Addresses(HTMLParser):
    """Collects what a page loads, what it links to, and its places that can be linked to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag in LOADING and (address := values.get(LOADING[tag])):
            self.loads.append(address)
        self.loads += [part.split()[0] for part in values.get("srcset", "").split(",") if part.strip()]
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        self.places |= {values[name] for name in ("id", "name") if name in values}


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Addresses]:
    found = [page for page in site.rglob("*.html") if page.name != "404.html" and not is_old_address(page)]
    return {page.resolve(): Addresses(page) for page in found}


def test_each_link_leads_to_a_page_and_a_place_on_it(pages: dict[Path, Addresses]) -> None:
    lost = []
    for page, addresses in pages.items():
        for link in addresses.links:
            path, _, place = link.partition("#")
            target = (page.parent / unquote(path)).resolve() if path else page
            if path.startswith(FROM_ELSEWHERE) or path in ("", "."):
                continue
            if not target.exists() or (place and target in pages and unquote(place) not in pages[target].places):
                lost.append((page.name, link))
    assert not lost


def test_old_addresses_lead_to_a_page_and_a_place_on_it(site: Path, pages: dict[Path, Addresses]) -> None:
    old = [page for page in site.rglob("*.html") if is_old_address(page)]
    assert len(old) == 19
    for page in old:
        (link,) = Addresses(page).links
        path, _, place = link.partition("#")
        target = (page.parent / path).resolve()
        assert target in pages and (not place or place in pages[target].places), (page.name, link)


def test_tests_stand_in_a_column_that_is_folded(site: Path) -> None:
    for name in ("limits.html", "security.html"):
        page = (site / name).read_text(encoding="utf-8")
        assert page.count('id="show-tests"') == 1 and '<th class="shown-by">' in page
    assert 'id="show-tests"' not in (site / "precision.html").read_text(encoding="utf-8")


def test_every_page_is_two_clicks_from_the_front_page(site: Path, pages: dict[Path, Addresses]) -> None:
    front = (site / "index.html").resolve()
    reached = {front}
    for _ in range(2):
        links = [(page, link.partition("#")[0]) for page in reached for link in pages[page].links]
        reached |= {(page.parent / unquote(link)).resolve() for page, link in links if link} & set(pages)
    assert set(pages) == reached


def test_guides_link_public_names_to_the_reference(pages: dict[Path, Addresses]) -> None:
    links = {link for page, addresses in pages.items() for link in addresses.links if page.name == "how_it_works.html"}
    assert "reference/loss_scaling.html#hf_mp.HeadroomLossScaler" in links


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Addresses]) -> None:
    loads = {page: addresses.loads for page, addresses in pages.items()}
    assert all(loads.values())
    assert not [(page, address) for page in loads for address in loads[page] if address.startswith(FROM_ELSEWHERE)]
    for sheet in [*site.rglob("*.css"), *site.rglob("*.svg"), *site.rglob("*.html")]:
        addresses = re.findall(r"(?:url\(|@import)\s*['\"]?([^'\")\s]+)", sheet.read_text(encoding="utf-8"))
        assert not [address for address in addresses if address.startswith(FROM_ELSEWHERE)], sheet


def test_no_page_asks_the_theme_for_what_it_would_fetch(site: Path) -> None:
    # The theme's script holds the addresses of a drawing program and of a repository's star count, for pages with them.
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert 'class="mermaid"' not in text
        assert 'data-md-component="source"' not in text


# What the page on precisions says


def table(page: str, first: str) -> list[dict[str, str]]:
    """The rows of the Markdown table whose first heading is ``first``."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def test_the_presets_are_those_that_there_are() -> None:
    names = {"torch.float32": "FP32", "torch.float16": "FP16", "torch.bfloat16": "BF16"}
    rows = {row["preset"]: row for row in table("precision.md", "preset")}
    assert rows.keys() == PRESETS.keys()
    for name, policy in PRESETS.items():
        assert rows[name]["the model's parameters"].split()[0] == names[str(policy.params)]
        assert rows[name]["matmuls"] == names[str(policy.compute)]
        assert rows[name]["loss scale"] == str(policy.loss_scale).lower()


@pytest.mark.parametrize("name", list(PRESETS))
def test_bytes_per_parameter_are_those_of_a_step(name: str, gpt2_config: Any) -> None:
    gpt2_config.update({"n_embd": 512, "vocab_size": 2, "n_positions": 2})
    memory = estimate_training_memory(gpt2_config, name, batch_size=1, seq_len=2, device="cpu")
    update = memory.by_phase[Phase.UPDATE]
    kept = (Category.MASTER_WEIGHTS, Category.WORKING_COPIES, Category.GRADIENTS, Category.OPTIMIZER_STATE)
    counted = sum(update[category] for category in kept) / memory.parameters
    (row,) = (row for row in table("precision.md", "preset") if row["preset"] == name)
    assert counted == pytest.approx(float(row["bytes per parameter"]), rel=0.01)
