from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hf_mp
from hf_mp.scaling.scalers import StaticLossScaler
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.weights import region_losses

ROWS, CLASSES = 24, 40
X = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, CLASSES, (ROWS,), generator=torch.Generator().manual_seed(1)).index_fill(
    0, torch.tensor([3, 9]), -100
)


class Classifier(nn.Module):
    """A model that makes its loss as those of Transformers do that call no ``loss_function``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, CLASSES)
        self.settings = settings

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = nn.CrossEntropyLoss(**self.settings)(self.head(x), labels)
        return loss


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes of logits whose loss needed no FP32 copy of them, whatever their number."""
    found: list[torch.dtype] = []

    def recorded(logits: Tensor, *args: Any, **settings: Any) -> Tensor:
        found.append(logits.dtype)
        return original(logits, *args, **settings)

    original = region_losses.cross_entropy
    monkeypatch.setattr(region_losses, "cross_entropy", recorded)
    monkeypatch.setattr(region_losses, "FEW_ELEMENTS", 0)
    return found


def loss_and_gradients(x: Tensor = X, labels: Tensor = LABELS, **settings: Any) -> tuple[Tensor, list[Tensor | None]]:
    model = Classifier(**settings)
    MixedPrecision("bf16", loss_scaler=StaticLossScaler(1.0)).attach(model)
    loss = model(x, labels)
    loss.sum().backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("settings", [{}, {"reduction": "sum"}, {"ignore_index": 7}], ids=str)
def test_value_and_gradients_are_those_of_torch(
    settings: dict[str, Any], calls: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = LABELS.clamp(min=0) if "ignore_index" in settings else LABELS
    loss, gradients = loss_and_gradients(labels=labels, **settings)
    assert calls == [torch.bfloat16]
    monkeypatch.setattr(region_losses, "FEW_ELEMENTS", ROWS * CLASSES + 1)
    expected_loss, expected = loss_and_gradients(labels=labels, **settings)
    assert len(calls) == 1
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    for left, right in zip(gradients, expected, strict=True):
        assert left is not None and right is not None
        assert (left - right).norm() <= 2.0**-8 * right.norm()  # half a unit of BF16


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30, 0.0, 1e-41])
def test_special_values_give_what_torch_gives(
    value: float, calls: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = X.clone()
    x[5] = value
    loss, gradients = loss_and_gradients(x)
    assert len(calls) == 1
    monkeypatch.setattr(region_losses, "FEW_ELEMENTS", ROWS * CLASSES + 1)
    expected_loss, expected = loss_and_gradients(x)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0, equal_nan=True)
    for left, right in zip(gradients, expected, strict=True):
        assert left is not None and right is not None
        torch.testing.assert_close(left, right, rtol=2e-2, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(
    "settings", [{"reduction": "none"}, {"label_smoothing": 0.1}, {"weight": torch.ones(CLASSES)}], ids=str
)
def test_other_settings_are_left_to_torch(settings: dict[str, Any], calls: list[torch.dtype]) -> None:
    loss, _ = loss_and_gradients(**settings)
    assert not calls
    assert loss.dtype is torch.float32


def test_other_labels_and_shapes_are_left_to_torch(calls: list[torch.dtype]) -> None:
    probabilities = torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(2)).softmax(1)
    loss_and_gradients(labels=probabilities)
    loss_and_gradients(X.view(4, 6, 8), torch.randint(0, 6, (4, CLASSES)))
    assert not calls


def test_a_rule_for_the_loss_holds(calls: list[torch.dtype]) -> None:
    model = Classifier()
    MixedPrecision("bf16", rules={F.cross_entropy: "fp32"}).attach(model)
    model(X, LABELS)
    assert not calls


def test_it_can_be_explained(calls: list[torch.dtype]) -> None:
    model = Classifier()
    MixedPrecision("bf16").attach(model)
    ops = {op.op: op for op in hf_mp.autocast.explain(model, X, LABELS).ops}
    assert calls == [torch.bfloat16]
    assert ops["cross_entropy_loss"].outputs == ("float32",)


def test_within_a_checkpoint_it_is_left_to_torch(calls: list[torch.dtype]) -> None:
    class Checkpointed(Classifier):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = checkpoint(super().forward, x, labels, use_reentrant=False)
            return loss

    model = Checkpointed()
    MixedPrecision("bf16").attach(model)
    model(X, LABELS).backward()  # whose saved logits the checkpoint drops
    assert not calls


def test_compiled_it_is_left_to_torch(calls: list[torch.dtype]) -> None:
    model = Classifier()
    MixedPrecision("bf16").attach(model)
    expected = model(X, LABELS).item()
    compiled = torch.compile(model, backend="aot_eager")
    assert compiled(X, LABELS).item() == pytest.approx(expected, rel=1e-5)
    assert len(calls) == 1


def test_logits_that_share_memory_among_themselves_are_left_to_torch(calls: list[torch.dtype]) -> None:
    class Prior(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1, CLASSES)

        def forward(self, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.head(torch.ones(1, 1)).expand(len(labels), CLASSES), labels)

    model = Prior()
    MixedPrecision("bf16").attach(model)
    model(LABELS).backward()
    assert not calls and model.head.bias.grad is not None


def test_transforms_are_left_to_torch(calls: list[torch.dtype]) -> None:
    model = Classifier()
    MixedPrecision("bf16").attach(model)
    gradients = torch.func.grad(lambda weights: torch.func.functional_call(model, weights, (X, LABELS)))(
        dict(model.named_parameters())
    )
    assert not calls
    assert all(gradient.isfinite().all() for gradient in gradients.values())
