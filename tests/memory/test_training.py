import re

import pytest
import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, GradientState, PartialState
from covering import covering
from torch import nn
from transformers import GPT2Config, LlamaConfig, Trainer, TrainingArguments, trainer_optimizer
from transformers.training_args import OptimizerNames

import hf_mp
from _tensor_memory import peak_tensor_bytes
from hf_mp.memory import training
from hf_mp.memory.batches import Inputs, make_batch
from hf_mp.memory.ledger import Category, Phase
from hf_mp.memory.precisions import TRAINING_PRESETS
from hf_mp.memory.settings import make_settings
from hf_mp.memory.training import estimate_training_memory

from .conftest import CONFIGS

pytestmark = pytest.mark.slow

STEP = {"batch_size": 2, "seq_len": 32}


def estimate(model="gpt2-4", precision="fp32", **settings):
    return estimate_training_memory(CONFIGS[model](), precision, **{**STEP, **settings})


@pytest.fixture
def accelerator():
    """A live one, and nothing of it afterwards."""
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


STATES = (AcceleratorState, PartialState, GradientState)


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adafactor", "adamw_bnb_8bit"])
@pytest.mark.parametrize("how", ["estimate", "measure"])
def test_a_live_accelerator_is_left_alone(accelerator, how, optimizer):
    before = [{**state._shared_state} for state in STATES]
    if how == "estimate":
        estimate(optimizer=optimizer)
    else:
        hf_mp.measure_training_memory(CONFIGS["gpt2-4"](), "fp32", **STEP, device="cpu", optimizer=optimizer)
    for state, values in zip(STATES, before, strict=True):
        assert state._shared_state.keys() == values.keys() and values
        assert all(state._shared_state[name] is value for name, value in values.items())
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    assert accelerator.distributed_type is DistributedType.NO


@pytest.mark.parametrize("name", [each.value for each in OptimizerNames])
@pytest.mark.parametrize("has_table", [True, False])
def test_optimizers_are_those_of_training_arguments(name, has_table, monkeypatch):
    """Also where one cannot be made: its package is not here, or it needs settings."""

    def made(make):
        try:
            return make()
        except (ValueError, ImportError) as error:
            return f"{type(error).__name__}: {error}"

    args = TrainingArguments(output_dir="unused", optim=name, use_cpu=True, report_to="none")
    if not has_table:
        monkeypatch.delattr(trainer_optimizer, "OptimizerContext")
    ours = made(lambda: training._optimizer_class(name, None))
    assert repr(ours) == repr(made(lambda: Trainer.get_optimizer_cls_and_kwargs(args, None)))


# every preset with one model, and of the other models those where they are unlike it
FEW = {
    *(("gpt2-4", precision) for precision in TRAINING_PRESETS),
    ("gpt2-12", "fp32"),
    *(("llama", precision) for precision in ("fp32", "fp16", "int8-lora", "nf4-lora")),
    *(("bert", precision) for precision in ("fp16", "bf16-lean")),
}
CASES = [
    pytest.param(model, precision, marks=[] if (model, precision) in FEW else pytest.mark.exhaustive)
    for model in CONFIGS
    for precision in TRAINING_PRESETS
]


@pytest.mark.parametrize("model, precision", CASES)
def test_predicted_peaks_are_the_measured_ones(model, precision):
    predicted = estimate(model, precision, device="cpu")
    measured = hf_mp.measure_training_memory(CONFIGS[model](), precision, **STEP, device="cpu")
    assert measured.measured and not predicted.measured
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.03)
    assert predicted.peak_phase == measured.peak_phase
    for category in Category:
        difference = abs(predicted.bytes_by_category[category] - measured.bytes_by_category[category])
        assert difference <= 0.03 * measured.peak_bytes, category


SETTINGS = [
    {"gradient_checkpointing": True},
    {"accumulation_steps": 3},
    {"optimizer": "sgd"},
    {"optimizer": "adamw_torch"},
    {"optimizer": "adafactor"},
]


@pytest.mark.parametrize(("settings", "precision"), covering(SETTINGS, ["fp16", "bf16-lean"], together=1), ids=str)
def test_predicted_peaks_hold_for_other_settings(settings, precision):
    predicted = estimate(precision=precision, device="cpu", **settings)
    measured = hf_mp.measure_training_memory(CONFIGS["gpt2-4"](), precision, **STEP, device="cpu", **settings)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.03)


def where_weights_dominate() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=500, max_position_embeddings=128,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        ("int8-lora", {"batch_size": 1, "seq_len": 16}),
        pytest.param(
            "fp16", {"batch_size": 2, "seq_len": 96, "accumulation_steps": 3}, marks=pytest.mark.exhaustive
        ),  # attention keeps its sums
    ],
)
def test_predicted_peaks_hold_where_weights_dominate(precision, settings):
    settings = {"gradient_checkpointing": True, "device": "cpu", **settings}
    predicted = estimate_training_memory(where_weights_dominate(), precision, **settings)
    measured = hf_mp.measure_training_memory(where_weights_dominate(), precision, **settings)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.03)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp16-lean", "int8-lora"])
def test_the_measured_peak_is_the_allocators(precision):
    found = []

    def measure():
        found.append(hf_mp.measure_training_memory(CONFIGS["llama"](), precision, **STEP, device="cpu"))

    # The profiler sees what kernels take inside of an op, too.
    assert peak_tensor_bytes(measure, torch.device("cpu")) == pytest.approx(found[0].peak_bytes, rel=0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "pure-bf16"])
def test_predicted_peaks_are_those_of_a_gpu(precision):
    settings = {"batch_size": 8, "seq_len": 512}
    predicted = estimate_training_memory("gpt2", precision, **settings)
    measured = hf_mp.measure_training_memory("gpt2", precision, **settings, device="cuda")
    assert predicted.peak_bytes == pytest.approx(measured.allocator_peak_bytes, rel=0.05)


def test_the_recorder_agrees_with_torchs_own_tracker():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    config = CONFIGS["gpt2-4"]()
    ours = estimate(device="cpu")
    planned = training.meta_model(config, "fp32")
    cpu = torch.device("cpu")
    settings = make_settings(config, "fp32", **STEP)
    prepared = training.prepare_model(planned, settings)
    with FakeTensorMode(allow_non_fake_inputs=True):
        training.replace_tensors(prepared, cpu)
        setup = training.make_training_setup(prepared, settings, cpu)
        batch = make_batch(Inputs.of(planned, "fp32"), settings, cpu)
        tracker = MemTracker()
        tracker.track_external(setup.model, setup.optimizer, *batch.values())
        with tracker:
            for _ in range(2):
                training.train_one_step(setup, batch)
                setup.optimizer.zero_grad()
                tracker.reset_mod_stats()
    peak = next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"]
    assert ours.peak_bytes == peak


@pytest.mark.parametrize("precision", ["fp16-lean", "bf16-lean"])
def test_the_kernel_of_a_gpu_updates_without_values_in_fp32(precision):
    found = estimate(precision=precision).by_phase[Phase.UPDATE][Category.TEMPORARIES]
    assert found < 20 * 1024  # of the reference: several times a weight in FP32


def test_one_model_takes_the_steps_of_all_batches(monkeypatch):
    taken = []
    take = training.train_one_step
    monkeypatch.setattr(training, "train_one_step", lambda one, *rest: taken.append(one) or take(one, *rest))
    config = CONFIGS["gpt2-4"]()
    with training.memory_predictor(config, "fp16", batch_size=1, seq_len=64) as predict:
        peaks = {size: predict(size).peak_bytes for size in (1, 8, 3)}
    assert len(taken) == 4 and len(set(map(id, taken))) == 1  # the first of all steps makes the optimizer's state
    assert peaks == {
        size: estimate_training_memory(config, "fp16", batch_size=size, seq_len=64).peak_bytes for size in peaks
    }


# What the categories mean


def elements(model="gpt2-4"):
    return training.meta_model(CONFIGS[model](), "fp32").num_parameters()


@pytest.mark.parametrize(
    "precision, weights, copies, gradients, state",
    [
        ("fp32", 4, 0, 4, 8),
        ("fp16", 4, 2, 4, 8),
        ("bf16", 4, 2, 4, 8),
        ("pure-bf16", 0, 2, 2, 4),
        ("fp16-lean", 2, 2, 2 + 2 * 600 * 64 / 242_560, 8),  # the tied embedding sums its gradients in FP32
        ("fp16-adamw8bit", 4, 2, 4, 2),
        ("sgd", 4, 0, 4, 0),
    ],
)
def test_bytes_of_a_parameter_are_those_of_the_design(precision, weights, copies, gradients, state):
    """Embeddings of positions have no working copy, and biases are too small for 8 bits: hence the tolerance."""
    how = {"optimizer": "sgd"} if precision == "sgd" else {"precision": precision}
    parts = estimate(**how, device="cpu").by_phase.values()
    found = {category: max(part[category] for part in parts) for category in Category}
    n = elements()
    assert found[Category.MASTER_WEIGHTS] == pytest.approx(weights * n, rel=0.05)
    assert found[Category.WORKING_COPIES] == pytest.approx(copies * n, rel=0.05)
    assert found[Category.GRADIENTS] == pytest.approx(gradients * n, rel=0.05)
    assert found[Category.OPTIMIZER_STATE] == pytest.approx(state * n, rel=0.2 if state == 2 else 0.05)


def test_lora_trains_little_and_freezes_the_rest():
    found = estimate(precision="int8-lora", device="cpu").by_phase[Phase.UPDATE]
    assert found[Category.FROZEN_WEIGHTS] > 10 * found[Category.MASTER_WEIGHTS] > 0
    assert found[Category.OPTIMIZER_STATE] == pytest.approx(2 * found[Category.MASTER_WEIGHTS], rel=0.05)


def test_checkpointing_keeps_fewer_activations_and_logits_stay():
    plain, checkpointed = (estimate("gpt2-12", gradient_checkpointing=choice, batch_size=8) for choice in (False, True))
    assert checkpointed.peak_bytes < 0.7 * plain.peak_bytes
    assert checkpointed.by_phase[Phase.FORWARD][Category.LOGITS_AND_LOSS] >= 8 * 32 * 300 * 4


def test_more_micro_batches_than_two_change_nothing():
    assert estimate(accumulation_steps=2).peak_bytes == estimate(accumulation_steps=5).peak_bytes
    assert estimate(accumulation_steps=2).peak_bytes >= estimate(accumulation_steps=1).peak_bytes


def test_the_peak_is_that_of_the_highest_part():
    found = estimate(precision="fp16")
    assert list(found.by_phase) == [Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE]
    assert found.by_phase[found.peak_phase] == found.bytes_by_category
    assert max(sum(part.values()) for part in found.by_phase.values()) == found.peak_bytes
    assert found.peak_op and found.peak_bytes % 512 == 0  # a GPU's blocks


def test_a_gpu_keeps_no_matrix_of_attention_scores():
    def activations(seq_len, device, precision="fp16"):
        config = GPT2Config(
            n_layer=1, n_embd=32, n_head=4, vocab_size=64, n_positions=512, bos_token_id=0, eos_token_id=0
        )
        found = estimate_training_memory(config, precision, batch_size=1, seq_len=seq_len, device=device)
        return found.by_phase[Phase.FORWARD][Category.ACTIVATIONS]

    assert activations(512, "cuda") == pytest.approx(2 * activations(256, "cuda"), rel=0.05)
    # with dropout, torch's attention on a CPU does; ours keeps a bit for each score
    assert activations(512, "cpu", "fp32") > 3 * activations(256, "cpu", "fp32")
    assert activations(512, "cpu") < 2.6 * activations(256, "cpu")


def test_nothing_is_left_behind():
    from transformers.utils import import_utils

    before = import_utils.is_fake_tensor
    estimate(precision="fp16", device="cuda")
    assert import_utils.is_fake_tensor is before
    x = torch.ones(2, 2, device="meta", requires_grad=True)
    assert "NativeDropout" not in type(torch.dropout(x, 0.5, True).grad_fn).__name__
    with pytest.raises(RuntimeError, match="fused"):
        parameter = torch.nn.Parameter(torch.empty(2, device="meta"))
        parameter.grad = torch.empty(2, device="meta")
        torch.optim.AdamW([parameter], fused=True).step()


# Bad input


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"precision": "fp8"}, r"'fp8' is not known for training: use one of fp32, fp16, bf16, fp16-lean"),
        ({"batch_size": 0}, r"batch_size=0 is not possible"),
        ({"batch_size": 1.5}, r"batch_size=1.5 is not possible"),
        ({"batch_size": True}, r"batch_size=True is not possible"),
        ({"seq_len": 1}, r"seq_len=1 is not possible: use a whole number from 2"),
        ({"seq_len": 65}, r"seq_len=65 is longer than the 64 positions.*at most 64"),
        ({"accumulation_steps": 0}, r"accumulation_steps=0 is not possible"),
        ({"optimizer": "adamm"}, r"optimizer='adamm' cannot be made"),
        (
            {"precision": "fp16-adamw8bit", "optimizer": "sgd"},
            r"sets optimizer='adamw_bnb_8bit': leave optimizer out",
        ),
        ({"device": "tpu"}, r"device='tpu' cannot be predicted for: use 'cuda' or 'cpu'"),
        (
            {"precision": "fp16-lean", "free_gradients": "backward", "accumulation_steps": 2},
            r"accumulation_steps=2 adds gradients up",
        ),
        ({"precision": "trainer-fp16", "free_gradients": "backward"}, r"needs a lean layout"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        estimate(**settings)


def test_measuring_leaves_a_given_model_alone(gpt2):
    before = {name: value.clone() for name, value in gpt2.state_dict().items()}
    hf_mp.measure_training_memory(gpt2, "fp16", batch_size=2, seq_len=16, device="cpu")
    assert all(torch.equal(value, before[name]) for name, value in gpt2.state_dict().items())
    assert not any(parameter.grad is not None for parameter in gpt2.parameters())


@pytest.mark.parametrize("precision", ["fp16-lean", "bf16-lean"])
def test_gradients_freed_in_backward_are_predicted(precision):
    settings = {"batch_size": 1, "seq_len": 8, "device": "cpu"}
    config = where_weights_dominate()
    kept = estimate_training_memory(config, precision, **settings)
    found = estimate_training_memory(config, precision, free_gradients="backward", **settings)
    measured = hf_mp.measure_training_memory(config, precision, free_gradients="backward", **settings)
    assert found.settings.free_gradients == "backward"
    assert found.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)
    # the two bytes of each gradient, but for the largest one
    assert found.peak_bytes < kept.peak_bytes - found.parameters


def test_evaluated_by_itself_it_is_one_readable_line():
    memory = estimate(device="cpu")
    assert re.match(r"<TrainingMemory of GPT2LMHeadModel in fp32, 2 x 32 tokens, estimated on cpu: peak ", repr(memory))
    assert f"MiB in {memory.peak_phase} (" in repr(memory) and "frozen weights" not in repr(memory)
