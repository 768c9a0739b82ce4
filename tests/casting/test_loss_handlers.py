from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import Using, assert_true, attached, gradients_of, linear
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hf_mp
from hf_mp.casting import loss_handlers

ROWS, CLASSES = 24, 40
X = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, CLASSES, (ROWS,), generator=torch.Generator().manual_seed(1)).index_fill(
    0, torch.tensor([3, 9]), -100
)


def classifier(use: Callable[..., Tensor] | None = None, rules: Any = None, **settings: Any) -> Any:
    """Attached; makes its loss as those of Transformers do that call no ``loss_function``."""
    use = use or (lambda m, x, labels: nn.CrossEntropyLoss(**settings)(m.head(x), labels))
    model = Using(use, head=linear(8, CLASSES))
    attached(model, "bf16", 1.0, rules=rules)
    return model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes of logits whose loss needed no FP32 copy of them, whatever their number."""
    found: list[torch.dtype] = []

    def recorded(logits: Tensor, *args: Any, **settings: Any) -> Tensor:
        found.append(logits.dtype)
        return original(logits, *args, **settings)

    original = loss_handlers.cross_entropy
    monkeypatch.setattr(loss_handlers, "cross_entropy", recorded)
    monkeypatch.setattr(loss_handlers, "FEW_ELEMENTS", 0)
    return found


def loss_and_gradients(x: Tensor = X, labels: Tensor = LABELS, **settings: Any) -> tuple[Tensor, list[Tensor | None]]:
    model, losses = classifier(**settings), list[Tensor]()
    gradients = gradients_of(model, lambda: losses.append(model(x, labels)) or losses[0].sum())  # type: ignore[func-returns-value]
    return losses[0].detach(), gradients


@pytest.mark.parametrize("settings", [{}, {"reduction": "sum"}, {"ignore_index": 7}], ids=str)
def test_value_and_gradients_are_those_of_torch(
    settings: dict[str, Any], calls: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = LABELS.clamp(min=0) if "ignore_index" in settings else LABELS
    loss, gradients = loss_and_gradients(labels=labels, **settings)
    assert calls == [torch.bfloat16]
    monkeypatch.setattr(loss_handlers, "FEW_ELEMENTS", ROWS * CLASSES + 1)
    expected_loss, expected = loss_and_gradients(labels=labels, **settings)
    assert len(calls) == 1
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    assert_true(gradients, expected, 2.0**-8, 0.0)  # half a unit of BF16


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30, 0.0, 1e-41])
def test_special_values_give_what_torch_gives(
    value: float, calls: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = X.clone()
    x[5] = value
    loss, gradients = loss_and_gradients(x)
    assert len(calls) == 1
    monkeypatch.setattr(loss_handlers, "FEW_ELEMENTS", ROWS * CLASSES + 1)
    expected_loss, expected = loss_and_gradients(x)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(gradients, expected, rtol=2e-2, atol=1e-4, equal_nan=True)


PROBABILITIES = torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(2)).softmax(1)
LEFT: dict[str, dict[str, Any]] = {
    "not reduced": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "weighted": {"weight": torch.ones(CLASSES)},
    "labels that are probabilities": {"labels": PROBABILITIES},
    "images": {"x": X.view(4, 6, 8), "labels": torch.randint(0, 6, (4, CLASSES))},
    "a rule": {"rules": {F.cross_entropy: "fp32"}},
    "a checkpoint, which drops the saved logits": {
        "use": lambda m, x, y: checkpoint(lambda x: F.cross_entropy(m.head(x), y), x, use_reentrant=False)
    },
    "logits that share memory": {
        "use": lambda m, x, y: F.cross_entropy(m.head(torch.ones(1, 8)).expand(ROWS, CLASSES), y)
    },
}


@pytest.mark.parametrize("name", LEFT)
def test_other_calls_are_left_to_torch(name: str, calls: list[torch.dtype]) -> None:
    loss, gradients = loss_and_gradients(**LEFT[name])
    assert not calls and loss.dtype is torch.float32
    assert all(gradient is not None for gradient in gradients)


def test_it_can_be_explained(calls: list[torch.dtype]) -> None:
    ops = {op.op: op for op in hf_mp.autocast.explain(classifier(), X, LABELS).ops}
    assert calls == [torch.bfloat16]
    assert ops["cross_entropy_loss"].outputs == ("float32",)


def test_compiled_it_is_left_to_torch(calls: list[torch.dtype]) -> None:
    model = classifier()
    expected = model(X, LABELS).item()
    assert torch.compile(model, backend="aot_eager")(X, LABELS).item() == pytest.approx(expected, rel=1e-5)
    assert len(calls) == 1


def test_transforms_are_left_to_torch(calls: list[torch.dtype]) -> None:
    model = classifier()
    gradients = torch.func.grad(lambda weights: torch.func.functional_call(model, weights, (X, LABELS)))(
        dict(model.named_parameters())
    )
    assert not calls
    assert all(gradient.isfinite().all() for gradient in gradients.values())
