from dataclasses import replace

import pytest
import torch

import heal_overflows as recipe


def test_healing_trains_as_fp32_does_and_scaling_alone_skips() -> None:
    case = recipe.CASES[0]
    fp32, skipping, healing = (
        recipe.train(case, 4, *how) for how in [("fp32", ""), ("fp16", "skip"), ("fp16", "heal")]
    )
    assert (fp32.skipped, skipping.skipped, healing.skipped) == (0, 4, 0)
    assert healing.losses[1:] == pytest.approx(fp32.losses[1:], rel=5e-3)
    assert "'linear' in module 'blocks.3.up' reached" in healing.healed[0]


def test_the_other_model_gets_there_while_it_trains() -> None:
    run = recipe.train(replace(recipe.CASES[1], growth=2.0), 4, "fp16", "heal")
    assert run.skipped == 0 and not run.healed[0].startswith("step 1:")
    assert torch.tensor(run.losses[0]).isfinite()
