"""What all tests share: a fixed seed, one thread, tiny models made from a config."""

from __future__ import annotations

import gc
import os
import sys

# GPUs are hidden from tests that did not ask for one, by `-m gpu`: they say what a CPU does, and fork processes. A
# worker of xdist has what its parent has.
if "PYTEST_XDIST_WORKER" not in os.environ and not any("gpu" in argument for argument in sys.argv):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Before torch is loaded: tiny models are ten times faster on one thread than on two loaded cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Iterator

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from hf_mp.casting.cpu import upcast
from hf_mp.casting.cpu.upcast import CPU_PRODUCTS

logging.set_verbosity_error()
logging.disable_progress_bar()

TINY = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 199, "n_positions": 48}
STANDS_FOR = {torch.float16: False, torch.bfloat16: torch.backends.mkldnn.is_available()}  # the CPU's products
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


# Without a GPU, torch.manual_seed stores its own stack trace, to seed the GPU should one come up later: 3 ms a call.
for _device in (torch.cuda, torch.xpu):
    if not _device.is_available():
        _device.manual_seed_all = lambda seed: None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # the name alone is also that of a folder
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


def pytest_collection_finish() -> None:
    """Leave the imported packages out of garbage collection: Trainer.train() collects, and each time took 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _frozen_for_the_collector() -> None:
    """As ``pytest_collection_finish``, for what the files before this one imported and compiled.

    Which is forgotten: a forward that kernels of the dispatcher serve asks for a process that compiles nothing.
    """
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield


@pytest.fixture(autouse=True)
def _one_kind_of_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every machine stands for a CPU that multiplies in BF16 and not in FP16; a test of another one sets it back."""
    for dtype, is_native in STANDS_FOR.items():
        monkeypatch.setitem(CPU_PRODUCTS, dtype, is_native)


@pytest.fixture(autouse=True)
def _no_settings_of_earlier_parameters() -> None:
    """bitsandbytes keeps a Trainer's settings for embeddings by id(), which a parameter of a later test may have."""
    if bitsandbytes := sys.modules.get("bitsandbytes"):
        bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()


@pytest.fixture
def without_first_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings begin without the gradients at several loss scales, which take as long as four steps."""
    monkeypatch.setattr("hf_mp.trainer.session.replace_first_backward", lambda *given: lambda: None)


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def other_default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """A person has called ``torch.set_default_dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.fixture
def gpt2_config() -> GPT2Config:
    return GPT2Config(**TINY, **NO_DROPOUT, bos_token_id=0, eos_token_id=0, use_cache=False)


@pytest.fixture
def gpt2(gpt2_config: GPT2Config) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(gpt2_config).train()


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Four sequences of 32 tokens, with labels."""
    ids = torch.randint(0, TINY["vocab_size"], (4, 32), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def nothing_is_small() -> Iterator[None]:
    """Ops that a CPU makes through FP32 keep tiny operands in 16 bits as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upcast, "SMALL_ELEMENTS", 0)
        yield
