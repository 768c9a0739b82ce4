from typing import Any

import pytest
import torch
from tiny import saved_tensors
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.activations import AccurateGELUActivation, FastGELUActivation, NewGELUActivation, QuickGELUActivation

from hf_mp.models.activations import GELUS, TANH_GELUS, TanhGELU
from hf_mp.scaling.scalers import StaticLossScaler
from hf_mp.step.mixed_precision import MixedPrecision

KINDS = [NewGELUActivation, FastGELUActivation, AccurateGELUActivation]


def test_every_name_is_tested() -> None:
    assert {kind.__name__ for kind in KINDS} == set(GELUS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_computes_what_the_module_writes_out(kind: Any) -> None:
    # In FP64 the two are one function; the constants of FastGELUActivation have 10 digits.
    values = torch.cat([torch.linspace(-12, 12, 2001), torch.tensor([0.0, -0.0])]).double()
    torch.testing.assert_close(TanhGELU(kind())(values), kind()(values), rtol=0, atol=1e-8)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


IDS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))


def logits_and_gradients(model: nn.Module) -> Tensor:
    outputs = model(input_ids=IDS, labels=IDS)
    outputs.loss.backward()
    return torch.cat([outputs.logits.detach().flatten(), *[p.grad.flatten() for p in model.parameters()]])


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_compact_tables_are_as_accurate_as_torchs(precision: str) -> None:
    exact = logits_and_gradients(gpt2().double())
    errors = {}
    for tables in ("compact", "cuda"):
        model = gpt2()
        MixedPrecision(precision, loss_scaler=StaticLossScaler(2.0**10), tables=tables).attach(model)  # type: ignore[arg-type]
        errors[tables] = (logits_and_gradients(model).double() - exact).norm()
    assert errors["compact"] <= 1.05 * errors["cuda"]


def test_they_keep_less_for_backward() -> None:
    def kept_bytes(tables: Any) -> int:
        model = gpt2()
        MixedPrecision("fp16", tables=tables).attach(model)
        with saved_tensors() as kept:
            model(input_ids=IDS, labels=IDS)
        storages = [tensor.untyped_storage() for tensor in kept]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    intermediate = 2 * 16 * 4 * 32 * 4  # bytes of one FP32 tensor of the MLP's width
    assert kept_bytes("cuda") - kept_bytes("compact") == 2 * 3 * intermediate  # in 2 layers


class TestInstalling:
    def test_only_known_modules_and_only_where_nobody_was(self) -> None:
        model = nn.ModuleList([NewGELUActivation(), QuickGELUActivation(), nn.GELU(), NewGELUActivation()])

        def own(input: Tensor) -> Tensor:
            return input

        model[3].forward = own
        TANH_GELUS.install(model)
        assert [isinstance(module.__dict__.get("forward"), TanhGELU) for module in model] == [
            True,
            False,
            False,
            False,
        ]
        TANH_GELUS.remove(model)
        assert "forward" not in model[0].__dict__
        assert model[3].forward is own
