"""``hf-mp check``: what was planted is found, and nothing in what is clean."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_checkpoints import CLEAN, PLANTED, deepspeed, model_folder
from safetensors.torch import load_file, save_file
from tiny import take_step
from torch.optim import AdamW
from transformers import GPT2LMHeadModel
from typer.testing import CliRunner

import hf_mp
from hf_mp.cli import app
from hf_mp.diagnostics.contract.check import check_folder
from hf_mp.diagnostics.contract.folders import _unchanged_share, read_folder


@pytest.mark.parametrize("name", PLANTED)
def test_what_was_planted_is_found(name: str, tmp_path: Path) -> None:
    make, kinds = PLANTED[name]
    assert {risk.kind for risk in check_folder(make(tmp_path)).risks} == kinds


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_found_in_what_is_clean(name: str, tmp_path: Path) -> None:
    check = check_folder(CLEAN[name](tmp_path))
    assert check.risks == () and check.assumed_learning_rate is None
    assert str(check).endswith("\nno risk was found")
    assert sum(check.held["weights"].values()) > 1000


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", *arguments])
    return result.exit_code, result.output


def test_the_command_names_the_risk_its_share_and_the_way_out(tmp_path: Path) -> None:
    checkpoint = PLANTED["stock: a model in bf16"][0](tmp_path)
    code, text = run(str(checkpoint))
    lines = text.splitlines()
    assert code == 1 and lines[0] == f"{checkpoint} holds"
    assert lines[1].startswith("  weights: ") and lines[1].endswith(" bf16")
    assert "of their updates at learning rate 1e-05 are less than half a unit in the last place" in text
    assert "way out: give them masters: MixedPrecisionCallback('bf16')" in text
    assert re.search(
        r"a decay of 0.001 is less than half .*: \d+% of them stay where their largest gradient took", text
    )
    code, text = run(str(checkpoint.parent), "--json", "--learning-rate", "1.0")  # the run, and updates that count
    found = json.loads(text)
    assert code == 1 and found["path"] == str(checkpoint)
    assert [risk["kind"] for risk in found["risks"]] == ["stuck second moments"]
    code, text = run(str(checkpoint), "--keeps-bits")
    assert code == 1 and "no masters" not in text


def test_a_model_is_a_risk_at_a_learning_rate_or_the_one_of_fine_tuning(tmp_path: Path) -> None:
    model = model_folder(tmp_path, "bf16")
    code, text = run(str(model))
    assert code == 1 and text.startswith(
        f"{model} holds\n  weights: 20,672 bf16\n  3 of 3 norm weights are exactly 1: "
    )
    assumed = ", assumed for fine-tuning (--learning-rate sets another),"
    assert f"of their updates at learning rate 1e-05{assumed} are less than half a unit" in text
    check = check_folder(model)
    assert check.assumed_learning_rate == 1e-5 and str(check_folder(model, keeps_bits=True)).endswith(
        "no risk was found"
    )
    code, given = run(str(model), "--learning-rate", "1e-5")
    assert code == 1 and given == text.replace(assumed, "") and given.count("way out") == 1
    assert json.loads(run(str(model), "--json")[1])["assumed_learning_rate"] == 1e-5
    assert run(str(model), "--learning-rate", "1")[0] == 0


def test_weights_that_take_the_updates_of_fine_tuning_are_no_risk(tmp_path: Path) -> None:
    save_file({"linear.weight": torch.full((64, 64), 1e-6, dtype=torch.float16)}, tmp_path / "model.safetensors")
    says = "no risk was found at learning rate 1e-05, assumed for fine-tuning (--learning-rate sets another)"
    assert str(check_folder(tmp_path)).endswith(says)


@pytest.mark.parametrize("rate", ["-1", "0", "nan", "inf"])
def test_a_learning_rate_is_positive_and_finite(rate: str, tmp_path: Path) -> None:
    says = f"a learning rate must be positive and finite, such as 1e-5, not {float(rate)}"
    with pytest.raises(ValueError, match=re.escape(says)):
        check_folder(tmp_path, float(rate))
    assert run(str(tmp_path), "--learning-rate", rate) == (2, f"hf-mp check: error: {says}\n")


def test_of_a_run_the_newest_checkpoint_is_read(tmp_path: Path) -> None:
    run_folder = CLEAN["a model in fp32"](tmp_path / "run")
    for step, dtype in ((2, torch.float32), (10, torch.bfloat16)):
        weights = {name: one.to(dtype) for name, one in load_file(run_folder / "model.safetensors").items()}
        folder = run_folder / f"checkpoint-{step}"
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
    check = check_folder(run_folder, 1e-5)
    assert check.path == str(run_folder / "checkpoint-10") and check.held == {"weights": {"bf16": 20_672}}
    assert [risk.kind for risk in check.risks] == ["no masters"]


def test_of_a_model_in_two_formats_the_safetensors_are_read(tmp_path: Path) -> None:
    model = model_folder(tmp_path, "bf16")
    alone = check_folder(model, 1e-5)
    weights = {name: one.float() for name, one in load_file(next(model.glob("*.safetensors"))).items()}
    torch.save(weights, model / "pytorch_model.bin")
    assert check_folder(model, 1e-5) == alone
    next(model.glob("*.safetensors")).unlink()
    assert check_folder(model).held == {"weights": {"fp32": 20_672}}


def test_weights_that_transformers_saves_beside_deepspeeds_are_counted_once(tmp_path: Path) -> None:
    deepspeed(tmp_path)
    states = torch.load(next(tmp_path.rglob("*model_states.pt")), weights_only=True)["module"]
    save_file(
        {name: one.clone() for name, one in states.items() if name != "lm_head.weight"}, tmp_path / "model.safetensors"
    )
    check = check_folder(tmp_path, 1e-5)
    assert check.held["weights"] == {"bf16": 20_672} and not check.risks


def trained_from(base: Path, path: Path, precision: str | None) -> Path:
    """Twenty steps at a learning rate of 1e-3 from ``base`` on, all in BF16 or with masters; saved in BF16."""
    dtype = torch.bfloat16 if precision is None else torch.float32
    model: Any = GPT2LMHeadModel.from_pretrained(base, dtype=dtype).train()
    optimizer: Any = AdamW(model.parameters(), lr=1e-3)
    if precision is not None:
        model, optimizer = hf_mp.prepare(model, optimizer, precision)
    ids = torch.arange(32).reshape(2, 16)
    for _ in range(20):
        take_step(model(input_ids=ids, labels=ids).loss, optimizer)
    hf_mp.detach(model)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_norms_that_never_moved_are_lost_updates(kind: str, tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base", kind)
    narrow, with_masters = (trained_from(base, tmp_path / str(precision), precision) for precision in (None, "bf16"))
    check = check_folder(narrow, base=base)
    assert [risk.kind for risk in check.risks] == ["lost updates"]
    assert check.unchanged["ln_1.weight"] == check.unchanged["ln_f.weight"] == 1.0
    assert check.unchanged["c_attn.weight"] < 0.5 and next(iter(check.unchanged.values())) == 1.0
    code, text = run(str(narrow), "--base", str(base))
    assert code == 1
    assert re.search(r"bit for bit as in the base, by samples:\n(.*\n)* +100\.00% of ln_1\.weight\n", text)
    assert re.search(
        r"lost updates: all 3 norm weights, in bf16, .* [5-9]\d\.\d\d% of all weights are not: unless", text
    )
    found = json.loads(run(str(narrow), "--base", str(base), "--json")[1])
    assert found["unchanged"] == check.unchanged and (found["norms"], found["norms_at_one"]) == (3, 3)
    check = check_folder(with_masters, base=base)
    assert check.risks == () and check.unchanged["ln_1.weight"] < 0.5 and check.norms_at_one == 0


def test_an_untrained_model_has_lost_nothing(tmp_path: Path) -> None:
    base = model_folder(tmp_path, "bf16")
    text = run(str(base))[1]
    assert (
        "\n  3 of 3 norm weights are exactly 1: they were not trained, or rounding dropped their updates (--base "
        in text
    )
    check = check_folder(base, base=base)
    assert check.risks == () and set(check.unchanged.values()) == {1.0}
    assert "--base" not in str(check)


def test_masters_next_to_the_weights_keep_what_rounding_drops(tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base", "bf16")
    narrow = trained_from(base, tmp_path / "trained", None)
    assert check_folder(narrow, keeps_bits=True, base=base).risks == ()


def test_a_base_that_has_none_of_the_weights_is_refused(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", "bf16")
    other = tmp_path / "other"
    other.mkdir()
    save_file({"weight": torch.ones(3)}, other / "model.safetensors")
    says = f"no weight of {model} has the name and the size of one in {other}: pass the model that"
    with pytest.raises(ValueError, match=re.escape(says)):
        check_folder(model, base=other)
    assert run(str(model), "--base", str(tmp_path / "nowhere"))[0] == 2
    # Shards of ranks, cut at other places, say nothing of each other.
    parts = read_folder(model).parts["transformer.wte.weight"]
    values = torch.ones(1)
    assert _unchanged_share(values, parts * 2, parts * 2) is None is _unchanged_share(values, parts, parts * 2)


def several_runs(path: Path) -> Path:
    for name in ("two/checkpoint-2", "one/checkpoint-4", "one/checkpoint-2"):
        CLEAN["a model in fp32"](path / name)
    return path


def a_list_for_a_trainer_state(path: Path) -> Path:
    model_folder(path, "bf16")
    (path / "trainer_state.json").write_text("[]")
    return path


def a_list_of_tensors(path: Path) -> Path:
    torch.save([torch.ones(2)], path / "model.pt")
    return path


def a_whole_module(path: Path) -> Path:
    torch.save(torch.nn.Linear(2, 2), path / "model.pt")
    return path


def a_file(path: Path) -> Path:
    (path / "model.safetensors").touch()
    return path / "model.safetensors"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Path, "holds no weights: name the folder of a model, of a checkpoint, or of a run that has checkpoints$"),
        (several_runs, r"holds runs, not checkpoints: name one of them \(one, two\)$"),
        (a_list_for_a_trainer_state, "trainer_state.json cannot be read: it holds a list, not an object$"),
        (a_list_of_tensors, "model.pt cannot be read: it holds no dictionary of tensors: save model.state_dict"),
        (a_whole_module, "model.pt cannot be read: it holds no dictionary of tensors: save model.state_dict"),
        (a_file, "model.safetensors is a file: name its folder$"),
        (lambda path: path / "nowhere", "nowhere does not exist$"),
    ],
)
def test_what_is_no_checkpoint_is_named(make: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        check_folder(make(tmp_path))


@pytest.mark.parametrize("written", [b"", b"\xff", b"\xff" * 64, b"\x02" + bytes(7) + b"ab"])
@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "pytorch_model.bin", ".metadata", "optimizer.json"])
def test_a_damaged_file_is_said_to_be_damaged(name: str, written: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(written)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / name} cannot be read: it is damaged")):
        check_folder(tmp_path)


@pytest.mark.parametrize("missing", [1, 2, 10_000])
def test_a_file_that_ends_early_is_named(missing: int, tmp_path: Path) -> None:
    model = model_folder(tmp_path, "bf16")
    file = next(model.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - missing)
    with pytest.raises(
        ValueError, match=re.escape(f"{file} cannot be read: it is damaged (it ends before its last tensor")
    ):
        check_folder(model)


class RunsCode:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (os.system, (f"touch {self.path}",))


@pytest.mark.parametrize("place", ["optimizer.pt", ".metadata"])
def test_nothing_of_a_file_is_run(place: str, tmp_path: Path) -> None:
    model = CLEAN["a model in fp32"](tmp_path / "model")
    mark = tmp_path / "was run"
    if place == "optimizer.pt":
        torch.save({"state": {}, "param_groups": [{"lr": 1e-5, "code": RunsCode(mark)}]}, model / place)
    else:
        (model / place).write_bytes(pickle.dumps(RunsCode(mark)))
    with pytest.raises(ValueError, match=re.escape(place)) as refused:
        check_folder(model)
    assert "it is damaged, or a pickle that runs code, which hf_mp does not" in str(refused.value)
    assert not mark.exists()
