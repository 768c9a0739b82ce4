"""On a GPU, a lean preset with offload trains bit for bit as the one without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from offloading import BUCKET, OPTIMIZERS, STEPS, WINDOW, Run, differences, make_model, start

from hf_mp.weights import master_weight_optimizer
from hf_mp.weights.offload import transfers

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sums of an embedding's gradient in one order, and small windows, which the model fills many times."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(transfers, "WINDOW_BYTES", WINDOW)
    monkeypatch.setattr(master_weight_optimizer, "_BUCKET_ELEMENTS", BUCKET)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def train(name: str, precision: str, offload: str | None) -> Run:
    return start(OPTIMIZERS[name], precision, offload, make_model().to("cuda")).train()


@pytest.mark.parametrize("precision", ["bf16-lean", "fp16-lean"])
@pytest.mark.parametrize("name", ["fused AdamW", "AdamW", "SGD with momentum"])
def test_a_trained_model_is_that_of_the_preset_without_offload(name: str, precision: str) -> None:
    expected = train(name, precision, None)
    for offload in ("optimizer", "all"):
        run = train(name, precision, offload)
        assert differences(run, expected) == []
        assert run.skipped == [step.overflows for step in STEPS]
