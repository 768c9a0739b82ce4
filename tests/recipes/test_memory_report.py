import json
import os

import pytest
from PIL import Image
from transformers import GPT2Config

import memory_report

TINY = {
    "n_layer": 1,
    "n_embd": 32,
    "n_head": 2,
    "vocab_size": 64,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FAST = ["--precision", "fp32", "--precision", "fp16", "--batch_size", "2", "--seq_len", "16", "--gpu", "1MiB"]


@pytest.fixture
def config(tmp_path):
    GPT2Config(**TINY).save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def test_the_recipe_writes_a_page_and_a_picture(config, tmp_path, capsys):
    memory_report.main(["--model", config, *FAST, "--output_dir", str(tmp_path / "a" / "out")])
    page = (tmp_path / "a" / "out" / "memory.html").read_text()
    assert "hf_mp fp16" in page and "1.00 MiB of GPU memory" in page
    with Image.open(tmp_path / "a" / "out" / "memory.png") as picture:
        assert picture.size == (1080, 960)
    assert "One training step on a GPU: 2 x 16 tokens" in capsys.readouterr().out


def test_the_recipe_measures_too(config, tmp_path, capsys):
    memory_report.main(["--model", config, *FAST, "--measure", "--output_dir", str(tmp_path / "out")])
    assert "Predicted and measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--gpu", "24GB"], "write GiB"),
        (["--seq_len", "33"], "longer than the 32 positions"),
        (["--load"], "cannot be loaded"),
    ],
)
def test_bad_input_writes_nothing(config, tmp_path, flags, message, capsys):
    with pytest.raises(SystemExit, match=message):
        memory_report.main(["--model", config, *FAST, *flags, "--output_dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_an_output_directory_that_is_a_file(config, tmp_path):
    (tmp_path / "file").write_text(json.dumps(1))
    with pytest.raises(SystemExit, match="cannot be written"):
        memory_report.main(["--model", config, *FAST, "--output_dir", str(tmp_path / "file")])
    assert sorted(os.listdir(tmp_path)) == ["file", "tiny"]
