"""docs/limits.md and SECURITY.md: each line names tests that are there; and what no test of its own subject shows."""

from __future__ import annotations

import copy
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from trainer_runs import arguments, make_trainer, tiny_gpt2, token_rows
from transformers import TrainerCallback

import hf_mp
from hf_mp.trainer.checkpoints.inspection import find_problems

TESTS = Path(__file__).resolve().parent
PAGES = [("docs/limits.md", 60), ("SECURITY.md", 5)]
TEST = r"`([\w/]+\.py)::(?:(\w+)::)?(test_\w+)(?:\[[^`]+\])?`"


@pytest.mark.parametrize(("page", "least"), PAGES)
def test_each_line_names_a_test(page: str, least: int) -> None:
    text = (TESTS.parent / page).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.endswith("| shown by |")]
    assert len(lines) > least
    assert [line for line in lines if not re.search(rf"\| {TEST}(?:, {TEST})* \|$", line)] == []


@pytest.mark.parametrize("page", dict(PAGES))
def test_each_test_that_is_named_is_there(page: str) -> None:
    for file, group, test in re.findall(TEST, (TESTS.parent / page).read_text(encoding="utf-8")):
        before = rf"^class {group}\b.*^    " if group else "^"
        text = (TESTS / file).read_text(encoding="utf-8")
        assert re.search(rf"{before}def {test}\(", text, re.MULTILINE | re.DOTALL), (file, group, test)


# Limits of several parts together


@pytest.mark.parametrize("precision", ["bf16", "bf16-lean"])
def test_a_part_of_a_model_that_is_called_by_itself_computes_in_fp32(precision: str) -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    reference = copy.deepcopy(model)
    model, _ = hf_mp.prepare(model, torch.optim.SGD(model.parameters()), precision)
    x = torch.randn(4, 8)
    for each in (model, reference):
        each[0](x).square().sum().backward()
    assert torch.equal(model[0](x), reference[0](x))
    assert torch.equal(model[0].weight.grad, reference[0].weight.grad)
    with hf_mp.autocast(torch.bfloat16):
        assert model[0](x).dtype is torch.bfloat16


def test_torch_script_has_the_casts_of_one_dtype() -> None:
    def product(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).relu()

    scripted, x, weight = torch.jit.script(product), torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    for _ in range(3):
        with hf_mp.autocast(torch.bfloat16):
            scripted(x, weight).float().sum().backward()
    with pytest.raises(RuntimeError, match="BFloat16 != c10::Half"), hf_mp.autocast(torch.float16):
        scripted(x, weight).float().sum().backward()


def test_the_graph_of_an_attached_model_is_not_the_full_one() -> None:
    torch._dynamo.reset()
    model, _ = hf_mp.prepare(layer := nn.Linear(8, 8), torch.optim.SGD(layer.parameters()), "bf16")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="leave fullgraph=True out"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(4, 8))
    assert torch.compile(model, backend="eager")(torch.randn(4, 8)).requires_grad


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.layer(x)).abs().sum()


def test_an_op_without_a_kernel_of_16_bits_needs_a_rule() -> None:
    def loss(**settings: Any) -> Tensor:
        model = Spectrum()
        model, _ = hf_mp.prepare(model, torch.optim.SGD(model.parameters()), "bf16", **settings)
        return model(torch.eye(8) + 1)

    with pytest.raises(RuntimeError, match="Unsupported dtype"):
        loss()
    assert loss(rules={torch.fft.rfft: "fp32"}).isfinite()
    assert loss(tables="cpu").isfinite()


def test_transforms_of_functorch_have_autocast_and_no_loss_scale() -> None:
    model, _ = hf_mp.prepare(layer := nn.Linear(8, 8), torch.optim.SGD(layer.parameters()), "fp16")
    x = torch.randn(4, 8)

    def loss(weights: dict[str, Tensor], row: Tensor, factor: float) -> Tensor:
        return torch.func.functional_call(model, weights, (row,)).square().sum() * factor

    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    per_row = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, None))
    found, lost = (per_row(weights, x, factor)["weight"] for factor in (1.0, 1e-9))
    outputs = x @ weights["weight"].t() + weights["bias"]
    expected = 2 * outputs[:, :, None] * x[:, None, :]
    assert not torch.equal(found, expected)  # FP16 products
    assert torch.allclose(found, expected, rtol=1e-2, atol=1e-2)
    assert not lost.any()


def test_an_attached_model_is_exported_after_detach() -> None:
    model, _ = hf_mp.prepare(layer := nn.Linear(2, 2), torch.optim.SGD(layer.parameters()), "fp16")
    with pytest.raises(
        AttributeError,
        match=r"torch\.export cannot see through a model",
    ):
        torch.export.export(model, (torch.ones(1, 2),))


def test_weight_norm_on_an_attached_model_is_refused_by_torch() -> None:
    model, _ = hf_mp.prepare(layer := nn.Linear(2, 2), torch.optim.SGD(layer.parameters()), "fp16")
    model(torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="Creating a Parameter from an instance"):
        weight_norm(model)


def test_an_output_has_no_gradient_of_another_output() -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            hidden = super().forward(x)
            return hidden.square().sum(), hidden

    model, _ = hf_mp.prepare(layer := Twice(2, 2), torch.optim.SGD(layer.parameters()), "fp16")
    loss, hidden = model(torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss, hidden)


def test_a_weight_beyond_fp16_has_an_infinite_working_copy() -> None:
    model, optimizer = hf_mp.prepare(layer := nn.Linear(2, 2), torch.optim.SGD(layer.parameters()), "fp16")
    with torch.no_grad():
        model.weight[0, 0] = 1e5
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
    assert model(torch.ones(1, 2)).isinf().any() and optimizer.step_was_skipped


class Handlers(TrainerCallback):
    """Notes the handler of SIGTERM while training runs."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen = signal.getsignal(signal.SIGTERM)


@pytest.mark.parametrize(("contender", "is_ours"), [("callback", False), ("subclass", True)])
def test_the_callback_installs_no_handler_for_signals(tmp_path: Path, contender: str, is_ours: bool) -> None:
    handlers = Handlers()
    args = arguments(tmp_path, max_steps=1)
    make_trainer(contender, "fp16", tiny_gpt2(), args, train_dataset=token_rows(), callbacks=[handlers]).train()
    assert (handlers.seen is not signal.SIG_DFL) == is_ours


def test_a_run_with_the_callback_is_saved_on_sigterm_by_transformers_when_asked(tmp_path: Path) -> None:
    class Request(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            (jit,) = (each for each in trainer.callback_handler.callbacks if hasattr(each, "jit_manager"))
            jit.jit_manager.is_checkpoint_requested = state.global_step == 1

    before = signal.getsignal(signal.SIGTERM)
    try:
        args = arguments(tmp_path, max_steps=3, save_strategy="no", enable_jit_checkpoint=True)
        trainer = make_trainer("callback", "fp16", tiny_gpt2(), args, train_dataset=token_rows(), callbacks=[Request()])
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    assert find_problems(checkpoint) == []


@pytest.mark.parametrize("step_is_own", [False, True])
def test_a_write_through_data_is_not_seen_where_the_trainer_clips(tmp_path: Path, step_is_own: bool) -> None:
    class Own(hf_mp.MixedPrecisionTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().training_step(*args, **kwargs)

    kind = Own if step_is_own else hf_mp.MixedPrecisionTrainer
    args = arguments(tmp_path, max_steps=1)
    trainer = kind(model=tiny_gpt2(), args=args, precision="fp16", train_dataset=token_rows())
    backward = trainer.accelerator.backward

    def spoiled_backward(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        trainer.model.transformer.ln_f.weight.grad.data.fill_(torch.nan)

    trainer.accelerator.backward = spoiled_backward
    trainer.train()
    assert trainer.model.transformer.ln_f.weight.isfinite().all() == step_is_own


def test_a_flipped_bit_in_weights_without_a_manifest_is_not_seen(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(64)}, tmp_path / "model.safetensors")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 1}')
    before = find_problems(tmp_path)
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[-9] ^= 1
    (tmp_path / "model.safetensors").write_bytes(content)
    assert find_problems(tmp_path) == before == []


def test_what_is_written_into_the_state_dict_of_a_lean_model_is_lost() -> None:
    model, _ = hf_mp.prepare(layer := nn.Linear(8, 8), torch.optim.SGD(layer.parameters()), "bf16-lean")
    value = model.state_dict()["weight"].clone()
    model.state_dict()["weight"].zero_()
    assert torch.equal(model.state_dict()["weight"], value)


def test_torch_has_no_forward_mode_of_unscale_nodes() -> None:
    model, _ = hf_mp.prepare(layer := nn.Linear(8, 8), torch.optim.SGD(layer.parameters()), "bf16")
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        model(torch.autograd.forward_ad.make_dual(torch.ones(4, 8), torch.ones(4, 8)))


def test_torch_sums_no_sparse_gradients_in_fp16_on_a_cpu() -> None:
    model: Any = nn.Embedding(8, 4, sparse=True)
    model.forward = lambda ids: nn.Embedding.forward(model, ids) + nn.Embedding.forward(model, ids)
    model, _ = hf_mp.prepare(model, torch.optim.SGD(model.parameters()), "fp16-lean")
    with pytest.raises(NotImplementedError, match="cadd_sparse"):
        model(torch.arange(4)).sum().backward()


@pytest.mark.parametrize("clips", ["loop", "max_grad_norm"])
def test_gradients_that_are_clipped_to_zero_are_no_overflow(clips: str) -> None:
    model = nn.Linear(8, 1)
    settings = {"max_grad_norm": 1.0} if clips == "max_grad_norm" else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hf_mp.prepare(model, optimizer, "bf16", **settings)
    before = copy.deepcopy(list(model.parameters()))
    (model(torch.ones(4, 8)).sum() * 1e29).backward()
    if clips == "loop":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert not optimizer.step_was_skipped  # type: ignore[attr-defined]
    assert all(map(torch.equal, model.parameters(), before))
