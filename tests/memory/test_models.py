import json

import pytest
import torch
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig

import hf_mp
from hf_mp.memory import models, precisions
from hf_mp.memory.footprint import memory_footprint
from hf_mp.memory.models import UnknownModelError, find_config, model_class, skeleton

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


def test_a_directory_without_weights(tmp_path):
    GPT2Config(n_layer=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot be loaded"):
        hf_mp.load(tmp_path)


def test_a_loaded_model_computes(tmp_path, gpt2):
    gpt2.save_pretrained(tmp_path)
    ids = torch.arange(8)[None]
    wanted = gpt2.eval()(input_ids=ids).logits
    for precision, tolerance in {"fp32": 1e-6, "bf16": 0.05, "int8": 0.05, "nf4": 0.2}.items():
        logits = hf_mp.load(tmp_path, precision).eval()(input_ids=ids).logits.float()
        assert (logits - wanted).abs().max() <= tolerance
    assert isinstance(hf_mp.load(tmp_path), GPT2LMHeadModel)
