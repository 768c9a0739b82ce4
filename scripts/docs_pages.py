"""A hook of MkDocs: the pages of the documentation site that are made from what is in the checkout already.

The front page is the README, the reference is made from the public names, the page on the command from the command, the
page on results from the stored results. Files that a page links to, such as recipes, come as pages with their source.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click
from typer.main import get_command

from hf_mp import _HOME
from hf_mp.cli import app
from hf_mp.trainer.settings import PrecisionOptions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "scripts/results"
OF_THE_CHECKOUT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")  # pages of the site, too

# a link or picture in Markdown that is neither a web address nor a place on the same page
LINK = re.compile(r"\]\((?!\w+:|#)(?P<path>[^)\s#]+)(?P<place>#[^)\s]*)?\)")

# A public name in the text of a page, and not in a link already; short ones (`load`) mean ours only after `hf_mp.`.
MENTION = re.compile(rf'(?<!">)<code>(?P<package>hf_mp\.)?(?P<name>{"|".join(_HOME)})(?:\(\))?</code>')

logger = get_plugin_logger("docs_pages")


@dataclass(frozen=True)
class Section:
    """A page of the reference.

    Attributes:
        file: its name, without ``.md``.
        title: its heading.
        modules: where its public names come from: modules, or packages with all that is in them.
        besides: full paths of further types that the public names take or return.
    """

    file: str
    title: str
    modules: tuple[str, ...]
    besides: tuple[str, ...] = ()

    def rank(self, module: str) -> int | None:
        """Where the public names of ``module`` come on the page; None if they belong elsewhere."""
        own = (rank for rank, own in enumerate(self.modules) if f"{module}.".startswith(f"{own}."))
        return next(own, None)


SECTIONS = (
    Section(
        "training",
        "Training",
        (
            *("hf_mp.trainer.trainer", "hf_mp.trainer.arguments", "hf_mp.trainer.callback", "hf_mp.step"),
            *("hf_mp.policy", "hf_mp.trainer.hand_over", "hf_mp.trainer.log_probabilities"),
        ),
    ),
    Section(
        "autocast",
        "Autocast",
        ("hf_mp.casting",),
        (
            "hf_mp.casting.explain.Explanation",
            "hf_mp.casting.explain.ExplainedOp",
            "hf_mp.casting.rules.parse_rules",
        ),
    ),
    Section("loss_scaling", "Loss scaling", ("hf_mp.scaling.scalers",), ("hf_mp.scaling.loss_scaler.LossScaler",)),
    Section("master_weights", "Master weights", ("hf_mp.weights",)),
    Section(
        "diagnostics",
        "Diagnostics",
        ("hf_mp.diagnostics",),
        (
            "hf_mp.diagnostics.contract.table.ContractRow",
            "hf_mp.diagnostics.contract.risks.Risk",
            "hf_mp.diagnostics.lost_updates.ParameterUpdates",
            "hf_mp.diagnostics.ranges.OpRange",
            "hf_mp.diagnostics.comparison_report.PrecisionError",
            "hf_mp.diagnostics.comparison_report.LayerError",
            "hf_mp.diagnostics.overflow.OverflowExplainer",
            "hf_mp.diagnostics.values.TensorRange",
            "hf_mp.diagnostics.precision_recorder.PrecisionRecorder",
        ),
    ),
    Section(
        "memory",
        "Memory",
        ("hf_mp.memory",),
        (
            "hf_mp.memory.footprint.TensorRow",
            "hf_mp.memory.footprint.Kind",
            "hf_mp.memory.footprint.ModuleBytes",
            "hf_mp.memory.precisions.TRAINING_PRESETS",
            "hf_mp.memory.training.TrainingSettings",
            "hf_mp.memory.ledger.Category",
            "hf_mp.memory.ledger.Phase",
            "hf_mp.memory.ledger.Moment",
        ),
    ),
    Section("checkpoints", "Checkpoints", ("hf_mp.trainer.checkpoints",)),
)

# The methods to document; the others are internal.
MEMBERS = {
    "MixedPrecision": ("attach", "attach_optimizer", "detach", "model", "state_dict", "load_state_dict"),
    "MixedPrecisionArguments": tuple(PrecisionOptions.__dataclass_fields__),
    "MixedPrecisionCallback": ("detach",),
    "MixedPrecisionTrainer": ("train",),
    "OverflowExplainer": ("explain_now",),
    "PrecisionStats": ("log_entries",),
    "TensorRange": (),
    "OpRange": ("headroom", "overflows"),
    "PrecisionComparison": ("change", "to_dict", "to_json"),
    "PrecisionError": ("error", "name"),
    "LayerError": (),
    "RangeReport": ("overflows", "close", "to_text", "to_json", "save", "load"),
    "autocast": ("explain",),
    "LossScaler": (
        *("scale", "unscale_", "step", "update", "get_scale", "is_enabled"),
        *("state", "smallest_scale", "state_dict", "load_state_dict"),
    ),
    "DynamicLossScaler": (
        *("get_growth_factor", "get_backoff_factor", "get_growth_interval"),
        *("set_growth_factor", "set_backoff_factor", "set_growth_interval"),
    ),
    "HeadroomLossScaler": (),
    "StaticLossScaler": (),
}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages, and a page or a copy for each file that a page links to."""
    pages = {file.src_uri: file.content_string for file in files.documentation_pages()}
    for uri, text in generated_pages().items():
        files.append(File.generated(config, uri, content=text))
        pages[uri] = text
    for path in sorted({path for uri, text in pages.items() for path in _linked_files(uri, text)}):
        target = _place_of(path)
        if target.startswith("source/"):
            files.append(File.generated(config, target, content=_source(path)))
        elif target == path:
            files.append(File.generated(config, target, abs_src_path=str(ROOT / path)))
    return files


def generated_pages() -> dict[str, str]:
    """The pages that are made here, by their places on the site."""
    for name in sorted(_HOME):
        if all(section.rank(_HOME[name]) is None for section in SECTIONS):
            logger.warning(f"hf_mp.{name} is on no page of the reference: add {_HOME[name]} to SECTIONS in {__file__}")
    return {
        "index.md": "---\nhide: [navigation]\n---\n" + (ROOT / "README.md").read_text(encoding="utf-8"),
        **{name.lower(): (ROOT / name).read_text(encoding="utf-8") for name in OF_THE_CHECKOUT},
        "recipes.md": _recipes(),
        "results.md": _results(),
        "reference/command_line.md": _command_line(),
        "reference/autocast_ops.md": _autocast_ops(),
        **{f"reference/{section.file}.md": _reference(section) for section in SECTIONS},
    }


def on_page_markdown(markdown: str, *, page: Page, **kwargs: Any) -> str:
    """Have links to files of the checkout lead to where those are on the site."""
    uri = page.file.src_uri

    def place(link: re.Match[str]) -> str:
        path = _path_in_checkout(uri, link["path"])
        if not (ROOT / path).exists():
            return link[0]  # a page of the site, or wrong: MkDocs tells
        return f"]({relpath(_place_of(path), str(PurePosixPath(uri).parent))}{link['place'] or ''})"

    return LINK.sub(place, markdown)


def on_page_content(html: str, *, page: Page, **kwargs: Any) -> str:
    """Link the public names that a guide mentions to their entries in the reference."""
    if page.file.src_uri.startswith(("reference/", "source/")):
        return html

    def entry(mention: re.Match[str]) -> str:
        name = mention["name"]
        if mention["package"] is None and not re.search("[A-Z_]", name):
            return mention[0]
        return f'<autoref identifier="hf_mp.{name}" optional>{mention[0]}</autoref>'

    return MENTION.sub(entry, html)


def _linked_files(uri: str, markdown: str) -> Iterator[str]:
    for link in LINK.finditer(markdown):
        if (ROOT / (path := _path_in_checkout(uri, link["path"]))).is_file():
            yield path


def _path_in_checkout(uri: str, link: str) -> str:
    """What a link on a page means in the checkout, where the README lies one folder above the other pages."""
    at_the_top = uri in ("index.md", "recipes.md", "results.md", *map(str.lower, OF_THE_CHECKOUT))
    folder = "." if at_the_top else str(PurePosixPath("docs", uri).parent)
    return normpath(f"{folder}/{link}")


def _place_of(path: str) -> str:
    """Where a file of the checkout is on the site."""
    if path == "README.md":
        return "index.md"
    if path == RESULTS:
        return "results.md"
    if path in OF_THE_CHECKOUT:
        return path.lower()
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith((".png", ".svg", ".json")):
        return path
    return f"source/{path}.md"


def _source(path: str) -> str:
    language = {".py": "python", ".yaml": "yaml"}.get(PurePosixPath(path).suffix, "text")
    code = (ROOT / path).read_text(encoding="utf-8")
    header = "---\nsearch:\n  exclude: true\nhide: [toc]\n---\n"
    return f"{header}# {PurePosixPath(path).name}\n\n~~~~~~ {{.{language} title={path!r}}}\n{code}~~~~~~\n"


def _results() -> str:
    rows = []
    folder = ROOT / RESULTS
    for file in sorted(folder.rglob("*.json")):  # those of a GPU lie in a folder of their own
        record = json.loads(file.read_text(encoding="utf-8"))
        device, versions = record["device"], record["versions"]
        machine = device.get("GPU 0", device["CPU"])
        _, *arguments = shlex.split(record["command"])
        script = next(argument for argument in arguments if argument.endswith(".py"))  # pytest's options come first
        options = arguments[arguments.index(script) + 1 :]
        linked = f"[{script}]({script})" if (ROOT / script).exists() else f"`{script}`"  # of a former version
        cells = (
            f"[{file.relative_to(folder).with_suffix('').as_posix()}]({file.relative_to(ROOT).as_posix()})",
            f"{linked} {f'`{shlex.join(options)}`' if options else ''}",
            *(record["date"][:10], machine, versions["torch"], versions["transformers"]),
        )
        rows.append(cells)
    about = "Every measured figure comes from one of these files, which also hold device, versions, date and command."
    return _table("Results", about, ("result", "command", "date", "device", "torch", "Transformers"), rows)


def _table(title: str, about: str, header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A page of one table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    rule = "|" + "---|" * (lines[0].count("|") - 1)
    return "\n".join(
        ["---\nhide: [navigation, toc]\n---", f"# {title}\n", f"{about}\n", lines[0], rule, *lines[1:], ""]
    )


def _recipes() -> str:
    rows = []
    for file in sorted((ROOT / "recipes").glob("[a-z]*.py")):
        about = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        rows.append((f"[{file.name}](recipes/{file.name})", about.partition("\n")[0]))
    about = "Programs to run and to copy; each reads from top to bottom. `--help` lists the options."
    return _table("Recipes", about, ("recipe", "what it does"), rows)


def _command_line() -> str:
    group: Any = get_command(app)
    context = group.make_context("hf-mp", [], resilient_parsing=True)
    commands = (
        get_docs_for_click(obj=group.get_command(context, name), ctx=context, indent=1, name=name, call_prefix="hf-mp")
        for name in group.list_commands(context)
    )
    return "\n".join(["# Command line\n", f"{group.help}\n", *commands])


def _autocast_ops() -> str:
    from hf_mp.casting.tables import TABLES, CastRule

    meaning = {
        CastRule.LOWER_PRECISION: "Lower-precision ops: in FP16 or BF16",
        CastRule.FP32: "FP32 ops: their inputs are cast",
        CastRule.FP32_OUTPUT: "FP32 ops: their result is FP32",
        CastRule.FP32_NORM: "FP32 ops: their result is FP32, except for `norm` without a dtype",
        CastRule.WIDEST: "Widest-type ops: in the widest dtype among the inputs",
        CastRule.BANNED: "Banned ops: an error says what to use instead",
    }
    by_name = {name: {op: rule for rule, op in tables.entries()} for name, tables in TABLES.items()}
    lines = [
        "# Autocast's op lists\n",
        "Which op runs in which dtype under `hf_mp.autocast`, as in torch's AMP documentation.",
        "Unlisted ops run in the dtypes of their inputs. `hf_mp.autocast.explain(model, **batch)` shows what ran in",
        "your model.\n",
    ]
    for name in ("cuda", "cpu"):
        lines.append(f'## tables="{name}"\n')
        for rule, words in meaning.items():
            ops = [f"`{op}`" for op, its_rule in sorted(by_name[name].items()) if its_rule is rule]
            lines += [f"### {words}\n", f"{', '.join(ops)}\n"] if ops else []
    lines += ['## tables="compact"\n', 'As `"cuda"`, but for these:\n', "| op | by list | here |", "|---|---|---|"]
    for op, rule in sorted(by_name["cuda"].items()):
        here = by_name["compact"].get(op)
        if here is not rule:
            lines.append(f"| `{op}` | {rule.value} | {here.value if here else 'in the dtype that it is given'} |")
    return "\n".join([*lines, ""])


def _reference(section: Section) -> str:
    ranks = {name: rank for name, module in _HOME.items() if (rank := section.rank(module)) is not None}
    entries = [_entry(f"hf_mp.{name}") for name in sorted(ranks, key=lambda name: (ranks[name], name.lower()))]
    if section.besides:
        entries += ["## What these take and return\n", *(_entry(path, level=3) for path in section.besides)]
    return "\n".join([f"# {section.title}\n", *entries])


def _entry(path: str, level: int = 2) -> str:
    name = path.rpartition(".")[2]
    options: dict[str, Any] = {"heading_level": level}
    if name in MEMBERS:
        options.update(members=MEMBERS[name] or False, inherited_members=MEMBERS[name])
    lines = (f"      {option}: {json.dumps(value)}" for option, value in options.items())
    return "\n".join([f"::: {path}", "    options:", *lines, ""])
