"""The recipe at a small size, from its text to its table, and what it says to bad input."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import _report
import _text
import finetune_gpt2
from finetune_gpt2 import main, parse_arguments


def as_flags(**settings: Any) -> list[str]:
    return [f"--{name}={value}" for name, value in settings.items()]


TINY_MODEL = as_flags(vocab_size=300, context=32, width=32, layers=1, heads=2)
SHORT_RUN = as_flags(max_steps=6, warmup_steps=1, learning_rate=5e-3, logging_steps=2, use_cpu=True, disable_tqdm=True)
SAMPLE = "\n\n".join(topics[topic] for topic in ("assert", "for", "if", "while", "with", "pass", "return"))


@dataclass(frozen=True)
class Run:
    output_dir: Path
    printed: str
    summary: dict[str, Any]


def run(output_dir: Path, *flags: str, **settings: Any) -> Run:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main([*SHORT_RUN, *flags, *as_flags(**settings, output_dir=output_dir)])
    return Run(output_dir, printed.getvalue(), json.loads((output_dir / "summary.json").read_text()))


def sample_text() -> DatasetDict:
    """In the place of the whole documentation, which takes seconds to collect."""
    rows = Dataset.from_dict({"text": [SAMPLE]})
    return DatasetDict(train=rows, validation=rows)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "sample.txt"
    path.write_text(SAMPLE, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, sample: str) -> Run:
    output_dir = tmp_path_factory.mktemp("finished") / "run"
    return run(output_dir, *TINY_MODEL, train_file=sample, prompt="The")


@pytest.fixture(scope="module")
def fp16_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was stored in FP16, with its tokenizer."""
    directory = tmp_path_factory.mktemp("models") / "fp16"
    tokenizer = _text.train_tokenizer([SAMPLE], 300)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=32, n_embd=32, n_layer=1, n_head=2)
    torch.manual_seed(0)
    GPT2LMHeadModel(config).half().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


# A run


def test_the_run_ends_in_a_table_that_a_person_can_read(finished):
    rows = ("evaluation loss", "perplexity on held-out text", "unigram", "tokens per second", "precision", "loss scale")
    rows += ("skipped", "peak memory", "saved model in FP32", "saved model in FP16", "saved model in INT8")
    assert [words for words in rows if words not in finished.printed] == []
    assert "The" in finished.printed.split("It writes:")[1]  # the text that the model writes begins with the prompt
    contract = finished.printed.split("precision contract of this run: ")
    assert len(contract) == 2 and "\nparameters" in contract[1]
    steps = re.findall(
        r"^step +\d+  loss [\d.]+  loss scale +\d+  learning rate \S+  skipped 0$", finished.printed, re.MULTILINE
    )
    assert [int(line.split()[1]) for line in steps] == [2, 4, 6] and "{" not in finished.printed


def test_bars_are_named_and_logs_keep_to_80_columns(sample, tmp_path, capsys):
    run(tmp_path / "run", *TINY_MODEL, train_file=sample, disable_tqdm=False, eval_strategy="steps", eval_steps=4)
    bars = re.findall(r"(\S*) +\d+%\|", capsys.readouterr().err)
    assert {"training:", "evaluating:"} == set(bars)
    logs = {"loss": 10.98, "loss_scale": 2.0**19, "learning_rate": 1e-5, "skipped_steps": 99, "grad_norm": 1.0}
    assert len(_report.log_line(99_999, logs)) <= 80
    assert _report.log_line(6, {"eval_loss": 1.25, "epoch": 1}) == "step     6  evaluation loss 1.250"
    assert _report.log_line(6, {"train_loss": 1.25}) == ""


@pytest.mark.parametrize(
    ("first", "last", "lowest", "highest", "words"),
    [
        (1024, 131072, 1024, 131072, "1,024 first, 131,072 last"),
        (1024, 4096, 512, 8192, "1,024 first, 4,096 last, 512 lowest, 8,192 highest"),
    ],
)
def test_the_loss_scale_of_a_run_says_nothing_twice(first, last, lowest, highest, words):
    found = {"first": first, "last": last, "lowest": lowest, "highest": highest}
    assert _report.loss_scale_words(found) == words


def test_the_summary_holds_the_numbers_of_the_run(finished):
    summary = finished.summary
    assert summary["precision"] == "fp16"
    assert summary["steps"] == 6
    assert summary["skipped_steps"] == 0
    assert summary["train_tokens"] == 6 * 4 * 32
    assert summary["eval_loss_after"] < summary["eval_loss_before"]
    assert summary["perplexity_after"] == pytest.approx(math.exp(summary["eval_loss_after"]))
    assert summary["tokens_per_second"] == pytest.approx(summary["train_tokens"] / summary["train_seconds"])
    assert summary["peak_memory"]["mib"] > 50
    scale = summary["loss_scale"]
    assert 1.0 <= scale["lowest"] <= scale["first"] <= scale["highest"]


def test_the_footprints_are_those_of_the_saved_model(finished):
    footprints = finished.summary["footprints"]
    parameters = finished.summary["parameters"]
    assert footprints["fp32"]["mib"] == pytest.approx(parameters * 4 / 2**20)
    assert footprints["fp16"]["mib"] == pytest.approx(parameters * 2 / 2**20)
    if importlib.util.find_spec("bitsandbytes") is not None:
        # one block: 12 x 32 x 32 weights in GPT-2's four Conv1D layers
        assert footprints["int8"]["mib"] == pytest.approx((parameters * 2 - 12 * 32 * 32) / 2**20)


def test_the_saved_directory_loads_plainly_in_fp32(finished):
    model = AutoModelForCausalLM.from_pretrained(finished.output_dir)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    tokenizer = AutoTokenizer.from_pretrained(finished.output_dir)
    assert tokenizer.decode(tokenizer("def f(): # é\n\n\treturn 1").input_ids) == "def f(): # é\n\n\treturn 1"
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.eos_token_id == model.config.eos_token_id


def test_the_trained_model_is_the_saved_one(finished, sample):
    text = _text.file_text(sample)
    blocks = _text.make_blocks(text, AutoTokenizer.from_pretrained(finished.output_dir), 32)
    rows = torch.tensor(blocks.validation["input_ids"][:])
    model = AutoModelForCausalLM.from_pretrained(finished.output_dir).eval()
    with torch.no_grad():
        loss = model(input_ids=rows, labels=rows).loss.item()
    assert finished.summary["eval_loss_after"] == pytest.approx(loss, rel=2e-3)
    assert finished.summary["unigram_perplexity"] == pytest.approx(blocks.unigram_perplexity)


def test_a_run_goes_on_from_its_last_checkpoint(sample, tmp_path):
    text = as_flags(train_file=sample, save_strategy="steps", save_steps=2)
    run(tmp_path / "run", *TINY_MODEL, *text, max_steps=4)
    resumed = run(tmp_path / "run", *TINY_MODEL, *text, max_steps=7, resume_from_checkpoint="true")
    assert resumed.summary["steps"] == 7
    assert resumed.summary["train_tokens"] == 3 * 4 * 32  # steps 5 to 7


def test_precision_fp32_has_no_loss_scale(sample, tmp_path):
    summary = run(tmp_path / "run", *TINY_MODEL, train_file=sample, precision="fp32").summary
    assert summary["precision"] == "fp32"
    assert summary["loss_scale"] is None
    assert summary["eval_loss_after"] < summary["eval_loss_before"]


def test_no_argument_trains_on_the_documentation_of_this_python(monkeypatch, tmp_path):
    monkeypatch.setattr(finetune_gpt2, "python_text", sample_text)
    monkeypatch.chdir(tmp_path)
    main([*TINY_MODEL, *SHORT_RUN])
    assert (tmp_path / "outputs/finetune_gpt2/model.safetensors").is_file()


def test_fine_tuning_a_checkpoint_that_was_stored_in_fp16(fp16_checkpoint, sample, tmp_path):
    finished = run(tmp_path / "run", model_name_or_path=fp16_checkpoint, train_file=sample)
    assert finished.summary["eval_loss_after"] < finished.summary["eval_loss_before"]
    weight = AutoModelForCausalLM.from_pretrained(finished.output_dir).transformer.wte.weight
    assert weight.dtype is torch.float32
    assert (weight != weight.half().float()).any()  # bits that FP16 does not have


@pytest.mark.parametrize(
    ("flags", "stored"),
    [
        (["--dtype", "auto"], torch.float16),
        (["--dtype", "float32"], torch.float32),
        (["--precision", "fp32"], torch.float32),  # the stock Trainer is not given a model in FP16
    ],
)
def test_dtype_is_that_in_which_the_model_is_loaded(fp16_checkpoint, flags, stored):
    recipe, args = parse_arguments(["--model_name_or_path", str(fp16_checkpoint), *flags])
    assert finetune_gpt2.load_model(recipe, args, 300).dtype is stored


def test_a_dataset_in_a_directory(tmp_path):
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"body": topics[topic]}) for topic in ("for", "if", "while")]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))
    text = _text.hub_text(str(tmp_path / "data"), None, "body", seed=0)
    assert {*text["train"]["text"], *text["validation"]["text"]} == {topics["for"], topics["if"], topics["while"]}
    with pytest.raises(ValueError, match=r"has no column 'text'.*--text_column"):
        _text.hub_text(str(tmp_path / "data"), None, "text", seed=0)


def test_a_footprint_that_cannot_be_had_is_left_out_for_its_reason(monkeypatch, tmp_path):
    def load(saved: Path, precision: str) -> None:
        raise ImportError("no bitsandbytes\nat all")

    monkeypatch.setattr(_report.hf_mp, "load", load)
    entry = {"mib": None, "note": "cannot be loaded: no bitsandbytes"}
    assert _report.measure_footprints(tmp_path) == dict.fromkeys(("fp32", "fp16", "int8"), entry)


# Settings


SMALL, STOCK = finetune_gpt2.SMALL_MODEL_DEFAULTS, {"learning_rate": 5e-5, "max_steps": -1, "save_steps": 500}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--max_steps", "9"], {"max_steps": 9, "warmup_steps": SMALL["warmup_steps"]}),
        (["--model_name_or_path", "gpt2"], {**STOCK, "output_dir": finetune_gpt2.DEFAULTS["output_dir"]}),
        (["--model-name-or-path=gpt2"], {**STOCK, "output_dir": finetune_gpt2.DEFAULTS["output_dir"]}),
        (["--num_train_epochs", "2", "--use_cpu"], {"num_train_epochs": 2.0, "max_steps": -1}),
    ],
    ids=["steps", "a model by name", "with dashes", "epochs"],
)
def test_flags_win_over_the_defaults(flags, expected):
    recipe, args = parse_arguments(flags)
    assert {name: getattr(recipe, name, getattr(args, name, None)) for name in expected} == expected


# Bad input


def text_file(content: bytes) -> Callable[[Path], list[str]]:
    def flags(output_dir: Path) -> list[str]:
        path = output_dir.with_name("my.txt")
        path.write_bytes(content)
        return ["--train_file", str(path)]

    return flags


def model_without_tokenizer(output_dir: Path) -> list[str]:
    config = GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    GPT2LMHeadModel(config).save_pretrained(output_dir.with_name("bare"))
    return ["--model_name_or_path", str(output_dir.with_name("bare"))]


def empty_directory(output_dir: Path) -> list[str]:
    output_dir.with_name("empty").mkdir()
    return ["--model_name_or_path", str(output_dir.with_name("empty"))]


@pytest.mark.parametrize(
    "flags, message",
    [
        pytest.param(["--model_name_or_path", "no-such/model"], "not a directory, not in the cache.*directory.*in the "
                     "cache.*built-in small model", id="model without network"),
        pytest.param(["--dataset_name", "no-such/data"], "no-such/data cannot be loaded.*--train_file", id="dataset"),
        pytest.param(empty_directory, "empty cannot be loaded", id="directory without a model"),
        pytest.param(model_without_tokenizer, "holds no tokenizer.*--tokenizer_name", id="model without tokenizer"),
        pytest.param(["--train_file", "no-such.txt"], "no-such.txt cannot be read: No such file", id="no file"),
        pytest.param(text_file(b""), "my.txt is empty", id="empty file"),
        pytest.param(text_file(b" \n\n"), "my.txt is empty", id="blank file"),
        pytest.param(text_file(b"abc\xff"), "not UTF-8 .byte 0xff at position 3.*iconv", id="not UTF-8"),
        pytest.param(text_file(b"a"), "training text has 0 tokens, less than one block of 256", id="one letter"),
        pytest.param(text_file(b"One line.\nTwo.\n"), "less than one block of 256.*--block_size", id="short text"),
        pytest.param(["--block_size", "999"], "--block_size 999 must be from 2 to 256", id="block size"),
        pytest.param(["--precision", "fp8"], "fp8", id="precision"),
        pytest.param(["--loss_scale", "huge"], "huge", id="loss scale"),
        pytest.param(["--fp16"], "fp16=True", id="fp16"),
        pytest.param(["--bf16"], "bf16=True", id="bf16"),
        pytest.param(["--dtype", "int4"], "--dtype int4 is not known", id="dtype"),
        pytest.param(["--dtype", "float16", "--precision", "fp32"], "without FP32 master weights", id="fp16 in fp32"),
        pytest.param(["--train_file", "a", "--dataset_name", "b"], "both given", id="two texts"),
        pytest.param(["--validation_file", "a"], "needs --train_file", id="half a split"),
        pytest.param(["--no_such_flag"], "no_such_flag", id="flag"),
        pytest.param(["--max_steps", "many"], "invalid int value", id="value"),
    ],
)  # fmt: skip
def test_bad_input_ends_in_one_line_before_anything_is_written(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(finetune_gpt2, "python_text", sample_text)
    output_dir = tmp_path / "run"
    flags = flags(output_dir) if callable(flags) else flags
    with pytest.raises(SystemExit) as ended:
        main([*flags, "--use_cpu", "--output_dir", str(output_dir)])
    assert ended.value.code == 2
    *before, last = capsys.readouterr().err.strip().splitlines()
    assert re.match(f"finetune_gpt2.py: error: .*{message}", last)
    assert before in ([], ["usage: finetune_gpt2.py [--name value ...]   (--help lists every name)"])
    assert not output_dir.exists()


def test_another_run_is_not_written_over(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        main(["--use_cpu", "--output_dir", str(tmp_path)])
    assert re.search("holds another run.*--overwrite_output_dir.*--resume_from_checkpoint", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_the_output_directory_is_no_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file: name a directory"):
        finetune_gpt2.check_output_dir(tmp_path / "file", overwrite=True)


def test_without_a_network_the_hub_is_asked_once_and_the_cache_taken(monkeypatch):
    asked = []

    class Cached:
        @staticmethod
        def from_pretrained(name: str, local_files_only: bool) -> str:
            assert local_files_only
            return f"{name} from the cache"

    def no_network(api: Any, name: str, **settings: Any) -> None:
        asked.append(name)
        raise ConnectionError("no route to host")

    monkeypatch.setattr(HfApi, "model_info", no_network)
    assert finetune_gpt2.from_directory_or_hub(Cached, "gpt2") == "gpt2 from the cache"
    assert asked == ["gpt2"]


def test_a_tokenizer_of_another_model_is_refused(fp16_checkpoint):
    recipe, args = parse_arguments(["--model_name_or_path", str(fp16_checkpoint)])
    with pytest.raises(ValueError, match=r"the tokenizer has 301 tokens.*embeddings for 300.*--tokenizer_name"):
        finetune_gpt2.load_model(recipe, args, 301)
