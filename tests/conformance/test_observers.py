"""What watches a training changes no bit of it: by preset and setting, through the subclass and the callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import CLOCK, arguments, history, make_trainer, poisoned, same, tiny_gpt2, token_rows, weights
from transformers import Trainer

from hf_mp import MixedPrecisionArguments

WATCHING: dict[str, Any] = {
    "check_gradients": True,
    "explain_overflows": True,
    "histogram_steps": 1,
    "precision_contract": True,
    "precision_report": True,
}
NOT_WATCHING = {name: type(value)(0) for name, value in WATCHING.items()}
NOTED = ("underflowed_share", "swamped_share")  # how the names begin of what a watched run alone logs
TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": "bf16"},
    "dynamic, loaded in fp16": {"precision": "params=fp32,compute=fp16,loss_scale=dynamic", "dtype": torch.float16},
    "accumulation": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    "checkpoints": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "poisoned": {"poisoned_steps": (0, 2)},
    "lean": {"precision": "fp16-lean"},
    "in backward": {"precision": "fp16-lean", "free_gradients": "backward"},
}


def train(
    path: Path, contender: str, precision: str = "fp16", dtype: torch.dtype = torch.float32,
    poisoned_steps: tuple[int, ...] = (), **settings: Any,
) -> tuple[list[torch.Tensor], torch.Tensor, list[str], set[str]]:  # fmt: skip
    """With dropout, so that random numbers count: weights, state of the generator, the log, and what is noted in it."""
    model = tiny_gpt2(dtype, resid_pdrop=0.1, attn_pdrop=0.1)
    args = arguments(path, MixedPrecisionArguments, precision=precision, **settings)
    base = poisoned(Trainer, poisoned_steps)
    trainer = make_trainer(contender, precision, model, args, base, train_dataset=token_rows())
    trainer.train()
    assert "backward" not in vars(trainer.accelerator)  # where the gradients were compared
    noted = {name for entry in trainer.state.log_history for name in entry if name.startswith(NOTED)}
    return weights(trainer.model), torch.get_rng_state(), history(trainer, CLOCK | noted), noted


@pytest.mark.parametrize("name", TRAININGS)
def test_trainings_with_and_without_observers_are_the_same(tmp_path: Path, name: str) -> None:
    settings = TRAININGS[name]
    contenders = ("subclass",) if "lean" in settings.get("precision", "") else ("subclass", "callback")
    end, generator, log, noted = train(tmp_path / "unwatched", "subclass", **settings, **NOT_WATCHING)
    assert not same(end, weights(tiny_gpt2())), "the run does not train"
    assert noted == set()
    for contender in contenders:
        *watched, noted = train(tmp_path / contender, contender, **settings, **WATCHING)
        assert same(watched[0], end) and torch.equal(watched[1], generator) and watched[2] == log
        assert "swamped_share" in noted
