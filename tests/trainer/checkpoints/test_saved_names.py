"""Resumed and best models of classes that Transformers saves under the names of the Hub: every tensor, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hub_names
import pytest
import torch
from hub_names import FirstIsBest, Snapshots, State, state_of
from safetensors.torch import load_file, save_file
from tiny import same_by_name
from torch import Tensor, nn
from trainer_runs import make_trainer, quick_arguments
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, ResNetConfig, Trainer, TrainerCallback
from transformers import ResNetForImageClassification as ResNet

import hf_mp
from hf_mp import CheckpointError, MixedPrecisionArguments, MixedPrecisionCallback
from hf_mp.trainer.checkpoints import saved_names
from hf_mp.trainer.checkpoints.manifest import MANIFEST_NAME
from hf_mp.trainer.checkpoints.saved_names import load_weights, require_all_loaded, weight_files

pytestmark = pytest.mark.usefixtures("without_first_check")

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "learning_rate": 1e-2, "optim": "adamw_torch"}
BEST = {
    "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "quality",
    "greater_is_better": True,
}  # fmt: skip


def trainer_of(
    folder: Path, kind: str, contender: str = "subclass", precision: str = "bf16", model: Any = None,
    base: type[Trainer] = FirstIsBest, **settings: Any,
) -> tuple[Any, Snapshots]:  # fmt: skip
    rows, snapshots = hub_names.rows(kind, 16), Snapshots()
    settings = {**SAVING, "per_device_train_batch_size": 2, "precision": precision, **settings}
    args = quick_arguments(folder, MixedPrecisionArguments, **settings)
    made: Any = make_trainer(
        contender, precision, hub_names.make(kind) if model is None else model, args, base, train_dataset=rows,
        eval_dataset=rows[:2], data_collator=hub_names.collate, callbacks=[snapshots],
    )  # fmt: skip
    return made, snapshots


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(saved_names.logger, "warning", messages.append)
    return messages


# Resuming, and the best model

CONTENDERS = [
    ("subclass", "bf16"), ("subclass", "fp16"), ("subclass", "bf16-lean"), ("callback", "bf16"), ("callback", "fp16"),
]  # fmt: skip
SAMPLE = [
    ("Mixtral", "subclass", "fp16", "whole"), ("Qwen2-VL", "subclass", "bf16-lean", "whole"),
    ("LLaVA", "callback", "bf16", "whole"), ("DeepSeek-V3", "callback", "fp16", "LoRA"),
]  # fmt: skip
CASES = [(kind, *one, adapter) for kind in hub_names.MODELS for one in CONTENDERS for adapter in ("whole", "LoRA")]


@pytest.mark.parametrize(
    ("kind", "contender", "precision", "adapter"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.exhaustive) for case in CASES],
)
def test_every_tensor_comes_back(tmp_path: Path, kind: str, contender: str, precision: str, adapter: str) -> None:
    make = hub_names.adapted if adapter == "LoRA" else hub_names.make
    first, seen = trainer_of(tmp_path, kind, contender, precision, make(kind), **BEST)
    first.train()
    assert same_by_name(state_of(first.model), seen.after[2])  # the best
    losses = {entry["step"]: entry["eval_loss"] for entry in first.state.log_history if "eval_loss" in entry}
    # The callback leaves a model that computes in FP32.
    assert contender == "callback" or first.evaluate()["eval_loss"] == losses[2]

    again, after = trainer_of(tmp_path / "again", kind, contender, precision, make(kind, seed=1), **BEST)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert after.after.keys() == {3, 4}
    for step, state in after.after.items():
        assert same_by_name(state, seen.after[step])
    assert same_by_name(state_of(again.model), seen.after[2])
    if adapter == "whole":
        assert same_by_name(state_of(type(first.model).from_pretrained(tmp_path / "checkpoint-2")), seen.after[2])


@pytest.mark.parametrize("kind", ["Mixtral", pytest.param("LLaVA", marks=pytest.mark.exhaustive)])
def test_a_model_of_from_pretrained_comes_back(tmp_path: Path, kind: str) -> None:
    hub_names.make(kind).save_pretrained(tmp_path / "base")
    hub_names.make(kind, seed=1).save_pretrained(tmp_path / "other", save_original_format=False)
    model = hf_mp.load(tmp_path / "base")
    first, seen = trainer_of(tmp_path, kind, model=model)
    first.train()
    # Made from a file with the names of the model, it would itself be saved under those.
    for other in (hf_mp.load(tmp_path / "other"), hub_names.make(kind, seed=1)):
        again, after = trainer_of(tmp_path / "again", kind, model=other)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert same_by_name(after.after[4], seen.after[4])
    assert same_by_name(state_of(hf_mp.load(tmp_path / "checkpoint-2")), seen.after[2])


def test_the_callback_loads_again_where_it_came_after_the_trainer(tmp_path: Path) -> None:
    first, seen = trainer_of(tmp_path, "Mixtral")
    first.train()
    late, after = trainer_of(tmp_path / "again", "Mixtral", "stock", model=hub_names.make("Mixtral", seed=1))
    late.add_callback(MixedPrecisionCallback("bf16"))
    late.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same_by_name(after.after[4], seen.after[4])


# Files


def whole(folder: Path, model: Any) -> None:
    model.save_pretrained(folder)


def in_shards(folder: Path, model: Any) -> None:
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(weight_files(folder)) > 1


def pickled(folder: Path, model: Any) -> None:
    model.save_pretrained(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def pickled_in_shards(folder: Path, model: Any) -> None:
    model.save_pretrained(folder, max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for path in weight_files(folder):
        torch.save(load_file(path), path.with_suffix(".bin"))
        path.unlink()
    index["weight_map"] = {name: f"{Path(file).stem}.bin" for name, file in index["weight_map"].items()}
    (folder / "model.safetensors.index.json").rename(folder / "pytorch_model.bin.index.json")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def of_the_model(folder: Path, model: Any) -> None:
    model.save_pretrained(folder, save_original_format=False)


FORMATS = [whole, in_shards, pickled, pickled_in_shards, of_the_model]


@pytest.mark.parametrize(
    ("kind", "save"),
    [
        pytest.param(kind, save, marks=() if kind == "Mixtral" or save is whole else pytest.mark.exhaustive)
        for kind in hub_names.MODELS
        for save in FORMATS
    ],
)
def test_all_files_of_a_model_are_read(
    tmp_path: Path, kind: str, save: Callable[[Path, Any], None], warnings: list[str]
) -> None:
    saved, model = hub_names.make(kind), hub_names.make(kind, seed=1)
    save(tmp_path, saved)
    parameters = list(model.parameters())
    runtime = hf_mp.MixedPrecision("bf16")
    runtime.attach(model)
    load_weights(weight_files(tmp_path), model)
    assert not warnings
    assert same_by_name(state_of(model), state_of(saved))
    assert all(map(torch.equal, parameters, saved.parameters()))  # written in place
    runtime.detach()


def test_a_checkpoint_has_the_file_that_transformers_writes(tmp_path: Path) -> None:
    trainer, _ = trainer_of(tmp_path, "Mixtral", max_steps=2)
    trainer.train()
    trainer.model.save_pretrained(tmp_path / "by_hand")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("checkpoint-2", "by_hand"))
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in theirs
    assert same_by_name(ours, theirs)


@pytest.mark.parametrize("kind", ["Mixtral", pytest.param("LLaVA", marks=pytest.mark.exhaustive)])
def test_a_model_saved_in_16_bits_has_each_weight_rounded(tmp_path: Path, kind: str) -> None:
    trainer, _ = trainer_of(tmp_path, kind, max_steps=2, save_dtype="bf16")
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    expected = {name: v.bfloat16() if v.is_floating_point() else v for name, v in state_of(trainer.model).items()}
    assert same_by_name(state_of(hf_mp.load(tmp_path / "saved", "bf16")), expected)


# Models


class OfOnesOwn(PreTrainedModel):
    """A model of Transformers inside a class of one's own."""

    config_class = MixtralConfig
    base_model_prefix = "inner"
    _supports_sdpa = True
    _can_set_experts_implementation = classmethod(lambda cls: True)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.inner = MixtralForCausalLM(config)
        self.scale = nn.Parameter(torch.rand(1))
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        output = self.inner(input_ids=input_ids, labels=labels)
        output.loss = output.loss * self.scale.square().sum()
        return output


class Wrapper(nn.Module):
    """A model of Transformers inside a module that Transformers does not know."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.inner = MixtralForCausalLM(config)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.inner(input_ids=input_ids, labels=labels)


@pytest.mark.parametrize("cls", [OfOnesOwn, Wrapper])
@pytest.mark.parametrize("contender", ["subclass", "callback"])
def test_a_model_inside_another_comes_back(tmp_path: Path, cls: Any, contender: str) -> None:
    config = hub_names.make("Mixtral").config
    first, seen = trainer_of(tmp_path, "Mixtral", contender, model=cls(config))
    first.train()
    again, after = trainer_of(tmp_path / "again", "Mixtral", contender, model=cls(config))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same_by_name(after.after[4], seen.after[4])


def test_a_compiled_model_comes_back(tmp_path: Path) -> None:
    def made(folder: Path, seed: int) -> tuple[Any, Snapshots]:
        model = torch.compile(hub_names.make("Mixtral", seed), backend="eager", disable=True)
        return trainer_of(folder, "Mixtral", model=model, remove_unused_columns=False, label_names=["labels"])

    first, seen = made(tmp_path, 0)
    first.train()
    again, after = made(tmp_path / "again", 1)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same_by_name(after.after[4], seen.after[4])


def test_tied_weights_and_running_statistics_come_back(tmp_path: Path) -> None:
    config = MixtralConfig(**{**hub_names.make("Mixtral").config.to_dict(), "tie_word_embeddings": True})
    resnet = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=2)
    for cls, of in ((MixtralForCausalLM, config), (ResNet, resnet)):
        saved, model = cls(of), cls(of)
        if cls is ResNet:
            saved.train()(torch.randn(4, 3, 16, 16))
        saved.save_pretrained(tmp_path / cls.__name__)
        load_weights(weight_files(tmp_path / cls.__name__), model)
        assert same_by_name(state_of(model), state_of(saved))
    assert any("running_mean" in name for name in state_of(model))


# Refused


def change(folder: Path, by: Callable[[State], None]) -> None:
    """Rewrite the weights of a checkpoint, and remove the manifest that would tell."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    by(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    (folder / MANIFEST_NAME).unlink(missing_ok=True)


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
FUSED = "model.layers.1.mlp.experts.down_proj"
GATE = "model.layers.0.block_sparse_moe.gate.weight"


def rename(name: str) -> Callable[[State], None]:
    return lambda tensors: tensors.update({f"{name}_of_another": tensors.pop(name)})


def reshape(name: str) -> Callable[[State], None]:
    return lambda tensors: tensors.update({name: tensors[name][:-1].clone()})


CHANGES: dict[str, tuple[Callable[[State], Any], str]] = {
    "missing": (lambda tensors: tensors.pop(GATE), r"no tensor for model.layers.0.mlp.gate.weight\. Resume"),
    "an expert missing": (lambda tensors: tensors.pop(EXPERT), rf"size mismatch for {FUSED}: \(3, .*, and \(4, "),
    "renamed": (
        rename(GATE), r"no tensor for model.layers.0.mlp.gate.weight; no place in the model for .*_of_another"
    ),
    "an expert of another shape": (reshape(EXPERT), rf"{FUSED} cannot be converted \(.*MergeModulelist"),
    "another shape": (reshape("lm_head.weight"), r"size mismatch for lm_head.weight: \(63, 32\), and \(64, 32\) in"),
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    patch = pytest.MonkeyPatch()
    patch.setattr("hf_mp.trainer.session.replace_first_backward", lambda *given: lambda: None)
    trainer_of(folder, "Mixtral", max_steps=2)[0].train()
    patch.undo()
    return folder / "checkpoint-2"


def copied(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder / source.name))


@pytest.mark.parametrize("contender", ["subclass", "callback"])
@pytest.mark.parametrize("case", CHANGES)
def test_what_cannot_be_loaded_is_an_error_that_names_it(
    tmp_path: Path, trained: Path, case: str, contender: str
) -> None:
    by, message = CHANGES[case]
    change(checkpoint := copied(trained, tmp_path), by)
    trainer, _ = trainer_of(tmp_path / "again", "Mixtral", contender, model=hub_names.make("Mixtral", seed=1))
    before = state_of(trainer.model)
    with pytest.raises(CheckpointError, match=rf"^the model of {checkpoint} does not fit this run: {message}"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert same_by_name(state_of(trainer.model), before)


@pytest.mark.parametrize("contender", ["subclass", "callback"])
def test_a_best_model_that_cannot_be_loaded_is_an_error(tmp_path: Path, contender: str) -> None:
    class Lose(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            change(tmp_path / f"checkpoint-{state.global_step}", lambda tensors: tensors.pop(GATE))

    trainer, _ = trainer_of(tmp_path, "Mixtral", contender, **BEST)
    trainer.add_callback(Lose())
    with pytest.raises(CheckpointError, match=r"checkpoint-2 does not fit this run: no tensor for .*gate.weight"):
        trainer.train()


@pytest.mark.parametrize("contender", ["subclass", "callback"])
def test_a_best_model_that_is_not_there_is_an_error(tmp_path: Path, contender: str) -> None:
    class Remove(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                shutil.rmtree(tmp_path / "checkpoint-2")

    trainer, _ = trainer_of(tmp_path, "Mixtral", contender, **BEST)
    trainer.add_callback(Remove())
    with pytest.raises(CheckpointError, match="checkpoint-2, the best checkpoint"):
        trainer.train()


def test_frozen_weights_may_be_missing_but_not_under_another_name(
    tmp_path: Path, trained: Path, warnings: list[str]
) -> None:
    model = hub_names.make("Mixtral")
    model.model.layers[0].mlp.gate.requires_grad_(False)
    change(checkpoint := copied(trained, tmp_path), CHANGES["missing"][0])
    load_weights(weight_files(checkpoint), model)
    (message,) = warnings
    assert message.startswith(f"{checkpoint} has no tensor for model.layers.0.mlp.gate.weight: frozen")
    change(checkpoint, lambda tensors: tensors.update(other=torch.zeros(1)))
    with pytest.raises(CheckpointError, match=r"no tensor for model.layers.0.mlp.gate.weight; no place .* for other"):
        load_weights(weight_files(checkpoint), model)


def test_tensors_without_a_place_are_told_of(tmp_path: Path, trained: Path, warnings: list[str]) -> None:
    change(checkpoint := copied(trained, tmp_path), lambda tensors: tensors.update(other=torch.zeros(1)))
    load_weights(weight_files(checkpoint), model := hub_names.make("Mixtral", seed=1))
    assert warnings == [f"the model has no place for other of {checkpoint}"]
    assert same_by_name(state_of(model), state_of(hf_mp.load(trained)))


def test_a_buffer_that_is_missing_is_an_error(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    save_file({k: v for k, v in model.state_dict().items() if k != "1.running_var"}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"does not fit this run: no tensor"):
        load_weights(weight_files(tmp_path), model)


@pytest.mark.parametrize("name", ["_mapping_of", "_convert_into", "_settings_of_loading"])
def test_without_the_conversion_the_tensors_are_named(
    trained: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(saved_names, name, None)
    message = r"no tensor for .*mlp.experts.down_proj.*; no place in the model for .*block_sparse_moe"
    with pytest.raises(CheckpointError, match=message):
        load_weights(weight_files(trained), hub_names.make("Mixtral"))


@pytest.mark.parametrize("contender", ["subclass", "callback"])
def test_a_librarys_own_loading_may_leave_no_tensor_out(tmp_path: Path, trained: Path, contender: str) -> None:
    class Own(Trainer):
        def _load_from_checkpoint(self, checkpoint: str, model: Any = None) -> None:
            tensors = load_file(Path(checkpoint, "model.safetensors"))
            self.model.load_state_dict(tensors, strict=False)  # type: ignore[union-attr]

    trainer, _ = trainer_of(tmp_path, "Mixtral", contender, base=Own)
    with pytest.raises(CheckpointError, match=r"has no values for model.layers.0.mlp.experts.down_proj, .* and 2 more"):
        trainer.train(resume_from_checkpoint=str(trained))


def load_in_place(model: nn.Linear, tensors: State) -> None:
    model.load_state_dict(tensors, strict=False)


def load_other_memory(model: nn.Linear, tensors: State) -> None:
    for name, value in tensors.items():
        model.get_parameter(name).data = value


def load_other_parameters(model: nn.Linear, tensors: State) -> None:
    model.load_state_dict({name: nn.Parameter(value) for name, value in tensors.items()}, strict=False, assign=True)


def load_by_swapping(model: nn.Linear, tensors: State) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(tensors, strict=False)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("load", [load_in_place, load_other_memory, load_other_parameters, load_by_swapping])
def test_each_way_to_load_a_parameter_is_noticed(tmp_path: Path, load: Callable[[nn.Linear, State], None]) -> None:
    tensors = state_of(nn.Linear(2, 2))
    with require_all_loaded(tmp_path, model := nn.Linear(2, 2)):
        load(model, tensors)
    assert same_by_name(state_of(model), tensors)
    del tensors["bias"]
    with (
        pytest.raises(CheckpointError, match="has no values for bias of this Linear"),
        require_all_loaded(tmp_path, model := nn.Linear(2, 2)),
    ):
        load(model, tensors)


@pytest.mark.parametrize(("contender", "precision"), [("subclass", "bf16-lean"), ("callback", "fp16")])
def test_what_trains_and_peft_does_not_save_is_an_error(tmp_path: Path, contender: str, precision: str) -> None:
    def made(folder: Path, seed: int) -> Any:
        model = hub_names.adapted("Qwen3-MoE", seed)
        model.base_model.model.model.norm.requires_grad_(True)
        return trainer_of(folder, "Qwen3-MoE", contender, precision, model, max_steps=2)[0]

    made(tmp_path, 0).train()
    with pytest.raises(CheckpointError, match="no values for base_model"):
        made(tmp_path / "again", 1).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
