"""The precision contract says what the tensors are and what ran, whatever the settings say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import make, token_ids
from torch import nn
from torch.optim import SGD, AdamW
from trainer_runs import quick_arguments, tiny_gpt2, token_rows
from transformers import GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

import hf_mp
from hf_mp import MixedPrecisionArguments, MixedPrecisionCallback, MixedPrecisionTrainer, PrecisionContract
from hf_mp.diagnostics.contract.table import ContractRow

pytestmark = pytest.mark.usefixtures("without_first_check")


def contract_of(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> PrecisionContract:
    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()

    return hf_mp.precision_contract(model, optimizer, run=step)


def rows_of(contract: PrecisionContract, kind: str) -> set[tuple[str, ...]]:
    return {row.dtypes for row in contract.rows if row.kind == kind}


@pytest.mark.parametrize(
    ("precision", "linear", "norms"),
    [
        (None, "bf16 bf16 bf16 - bf16 bf16", "bf16 bf16 bf16 - bf16 bf16"),
        ("bf16", "fp32 bf16 fp32 - fp32 fp32", "fp32 fp32 fp32 - fp32 fp32"),
        ("fp16", "fp32 fp16 fp32 - fp32 fp32", "fp32 fp32 fp32 - fp32 fp32"),
        ("fp16-lean", "fp16+16 fp16 fp16 - fp32 fp32", "fp16+16 fp32 fp16 - fp32 fp32"),
        ("bf16-lean", "bf16+16 bf16 bf16 - fp32 fp32", "bf16+16 fp32 bf16 - fp32 fp32"),
    ],
)
def test_each_layout_shows_what_it_does(gpt2: GPT2LMHeadModel, batch, precision, linear, norms) -> None:
    model: Any = gpt2.to(torch.bfloat16)
    optimizer: Any = AdamW(model.parameters(), lr=1e-3)
    if precision is not None:
        model, optimizer = hf_mp.prepare(model, optimizer, precision)
    contract = contract_of(model, optimizer, batch)
    assert rows_of(contract, "linear") == {tuple(linear.split())}
    assert rows_of(contract, "norms") == {tuple(norms.split())}
    assert contract.lacks_masters == (precision is None)
    assert sum(row.elements for row in contract.rows) == sum(one.numel() for one in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_kind_in_two_lines_has_the_names_of_its_modules(gpt2: GPT2LMHeadModel, batch) -> None:
    model, optimizer = hf_mp.prepare(gpt2, AdamW(gpt2.parameters()), "bf16")
    labels = [cells[0] for cells in contract_of(model, optimizer, batch).cells()]
    assert sorted(labels) == ["embeddings (wpe), norms", "embeddings (wte)", "linear"]  # wte is tied to the head


def test_modules_of_one_name_that_are_treated_in_two_ways_are_told_apart() -> None:
    def row(name: str, computed: str) -> ContractRow:
        return ContractRow("linear", 4, "fp32", computed, "fp32", "-", "fp32", "fp32", (f"{name}.weight",))

    many = [row(f"h.0.{name}", "bf16") for name in ("q", "k", "v", "mlp")]
    contract = PrecisionContract.of([*many, row("h.1.mlp", "fp32")])
    assert [cells[:2] for cells in contract.cells()] == [("linear (q, k, ...)", "16"), ("linear (h.1.mlp)", "4")]


def test_a_bare_master_optimizer_is_seen(gpt2: GPT2LMHeadModel, batch) -> None:
    model = gpt2.to(torch.bfloat16)
    contract = contract_of(model, hf_mp.MasterWeightOptimizer(AdamW(model.parameters())), batch)
    assert rows_of(contract, "linear") == {("bf16+fp32", "bf16", "bf16", "-", "fp32", "bf16")}
    assert not contract.lacks_masters


def test_torch_autocast_is_seen(gpt2: GPT2LMHeadModel, batch) -> None:
    optimizer = SGD(gpt2.parameters(), lr=1e-3)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = gpt2(**batch).loss
        loss.backward()

    contract = hf_mp.precision_contract(gpt2, optimizer, run=run)
    assert rows_of(contract, "linear") == {("fp32", "bf16", "fp32", "-", "-", "fp32")}


def test_planted_differences_show(gpt2: GPT2LMHeadModel, batch) -> None:
    """Each plant contradicts the settings, which say bf16 with FP32 masters."""
    model, optimizer = hf_mp.prepare(gpt2, AdamW(gpt2.parameters()), "bf16")
    block = model.transformer.h[1]
    block.mlp.c_fc.register_forward_hook(lambda module, args, output: output.double())
    block.mlp.c_proj.register_forward_pre_hook(lambda module, args: (args[0].to(torch.bfloat16),))
    hooked = block.attn.c_proj.weight
    contract_of(model, optimizer, batch)  # makes the moments
    optimizer.state[hooked]["exp_avg_sq"] = optimizer.state[hooked]["exp_avg_sq"].to(torch.bfloat16)
    frozen = block.ln_1.weight.requires_grad_(False)
    frozen.data = frozen.data.half()
    model.zero_grad()
    model(**batch).loss.backward()
    contract = hf_mp.precision_contract(model, optimizer, run=lambda: model(**batch).loss.backward())
    linear = rows_of(contract, "linear")
    assert ("fp32", "float64", "fp32", "-", "fp32", "fp32") in linear
    assert ("fp32", "bf16", "fp32", "-", "bf16/fp32", "fp32") in linear
    assert ("fp32", "bf16", "fp32", "-", "fp32", "fp32") in linear
    (row,) = rows_of(contract, "frozen")
    assert (row[0], *row[2:]) == ("fp16", "-", "-", "-", "fp16")


def test_the_replay_of_an_overflow_is_none_of_the_training() -> None:
    net = nn.Sequential(nn.Linear(8, 8))
    model, optimizer = hf_mp.prepare(net, SGD(net.parameters(), lr=1e-3), "fp16")
    explainer = hf_mp.explain_overflows(model)

    def step(value: float) -> None:
        model(torch.full((4, 8), value)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with torch.no_grad():
        net[0].weight.fill_(1.0)
    for _ in range(3):  # until the loss scale has found its level
        step(1.0)
    contract = hf_mp.precision_contract(model, optimizer, run=lambda: step(3e4))
    (report,) = explainer.reports
    assert report.finite_in_fp32  # so it ran in FP32 too
    assert {row.computed for row in contract.rows} == {"fp16"}


def test_what_has_not_run_is_not_claimed(gpt2: GPT2LMHeadModel) -> None:
    (linear,) = rows_of(hf_mp.precision_contract(gpt2), "linear")
    assert linear == ("fp32", "?", "?", "-", "?", "fp32")
    (linear,) = rows_of(hf_mp.precision_contract(gpt2, AdamW(gpt2.parameters())), "linear")
    assert linear[4] == "-"
    with pytest.raises(TypeError, match=r"precision_contract takes a model"):
        hf_mp.precision_contract(AdamW(gpt2.parameters()))  # type: ignore[arg-type]


def test_what_is_compiled_gets_no_hooks(gpt2: GPT2LMHeadModel) -> None:
    gpt2.transformer.h[0].compile(backend="eager")

    def look() -> None:
        assert not any(module._forward_hooks for module in gpt2.modules())

    assert {row.computed for row in hf_mp.precision_contract(gpt2, run=look).rows} == {"?"}


def test_kinds_have_rows_of_their_own() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(tiny_gpt2(torch.bfloat16), config)
    batch = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    contract = contract_of(model, AdamW([one for one in model.parameters() if one.requires_grad]), batch)
    assert {row.kind for row in contract.rows} == {"adapters", "frozen"}
    (adapters,) = rows_of(contract, "adapters")
    assert adapters == ("fp32", "fp32", "fp32", "-", "fp32", "fp32")
    assert {row.saved for row in contract.rows if row.kind == "frozen"} == {"-"}  # PEFT saves adapters alone
    assert not contract.lacks_masters


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(4, 4, 4))
        self.A_log = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.gate[0]) * self.A_log


def test_experts_and_lists_are_told_apart() -> None:
    model = nn.ModuleDict(
        {"experts": Stacked(), "mixer": Stacked(), "embed": nn.Embedding(4, 4), "last": nn.LayerNorm(4)}
    )
    kinds = [row.kind for row in hf_mp.precision_contract(model).rows]
    assert sorted(kinds) == ["embeddings", "experts", "linear", "norms", "other"]


def test_the_table_is_short(gpt2: GPT2LMHeadModel, batch) -> None:
    for number, module in enumerate(m for m in gpt2.modules() if m._parameters):
        module.to([torch.float32, torch.float64][number % 2])
        module.weight.requires_grad_(number % 3 > 0)
    contract = hf_mp.precision_contract(gpt2, AdamW(gpt2.parameters()))
    lines = str(contract).splitlines()
    assert len(lines) <= 8 and max(map(len, lines)) <= 120


# In a Trainer


def train(kind: str, precision: str, path: Path, resume: bool = False, dtype=torch.bfloat16, **settings: Any) -> Any:
    settings = {
        "max_steps": 4 if resume else 2,
        "learning_rate": 1e-5,
        "save_strategy": "steps",
        "save_steps": 2,
    } | settings
    model = tiny_gpt2(dtype)
    if kind == "callback":
        names = ("precision_contract", "loss_scaler_settings")
        own = {name: settings.pop(name) for name in names if name in settings}
        args = quick_arguments(path, **settings)
        callbacks = [MixedPrecisionCallback(precision, **own)]
        trainer: Any = Trainer(model=model, args=args, train_dataset=token_rows(), callbacks=callbacks)
        session_of = callbacks[0]
    else:
        args = quick_arguments(path, MixedPrecisionArguments, precision=precision, **settings)
        trainer = session_of = MixedPrecisionTrainer(model=model, args=args, train_dataset=token_rows())
    trainer.train(resume_from_checkpoint=str(path / "checkpoint-2") if resume else None)
    return trainer, session_of


@pytest.mark.parametrize(("kind", "precision"), [("callback", "bf16"), ("subclass", "bf16"), ("subclass", "bf16-lean")])
def test_it_is_printed_once_at_the_start_and_after_a_resume(kind, precision, tmp_path: Path, capsys) -> None:
    trainer, adapter = train(kind, precision, tmp_path)
    assert not any(module._forward_hooks for module in trainer.model.modules())
    text = capsys.readouterr().out
    assert text.count("precision contract of this run:") == 1
    table = text.partition(f"precision contract of this run: {precision}\n")[2].splitlines()
    stored = {"bf16": "fp32", "bf16-lean": "bf16+16"}[precision]
    assert any(line.split()[0].startswith("linear") and stored in line.split() for line in table)
    assert "no masters" not in text
    contract = adapter.session.contract
    _, resumed = train(kind, precision, tmp_path, resume=True)
    assert capsys.readouterr().out.count("precision contract of this run:") == 1
    assert resumed.session.contract == contract


@pytest.mark.parametrize("kind", ["callback", "subclass", "arguments", "command line"])
def test_a_precision_that_nobody_chose_is_called_the_default(kind: str, tmp_path: Path, capsys: Any) -> None:
    cls = TrainingArguments if kind in ("callback", "subclass") else MixedPrecisionArguments
    args = quick_arguments(tmp_path, cls, max_steps=1)
    if kind == "command line":
        texts = ["--output_dir", str(tmp_path), "--max_steps", "1", "--use_cpu", "true", "--report_to", "none"]
        (args,) = HfArgumentParser(MixedPrecisionArguments).parse_args_into_dataclasses(texts)
    callbacks = [MixedPrecisionCallback()] if kind == "callback" else []
    make = Trainer if kind == "callback" else MixedPrecisionTrainer
    make(model=tiny_gpt2(), args=args, train_dataset=token_rows(), callbacks=callbacks).train()
    headline = "precision contract of this run: fp16, the default on every machine\n"
    printed = capsys.readouterr().out
    assert headline in printed and "advises" not in printed


@pytest.mark.parametrize("kind", ["callback", "subclass"])
def test_a_precision_that_was_chosen_is_not_called_the_default(kind: str, tmp_path: Path, capsys: Any) -> None:
    train(kind, "fp16", tmp_path)
    assert "precision contract of this run: fp16\n" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["callback", "subclass"])
def test_a_stock_run_shows_its_own_and_what_it_loses(kind, tmp_path: Path, capsys) -> None:
    _, adapter = train(kind, "fp32", tmp_path)
    text = capsys.readouterr().out
    assert adapter.session.contract.lacks_masters
    assert "no masters: " in text and "at learning rate 1e-05" in text


@pytest.mark.parametrize("kind", ["callback", "subclass"])
def test_a_skipped_step_shows_no_moments_so_the_next_one_is_shown(kind, tmp_path: Path, capsys) -> None:
    _, adapter = train(kind, "fp16", tmp_path, loss_scaler_settings={"init_scale": 2.0**30})
    assert adapter.session.runtime.stats.skipped_steps == 1
    assert capsys.readouterr().out.count("precision contract of this run:") == 1
    assert {row.moments for row in adapter.session.contract.rows} == {"fp32"}


@pytest.mark.parametrize("kind", ["callback", "subclass"])
def test_one_argument_switches_it_off(kind, tmp_path: Path, capsys) -> None:
    _, adapter = train(kind, "bf16", tmp_path, precision_contract=False)
    assert "precision contract" not in capsys.readouterr().out and adapter.session.contract is None


def test_the_page_has_it(tmp_path: Path) -> None:
    _, adapter = train("subclass", "bf16", tmp_path, precision_report=True)
    page = (tmp_path / "precision_report.html").read_text()
    assert "Precision contract" in page
    for cell in adapter.session.contract.cells()[0]:
        assert f"<td>{cell}</td>" in page


class FailingModel(GPT2LMHeadModel):
    def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
        raise RuntimeError("no forward today")


def test_a_failed_first_step_leaves_no_hook(tmp_path: Path) -> None:
    model = tiny_gpt2()
    model.__class__ = FailingModel
    args = quick_arguments(tmp_path, MixedPrecisionArguments, precision="bf16", max_steps=1)
    trainer = MixedPrecisionTrainer(model=model, args=args, train_dataset=token_rows())
    with pytest.raises(RuntimeError, match="no forward today"):
        trainer.train()
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_experts_compute_in_what_is_multiplied(kind: str) -> None:
    model = make(kind)
    hf_mp.MixedPrecision("bf16").attach(model)
    ids = token_ids()
    contract = hf_mp.precision_contract(model, run=lambda: model(input_ids=ids, labels=ids).loss.backward())
    assert {row.computed for row in contract.rows if row.kind == "experts"} == {"bf16"}
