"""What a model card says about the precision that the model was trained in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import Trainer

from hf_mp._version import __version__
from hf_mp.policy import spell
from hf_mp.scaling.rules import scale_text
from hf_mp.trainer.calling_trainer import extend_method
from hf_mp.trainer.session import OfSession, TrainerSession

TITLE = "### Mixed precision"
CARD_NAME = "README.md"
SHOWN_PLACES = 10
_SECTION = re.compile(rf"{TITLE}\n.*?(?=^#{{1,3}} |\Z)", re.MULTILINE | re.DOTALL)


def add_to_card(trainer: Trainer, session: TrainerSession) -> None:
    """Write how ``trainer`` trained into the model card in its output directory; again, in the place of what was there.

    The metadata, and so the ``model-index``, stays as it is. Nothing happens without a card. A run in FP32
    has its contract there, and what was rounded when it was saved.
    """
    card = Path(str(trainer.args.output_dir), CARD_NAME)
    says = session.runtime or session.contract or session.saved_dtypes
    if not says or not trainer.is_world_process_zero() or not card.is_file():
        return
    section = f"{TITLE}\n\n" + "".join(f"- {line}\n" for line in _lines(session, card.parent)) + "\n"
    if session.contract is not None:
        section += f"{session.contract.to_markdown()}\n"
    text, replaced = _SECTION.subn(lambda _: section, card.read_text(encoding="utf-8"), count=1)
    if not replaced:
        before, heading, after = text.partition("### Framework versions")
        text = (before if heading else f"{before.rstrip()}\n\n") + section + heading + after
    card.write_text(text, encoding="utf-8")


def extend_card(trainer: Trainer, adapter: OfSession) -> None:
    """Have the cards that ``trainer`` creates from now on carry that section, for the session of ``adapter``."""

    def create_model_card(own: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        own(*args, **kwargs)
        if adapter.session is not None:
            add_to_card(trainer, adapter.session)

    extend_method(trainer, "create_model_card", create_model_card)


def _lines(session: TrainerSession, directory: Path) -> Iterator[str]:
    if session.saved_dtypes:
        said = ", ".join(sorted({spell(dtype) for dtype in session.saved_dtypes.values()}))
        yield f"saved weights: {said}, rounded to nearest (`save_dtype={session.settings.save_dtype!r}`)"
    if session.runtime is None:
        return
    policy, scaler, stats = session.settings.policy, session.runtime.scaler, session.runtime.stats
    yield f"precision: `{policy}`, by hf_mp {__version__} (the Trainer's own `fp16` and `bf16` are off)"
    if scaler.is_scaling:
        yield (
            f"loss scaling: {scaler.kind}, at {scale_text(stats.loss_scale_first)} first, from "
            f"{scale_text(stats.loss_scale_min)} to {scale_text(stats.loss_scale_max)}, and "
            f"{scale_text(stats.loss_scale)} at the end"
        )
    else:
        yield "loss scaling: none"
    yield f"skipped steps: {stats.skipped_steps:,} of {stats.steps:,}, for gradients that were inf or NaN"
    causes = list(dict.fromkeys(report.headline for report in session.overflow_reports))
    for cause in causes[:SHOWN_PLACES]:
        yield f"cause of a skipped step: {cause}"
    if stats.remedies:
        yield 'kept in FP16\'s range by `on_overflow="heal"`: ' + ", ".join(f"`{remedy}`" for remedy in stats.remedies)
    if rules := session.settings.rules:
        yield "own rules: " + ", ".join(f"`{getattr(key, '__name__', key)}` in {rule}" for key, rule in rules.items())
    from hf_mp.diagnostics.report import PAGE_NAME  # with all that draws a page

    if (directory / PAGE_NAME).is_file():
        yield f"[precision report]({PAGE_NAME}) of the run"
