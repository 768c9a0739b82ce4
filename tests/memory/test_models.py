import json
import re

import pytest
import torch
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, MixtralConfig
from typer.testing import CliRunner

import hf_mp
from hf_mp.cli import app
from hf_mp.memory import models, precisions
from hf_mp.memory.fitting import largest_batch_size
from hf_mp.memory.footprint import memory_footprint
from hf_mp.memory.models import UnknownModelError, find_config, model_class, skeleton
from hf_mp.memory.report import gather_report

SIZES = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "openai-community/gpt2": 124_439_808,
}


@pytest.fixture
def no_network(monkeypatch):
    asked = []

    def ask(name):
        asked.append(name)
        return ConnectionError("no route to host\nand more lines")

    monkeypatch.setattr(models, "ask_hub", ask)
    return asked


@pytest.mark.parametrize("name", list(SIZES))
def test_built_in_models_need_no_network_and_have_the_published_sizes(name, no_network):
    assert skeleton(find_config(name), "fp32").num_parameters() == SIZES[name]
    assert no_network == []


def test_a_directory_wins_over_a_built_in_name(tmp_path, monkeypatch, no_network):
    GPT2Config(n_layer=3).save_pretrained(tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    assert find_config("gpt2").n_layer == 3


def test_a_config_file_is_enough(tmp_path):
    LlamaConfig(num_hidden_layers=3).save_pretrained(tmp_path)
    assert find_config(tmp_path / "config.json").num_hidden_layers == 3
    assert find_config(str(tmp_path)).num_hidden_layers == 3


def test_a_given_configuration_is_left_as_it_is(gpt2_config):
    before = gpt2_config.to_dict()
    skeleton(gpt2_config, "int8")
    hf_mp.estimate_training_memory(gpt2_config, "fp32")
    assert gpt2_config.to_dict() == before


def test_an_unknown_name_tells_the_ways_out(no_network):
    with pytest.raises(UnknownModelError) as raised:
        find_config("no-such/model")
    message = str(raised.value)
    assert "'no-such/model' is not a directory, not a file" in message and "no route to host)" in message
    assert "config.json" in message and "gpt2, gpt2-medium, gpt2-large, gpt2-xl" in message
    assert no_network == ["no-such/model"]


def test_loading_without_weights_tells_the_way_out(no_network, monkeypatch):
    monkeypatch.setattr(precisions, "check_bitsandbytes", lambda *args: None)
    monkeypatch.chdir("/")
    with pytest.raises(ValueError, match=r"'gpt2-xl' is not a directory.*--config-only"):
        hf_mp.load("gpt2-xl")


def test_a_directory_without_a_model(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json: give a directory that save_pretrained wrote"):
        find_config(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", "{}", json.dumps({"model_type": "no-such"})],
    ids=["empty", "cut", "list", "bare", "type"],
)
def test_a_file_that_is_no_configuration(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json is not the configuration of a model"):
        find_config(tmp_path / "config.json")


def test_something_else_is_refused():
    with pytest.raises(TypeError, match="not as int"):
        find_config(3)


def test_the_class_is_that_of_the_checkpoint_or_a_language_model():
    assert model_class(GPT2Config()).__name__ == "GPT2LMHeadModel"
    assert model_class(BertConfig()).__name__ == "BertForMaskedLM"
    assert model_class(BertConfig(architectures=["BertModel"])).__name__ == "BertForMaskedLM"
    classifier = BertConfig(architectures=["BertForSequenceClassification"])
    assert model_class(classifier).__name__ == "BertForSequenceClassification"


# Loading


@pytest.mark.parametrize("precision", list(precisions.PRECISIONS))
def test_a_skeleton_is_the_loaded_model_byte_for_byte(gpt2_124m, precision):
    planned = memory_footprint(skeleton(find_config("gpt2"), precision), as_if_loaded=True)
    loaded = memory_footprint(hf_mp.load(gpt2_124m, precision))
    facts = [
        [(row.name, row.kind, row.dtype, row.shape, row.counted_bytes) for row in footprint.rows]
        for footprint in (planned, loaded)
    ]
    assert sorted(facts[0]) == sorted(facts[1])


def test_double_quantization_is_planned_as_it_is_loaded(gpt2_124m):
    planned = skeleton(find_config("gpt2"), "nf4", double_quant=True)
    loaded = hf_mp.load(gpt2_124m, "nf4", double_quant=True)
    assert memory_footprint(planned, as_if_loaded=True).by_kind == memory_footprint(loaded).by_kind


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"precision": "fp8"}, r"'fp8' is not known for loading: use one of fp32, fp16, bf16, int8, nf4, fp4"),
        ({"precision": "fp16", "dtype": torch.float32}, r"dtype is decided by precision='fp16'"),
        ({"precision": "int8", "quantization_config": None}, r"quantization_config is decided by precision='int8'"),
        ({"precision": "int8", "double_quant": True}, r"double_quant is for nf4 and fp4"),
        ({"precision": "int8", "device_map": {"": "vulkan"}}, r"does not support 'vulkan'.*fp32, fp16 or bf16"),
        ({"precision": "nf4", "device_map": "fpga"}, r"does not support 'fpga'"),
    ],
)
def test_loading_refuses(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        hf_mp.load(tmp_path, **arguments)


def test_without_bitsandbytes_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(precisions.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"precision='nf4' needs bitsandbytes: pip install bitsandbytes, or use fp32"):
        hf_mp.load(tmp_path, "nf4")


def test_a_loaded_model_computes(tmp_path, gpt2):
    gpt2.save_pretrained(tmp_path)
    ids = torch.arange(8)[None]
    wanted = gpt2.eval()(input_ids=ids).logits
    for precision, tolerance in {"fp32": 1e-6, "bf16": 0.05, "int8": 0.05, "nf4": 0.2}.items():
        logits = hf_mp.load(tmp_path, precision).eval()(input_ids=ids).logits.float()
        assert (logits - wanted).abs().max() <= tolerance
    assert isinstance(hf_mp.load(tmp_path), GPT2LMHeadModel)


# A model's own code


EVIL = """
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel
Path({touched!r}).touch()
class Evil(GPT2Config):
    model_type = {model_type!r}
class EvilModel(GPT2LMHeadModel):
    config_class = Evil
def generate(model, *args, **kwargs):
    return None
"""
USES = {
    "find_config": find_config,
    "load": hf_mp.load,
    "estimate_training_memory": hf_mp.estimate_training_memory,
    "measure_training_memory": lambda path: hf_mp.measure_training_memory(path, "fp32", device="cpu", seq_len=4),
    "largest_batch_size": lambda path: largest_batch_size(path, "1GiB", seq_len=4),
    "gather_report": lambda path: gather_report(path, train=True, presets=["fp32"], precisions=["fp32"], seq_len=4),
    "hf-mp memory": lambda path: CliRunner().invoke(app, ["memory", path, "--config-only"], input="y\n" * 50),
}


@pytest.fixture(params=["gpt2", "evil"])
def model_with_code(request, tmp_path, monkeypatch):
    """A folder whose configuration names code of its own, and somebody who says yes to every question."""
    folder = tmp_path / "model"
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20, n_positions=8)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "evil.Evil", "AutoModel": "evil.EvilModel", "AutoModelForCausalLM": "evil.EvilModel"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": request.param, "auto_map": auto_map}))
    (folder / "custom_generate").mkdir()
    code = EVIL.format(touched=str(tmp_path / "touched"), model_type=request.param)
    for name in ("evil.py", "custom_generate/generate.py"):
        (folder / name).write_text(code)
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder


@pytest.mark.parametrize("use", USES)
def test_code_beside_a_configuration_does_not_run(use, model_with_code, tmp_path):
    is_known = json.loads((model_with_code / "config.json").read_text())["model_type"] == "gpt2"
    if is_known:  # Transformers' own code for it
        USES[use](str(model_with_code))
    elif use == "hf-mp memory":
        result = USES[use](str(model_with_code))
        assert result.exit_code == 2 and "needs its own code" in result.stderr
    else:
        with pytest.raises(ValueError, match=r"'evil', which needs its own code \(evil\.Evil\).*does not run"):
            USES[use](str(model_with_code))
    assert not (tmp_path / "touched").exists()


def test_an_architecture_that_is_no_model_is_not_used():
    config = GPT2Config(architectures=["Trainer", "logging", "GPT2Model"])
    assert model_class(config) is GPT2LMHeadModel


# Sizes that no model has


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (GPT2Config, {"n_layer": 10**9}, "n_layer=1,000,000,000 is more than any model has"),
        (LlamaConfig, {"num_hidden_layers": 10**9}, "num_hidden_layers=1,000,000,000 is more"),
        (MixtralConfig, {"num_local_experts": 10**9}, "num_local_experts=1,000,000,000 is more"),
        (GPT2Config, {"n_embd": 12 * 10**8, "n_layer": 1}, "no GPT2LMHeadModel of this configuration: .*overflow"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_size_that_no_model_has_is_refused_in_one_sentence(tmp_path, kind, changes, message):
    kind().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
    result = CliRunner().invoke(app, ["memory", str(tmp_path), "--config-only"])
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert re.search(message, result.stderr), result.stderr


def test_a_configuration_that_was_made_already_is_looked_at_too():
    config = GPT2Config()
    config.n_layer = 10**9
    with pytest.raises(ValueError, match="n_layer=1,000,000,000 is more than any model has"):
        hf_mp.estimate_training_memory(config, "fp32")
