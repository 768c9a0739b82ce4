import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    CLIPConfig,
    DPRConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    T5Config,
    ViTConfig,
    WhisperConfig,
)  # fmt: skip
from typer.testing import CliRunner

import hf_mp
from hf_mp.cli import app
from hf_mp.memory import models, precisions
from hf_mp.memory.footprint import Kind, memory_footprint
from hf_mp.memory.models import find_config, meta_model, model_class

from .conftest import SMALL, storages_of

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
    assert meta_model(find_config(name), "fp32").num_parameters() == SIZES[name]
    assert no_network == []


def test_a_directory_wins_over_a_built_in_name_and_a_config_file_is_enough(tmp_path, monkeypatch, no_network):
    GPT2Config(n_layer=3).save_pretrained(tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    assert find_config("gpt2").n_layer == find_config(tmp_path / "gpt2" / "config.json").n_layer == 3


def test_a_given_configuration_is_left_as_it_is(gpt2_config):
    before = gpt2_config.to_dict()
    meta_model(gpt2_config, "int8")
    hf_mp.estimate_training_memory(gpt2_config, "fp32")
    assert gpt2_config.to_dict() == before


def test_an_unknown_name_tells_the_ways_out(no_network):
    said = (
        r"'no-such/model' is neither a directory here nor a model in the Hub's cache, and the Hub gave none of that "
        r"name \(no route to host\)\. Give a directory that save_pretrained wrote, or the name .*, or one of gpt2, "
    )
    for load in (find_config, hf_mp.load):
        with pytest.raises(ValueError, match=said):
            load("no-such/model")
    assert no_network == ["no-such/model"] * 2


def test_loading_without_weights_tells_the_way_out(no_network, monkeypatch):
    monkeypatch.chdir("/")
    with pytest.raises(
        ValueError, match=r"'gpt2-xl' is neither a directory.*`hf-mp memory`, which needs no weights, also takes"
    ):
        hf_mp.load("gpt2-xl")


@pytest.mark.parametrize(
    "content",
    [None, "", "{", "[1]", "{}", json.dumps({"model_type": "no-such"})],
    ids=["none", "empty", "cut", "list", "bare", "type"],
)
def test_a_directory_without_a_configuration(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"cannot be loaded: .*Give a directory that save_pretrained wrote"):
        find_config(tmp_path)


def test_the_class_is_that_of_the_checkpoint_or_a_language_model():
    assert model_class(GPT2Config()).__name__ == "GPT2LMHeadModel"
    assert model_class(BertConfig()).__name__ == "BertForMaskedLM"
    assert model_class(BertConfig(architectures=["BertModel"])).__name__ == "BertForMaskedLM"
    classifier = BertConfig(architectures=["BertForSequenceClassification"])
    assert model_class(classifier).__name__ == "BertForSequenceClassification"
    assert model_class(GPT2Config(architectures=["Trainer", "logging", "GPT2Model"])) is GPT2LMHeadModel


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (T5Config(), "T5ForConditionalGeneration"),
        (MarianConfig(), "MarianMTModel"),  # there is a decoder alone, too
        (WhisperConfig(), "WhisperForConditionalGeneration"),
        (ViTConfig(architectures=["ViTModel"]), "ViTForImageClassification"),
        (CLIPConfig(architectures=["CLIPModel"]), "CLIPModel"),  # has a loss without a head
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_the_class_of_other_kinds_has_a_loss(config, name):
    assert model_class(config).__name__ == name


def test_a_configuration_without_a_class_that_has_a_loss_is_refused():
    with pytest.raises(ValueError, match=r"no model with a loss is known"):
        model_class(DPRConfig())


# Loading


def gpt2_of(layers: int, vocabulary: int, path: Path) -> GPT2Config:
    """GPT-2 of the usual width, saved."""
    config = GPT2Config(n_layer=layers, vocab_size=vocabulary, architectures=["GPT2LMHeadModel"], **SMALL)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    model.tie_weights()
    model.save_pretrained(path)
    return config


@pytest.fixture(scope="module", params=[(2, 1000), pytest.param((12, 50257), marks=pytest.mark.slow)], ids=str)
def saved(request, tmp_path_factory):
    """A GPT-2 of two layers, and GPT-2 124M: its folder, its configuration, elements, and elements of linear layers."""
    path = tmp_path_factory.mktemp("gpt2")
    config = gpt2_of(*request.param, path)
    return path, config, meta_model(config, "fp32").num_parameters(), 12 * 768 * 768 * config.n_layer


@pytest.mark.parametrize("precision", list(precisions.PRECISIONS))
def test_every_byte_of_a_loaded_model_is_planned_and_counted(saved, precision):
    path, config, elements, linear = saved
    blocks, rows = linear // 64, (2304 + 768 + 3072 + 768) * config.n_layer
    in_4_bits = (2 * elements - 3 * linear // 2, 4 * blocks + 4 * 16 * 4 * config.n_layer)
    weights, state = {
        "fp32": (4 * elements, 0),
        "fp16": (2 * elements, 0),
        "bf16": (2 * elements, 0),
        "int8": (2 * elements - linear, 4 * rows),  # one scale a row
        "nf4": in_4_bits,  # one scale a block of 64, and a table of 16 numbers a layer
        "fp4": in_4_bits,
    }[precision]
    model = hf_mp.load(path, precision)
    footprint = memory_footprint(model)
    assert footprint.by_kind.get("parameters") == weights
    assert footprint.by_kind.get("quantization state", 0) == state
    assert footprint.total_bytes == storages_of(model) == weights + state
    assert footprint.transformers_bytes == model.get_memory_footprint() == weights
    planned = memory_footprint(meta_model(config, precision), as_if_loaded=True)
    facts = [
        sorted((row.name, row.kind, row.dtype, row.shape, row.counted_bytes) for row in found.rows)
        for found in (planned, footprint)
    ]
    assert facts[0] == facts[1]


def test_double_quantization_is_counted(saved):
    path, config, _, linear = saved
    model = hf_mp.load(path, "nf4", double_quant=True)
    footprint = memory_footprint(model)
    assert footprint.total_bytes == storages_of(model)
    names = {row.name.rpartition("quant_state.")[2] for row in footprint.rows if row.kind is Kind.QUANTIZATION_STATE}
    assert {"absmax", "code", "offset", "state2.absmax", "state2.code"} <= names
    # one byte instead of four for each block of 64, and a table of 256 numbers for each layer
    assert footprint.by_kind["quantization state"] < 2 * linear // 64 + 5000 * config.n_layer


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"precision": "fp8"}, r"'fp8' is not known for loading: use one of fp32, fp16, bf16, int8, nf4, fp4"),
        ({"precision": "fp16", "dtype": torch.float32}, r"multiple values for keyword argument 'dtype'"),
        ({"precision": "int8", "quantization_config": None}, r"multiple values for .* 'quantization_config'"),
        ({"precision": "int8", "double_quant": True}, r"double_quant is for nf4 and fp4"),
    ],
)
def test_loading_refuses(gpt2, tmp_path, arguments, message):
    gpt2.save_pretrained(tmp_path)
    with pytest.raises((ValueError, TypeError), match=message):
        hf_mp.load(tmp_path, **arguments)


def test_without_bitsandbytes_the_error_names_it(gpt2, tmp_path, monkeypatch):
    gpt2.save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    said = r"precision='nf4' needs bitsandbytes, which .*: pip install bitsandbytes, or use one of fp32, fp16, bf16$"
    with pytest.raises(ImportError, match=said):
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
    "measure_training_memory": lambda path: hf_mp.measure_training_memory(path, "fp32", device="cpu", seq_len=4),
    "hf-mp memory": lambda path: CliRunner().invoke(app, ["memory", path], input="y\n" * 50),
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
        assert result.exit_code == 2 and "does not run a model's own code" in result.stderr
    else:
        with pytest.raises(ValueError, match=r"custom code.*does not run a model's own code"):
            USES[use](str(model_with_code))
    assert not (tmp_path / "touched").exists()


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_weights_that_run_code_are_not_loaded(gpt2_config, tmp_path):
    gpt2_config.save_pretrained(tmp_path)
    torch.save({"lm_head.weight": Touch(tmp_path / "touched")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match="Weights only load failed"):
        hf_mp.load(tmp_path)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("outside", ["../elsewhere/model.safetensors", "{folder}/elsewhere/model.safetensors"])
@pytest.mark.parametrize("place", [".", "part"])
def test_weights_outside_of_the_directory_are_not_read(gpt2, tmp_path, outside, place):
    folder = tmp_path / "model"
    gpt2.save_pretrained(folder / place, max_shard_size="20KB")
    gpt2.save_pretrained(tmp_path / "elsewhere")
    settings = {} if place == "." else {"subfolder": place}
    gpt2.config.save_pretrained(folder)
    assert isinstance(hf_mp.load(folder, **settings), GPT2LMHeadModel)
    index = folder / place / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    # two up from the folder of a part
    path = outside.format(folder=tmp_path) if place == "." else f"../{outside.format(folder=tmp_path)}"
    content["weight_map"]["transformer.ln_f.weight"] = path
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"model.safetensors.index.json names"):
        hf_mp.load(folder, **settings)


def test_an_index_that_the_configuration_names_is_examined_too(gpt2, tmp_path):
    folder = tmp_path / "model"
    gpt2.save_pretrained(folder, max_shard_size="20KB")
    gpt2.save_pretrained(tmp_path / "elsewhere")
    index = (folder / "model.safetensors.index.json").rename(folder / "own.safetensors.index.json")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": index.name}))
    assert isinstance(hf_mp.load(folder), GPT2LMHeadModel)
    content = json.loads(index.read_text())
    content["weight_map"]["transformer.ln_f.weight"] = "../elsewhere/model.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"own.safetensors.index.json names a shard"):
        hf_mp.load(folder)


def test_weights_outside_of_a_snapshot_in_the_cache_are_not_read(gpt2, tmp_path, monkeypatch, no_network):
    cache, revision = tmp_path / "hub", "f" * 40
    snapshot = cache / "models--a--model" / "snapshots" / revision
    gpt2.save_pretrained(snapshot, max_shard_size="20KB")
    (cache / "models--a--model" / "refs").mkdir()
    (cache / "models--a--model" / "refs" / "main").write_text(revision)
    monkeypatch.setattr(models, "find_config", lambda name: gpt2.config)  # which reads the cache of the user alone
    assert isinstance(hf_mp.load("a/model", cache_dir=cache), GPT2LMHeadModel)
    index = snapshot / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    (first, *_) = content["weight_map"]
    content["weight_map"][first] = "../../blobs/" + content["weight_map"][first]
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"names a shard outside of its directory"):
        hf_mp.load("a/model", cache_dir=cache)
