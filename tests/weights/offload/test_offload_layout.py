"""A lean layout with host memory trains bit for bit as the one without."""

from __future__ import annotations

import copy
import functools
from typing import Any, cast

import pytest
import torch
from offloading import OPTIMIZERS, STEPS, WINDOW, Run, Step, differences, fused_in_groups, make_model, start
from simulated_streams import SimulatedStreams
from tiny import same
from torch import nn
from torch.optim import SGD, AdamW

import hf_mp
from hf_mp.kernels import gradient_scan, registry
from hf_mp.kernels.adamw import adamw_reference
from hf_mp.kernels.gradient_scan import Scan
from hf_mp.weights import master_weight_optimizer, slots
from hf_mp.weights.offload import layout, optimizer
from hf_mp.weights.offload import parameter as offloaded_parameter
from hf_mp.weights.offload.parameter import OffloadedParameter
from hf_mp.weights.offload.transfers import Transfers
from hf_mp.weights.split_parameter import SplitParameter, gradient_and_factor, has_gradient, master_value

LEAN = ("bf16-lean", "fp16-lean")
OFFLOADS = ("optimizer", "all")


@functools.cache
def without(name: str, precision: str, **settings: Any) -> Run:
    return start(OPTIMIZERS[name], precision, None, **settings).train()


# Bit for bit


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("precision", LEAN)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_trained_model_is_that_of_the_preset_without_offload(name: str, precision: str, offload: str) -> None:
    """With accumulation, clipping and a skipped step."""
    if name == "8-bit AdamW":
        pytest.importorskip("bitsandbytes")
    run = start(OPTIMIZERS[name], precision, offload)
    before = run.weights()
    run.train()
    assert differences(run, without(name, precision)) == []
    assert run.skipped == [step.overflows for step in STEPS] and not same(before, run.weights())
    assert len(run.norms) == 2 and min(run.norms) > 0.05  # it does clip


class Kernels:
    """In the place of those of a GPU, their references; ``sizes``: of each update; ``made``: how many are kept."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.made = 0

    def launcher(self, name: str) -> Any:
        return {"adamw": self.update, "gradient_scan": self.scan}.get(name)

    def update(self, tensors: Any, counts: Any) -> Any:
        assert sum(counts) == len(tensors)
        self.made += 1

        def run(gradients: Any, settings: Any, factor: Any = None, found_inf: Any = None) -> None:
            self.sizes.append(sum(gradient.numel() for gradient in gradients))
            pairs = zip(tensors, gradients, strict=True)  # a kernel reads addresses, and no shapes
            given = iter(one._replace(gradient=gradient.view_as(one.gradient)) for one, gradient in pairs)
            for its, count in zip(settings, counts, strict=True):
                adamw_reference([next(given) for _ in range(count)], its, factor)

        return run

    def scan(self, tensors: Any, *, sums_squares: bool = False) -> Any:
        largest = torch.stack([tensor.float().abs().max() for tensor in tensors]).max()
        squares = torch.stack([tensor.float().square().sum().double() for tensor in tensors]).sum()
        return (largest, squares) if sums_squares else Scan(largest, squares.sqrt().float())


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    monkeypatch.setenv("HF_MP_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernels = Kernels()
    monkeypatch.setattr(registry, "_has_triton", lambda: True)
    monkeypatch.setattr(registry, "launcher", kernels.launcher)
    for module in (gradient_scan, master_weight_optimizer, offloaded_parameter):
        monkeypatch.setattr(module, "is_on_host", lambda tensor: False)
    return kernels


@pytest.mark.parametrize("offload", OFFLOADS)
def test_the_kernels_of_a_gpu_take_chunks(offload: str, kernels: Kernels) -> None:
    expected = start(fused_in_groups, "bf16-lean", None).train()
    whole = max(kernels.sizes)
    kernels.sizes.clear()
    run = start(fused_in_groups, "bf16-lean", offload).train()
    assert differences(run, expected) == []
    assert sum(kernels.sizes) == 4 * sum(p.numel() for p in run.model.parameters())  # a step was skipped
    assert max(kernels.sizes) <= WINDOW // 10 < whole


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("changed", ["nothing", "weights", "state", "windows"])
def test_kernels_are_kept_until_what_they_write_is_elsewhere(changed: str, offload: str, kernels: Kernels) -> None:
    def train(choice: str | None) -> tuple[Run, int]:
        run = start(fused_in_groups, "bf16-lean", choice).train([Step()])
        before = kernels.made
        if changed == "weights":
            for weight in run.model.parameters():
                weight.data = weight.data.clone()
        elif changed == "state":
            run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        elif changed == "windows" and choice:
            run.optimizer.transfers.grow(2 * WINDOW)
        run.train([Step()])
        return run, kernels.made - before

    expected, _ = train(None)
    run, made_again = train(offload)
    assert differences(run, expected) == []
    assert (made_again > 0) == (changed != "nothing")


@pytest.mark.parametrize("name", ["AdamW", "fused AdamW"])
def test_a_step_that_raises_leaves_no_state_in_a_window(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(OPTIMIZERS[name], "bf16-lean", "all").train([Step()])
    run.backward()

    def interrupt(*given: Any, **settings: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "adamw_", interrupt)
        patch.setattr(torch.optim.AdamW, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.optimizer.step()
    rooms = {id(room.view) for rooms in run.optimizer.rooms.values() for room in rooms.values()}
    state = [value for one in run.optimizer.state.values() for key, value in one.items() if key != "step"]
    assert all(id(value) in rooms for value in state) and not any(p.place.inside for p in run.model.parameters())
    run.optimizer.step()
    assert all(torch.isfinite(weight).all() for weight in run.weights())


def test_a_sum_whose_norm_leaves_fp32_is_clipped_to_nothing() -> None:
    """As on the device, where FP32 gradients are multiplied before they are checked."""
    runs = []
    for offload in (None, *OFFLOADS):
        run = start(fused_in_groups, "bf16-lean", offload)
        for _ in range(2):
            run.backward(2, 1e28)
            run.norms.append(run.optimizer.clip_grad_norm_(0.5).item())
            run.optimizer.step()
            run.skipped.append(run.optimizer.step_was_skipped)
            run.optimizer.zero_grad()
        runs.append(run.train([Step()]))
    assert runs[0].norms[0] == torch.inf and runs[0].skipped == [False] * 3
    assert differences(runs[1], runs[0]) == differences(runs[2], runs[0]) == []


def test_max_grad_norm_clips_in_the_step() -> None:
    steps = [Step(), Step(2), Step(overflows=True), Step()]
    expected = start(fused_in_groups, "fp16-lean", None, max_grad_norm=0.05).train(steps)
    for offload in OFFLOADS:
        run = start(fused_in_groups, "fp16-lean", offload, max_grad_norm=0.05).train(steps)
        assert differences(run, expected) == []


def test_checkpointed_blocks_and_dropout() -> None:
    runs = []
    for offload in (None, *OFFLOADS):
        model = make_model()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for dropout in [module for module in model.modules() if isinstance(module, nn.Dropout)]:
            dropout.p = 0.1
        torch.manual_seed(5)
        runs.append(start(fused_in_groups, "bf16-lean", offload, model).train())
    assert differences(runs[1], runs[0]) == differences(runs[2], runs[0]) == []


def test_adapters_alone_are_in_host_memory() -> None:
    peft = pytest.importorskip("peft")
    runs = []
    for offload in (None, *OFFLOADS):
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        model = make_model().bfloat16()
        torch.manual_seed(1)
        runs.append(start(lambda ps: AdamW([p for p in ps if p.requires_grad], 1e-2, fused=True), "bf16-lean", offload,
            peft.get_peft_model(model, config)).train())  # fmt: skip
    assert differences(runs[1], runs[0]) == differences(runs[2], runs[0]) == []
    own = {name for name, p in runs[2].model.named_parameters() if isinstance(p, OffloadedParameter)}
    assert own and all("lora_" in name for name in own)


class Parts(nn.Module):
    """Weights of all kinds: of no elements, of one, in another order in memory, of statistics, and one without use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(2, 40, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm, self.linear, self.unused = nn.BatchNorm2d(40), nn.Linear(40, 8), nn.Linear(9, 9)
        self.scale, self.none = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(self.convolution(x)).mean((2, 3))) * self.scale + self.none.sum()


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("name", ["fused AdamW", "SGD with momentum"])
def test_weights_of_all_kinds(name: str, offload: str) -> None:
    runs = []
    for where in (None, offload):
        model = Parts()
        run = Run(*hf_mp.prepare(model, OPTIMIZERS[name](model.parameters()), "bf16-lean", offload=where))
        for seed in range(3):
            x = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(seed))
            run.model(x).square().mean().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        runs.append(run)
    assert differences(runs[1], runs[0]) == []
    assert not runs[1].optimizer.state.get(runs[1].model.unused.weight)


def test_a_parameter_in_several_pieces_counts_each_step_once() -> None:
    run = start(fused_in_groups, "bf16-lean", "all").train([Step(), Step()])
    weight = run.model.transformer.h[0].mlp.c_fc.weight
    pieces = [piece for chunk in run.optimizer._chunks for piece in chunk.pieces if piece.parameter is weight]
    assert len(pieces) > 2
    assert all(run.optimizer.state[p]["step"] == 2 for p in run.model.parameters())


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("name", ["fused AdamW", "SGD with momentum"])
def test_in_any_order_of_copies_and_kernels(name: str, offload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [Step(), Step(2, 0.05), Step()]
    expected = start(OPTIMIZERS[name], "bf16-lean", None).train(steps)
    for seed in range(15):
        monkeypatch.setattr(layout, "streams_of", lambda device, seed=seed: SimulatedStreams(seed))
        assert differences(start(OPTIMIZERS[name], "bf16-lean", offload).train(steps), expected) == [], seed


# Where things are


def test_a_skipped_step_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    stream = Transfers.stream
    monkeypatch.setattr(Transfers, "stream", lambda self, *given: calls.append(1) or stream(self, *given))
    run = start(fused_in_groups, "fp16-lean", "optimizer").train([Step()])
    assert calls == [1]
    before = run.state()
    run.train([Step(overflows=True)])
    assert calls == [1] and same(run.state(), before) and run.skipped == [False, True]


def memory_of(tensors: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.parametrize("name", ["fused AdamW", "SGD with momentum", "8-bit AdamW"])
def test_state_remainders_and_gradients_are_in_one_slab_a_dtype(name: str) -> None:
    if name == "8-bit AdamW":
        pytest.importorskip("bitsandbytes")
    run = start(OPTIMIZERS[name], "bf16-lean", "all").train([Step(), Step()])
    run.backward()
    places = [p.place for p in run.model.parameters()]
    assert all(place.held is not None and not place.inside for place in places)
    assert len(memory_of(place.rooms["remainder"].view for place in places)) == 1
    assert len(memory_of(place.rooms["gradient"].view for place in places)) == 1
    large = [
        v for s in run.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.numel() > 256
    ]
    rooms = {id(room.view): room for rooms in run.optimizer.rooms.values() for room in rooms.values()}
    assert large and all(id(value) in rooms for value in large)
    assert len(memory_of(large)) == len({value.dtype for value in large})


def test_only_tied_weights_have_room_for_sums_until_gradients_are_accumulated() -> None:
    run = start(fused_in_groups, "bf16-lean", "all")
    tied = run.model.lm_head.weight
    with_room = lambda: [p for p in run.model.parameters() if "lower half of a gradient" in p.place.rooms]  # noqa: E731
    assert [id(p) for p in with_room()] == [id(tied)]
    run.backward()
    assert len(with_room()) == 1
    run.backward()
    parameters = list(run.model.parameters())
    assert len(with_room()) == len(parameters)
    assert len(memory_of(p.place.rooms["lower half of a gradient"].view for p in parameters if p is not tied)) == 1


def test_a_gradient_is_moved_as_soon_as_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(slots._GROUP_ELEMENTS, "cpu", 1)  # small ones would leave together
    run, found = start(fused_in_groups, "bf16-lean", "all"), []
    parameters, stored_grad = list(run.model.parameters()), cast(Any, torch.Tensor.grad).__get__

    def count(gradient: torch.Tensor) -> None:
        on_device = [p for p in parameters if vars(p).get("_scaled_gradient") is not None or stored_grad(p) is not None]
        found.append((len(on_device), sum(p.place.held is not None for p in parameters)))

    # The gradient of what the embeddings give is nearly the last one of a backward.
    run.model.transformer.drop.register_forward_hook(lambda module, args, out: out.register_hook(count) and None)
    run.backward(2)
    assert found == [(0, len(parameters) - 1), (0, len(parameters))]
    assert all(map(has_gradient, parameters))
    run.optimizer.step()
    assert not any(map(has_gradient, parameters))


@pytest.mark.parametrize("precision", LEAN)
def test_a_gradient_that_is_read_is_true_and_stays_on_the_device(precision: str) -> None:
    runs = [start(lambda ps: SGD(ps, lr=0.1), precision, offload) for offload in (None, "all")]
    assert all(p.grad is None for run in runs for p in run.model.parameters())  # which reads nothing
    for micro_batch in range(2):
        for run in runs:
            run.backward()
        for one, other in zip(*[run.model.parameters() for run in runs], strict=True):
            (found, factor), (expected, its) = gradient_and_factor(other), gradient_and_factor(one)
            assert torch.equal(found, expected) and (factor is None) == (its is None)  # type: ignore[arg-type]
            is_there = micro_batch == 1 and other is runs[1].model.lm_head.weight
            assert (other.place.held is None) == is_there  # a look changes nothing
        for run in runs:
            run.model.lm_head.weight.grad.mul_(0.5)
        assert torch.equal(runs[0].model.lm_head.weight.grad, runs[1].model.lm_head.weight.grad)
        assert runs[1].model.lm_head.weight.place.held is None
        assert runs[1].model.transformer.h[0].ln_1.weight.place.held is not None, micro_batch
    gradient = runs[1].model.lm_head.weight.grad
    for run in runs:
        run.optimizer.step()
    assert differences(*runs) == [] and gradient.any()


def test_gradients_keep_their_scale_when_the_next_one_is_set() -> None:
    """Of two optimizers, the first step sets the next loss scale; the gradients of the second have the last one."""
    ends = []
    for offload in (None, "all"):
        model, runtime = make_model(), hf_mp.MixedPrecision("fp16-lean", offload=offload)
        parameters = list(runtime.attach(model).parameters())
        optimizers = [runtime.attach_optimizer(SGD(part, lr=0.5)) for part in (parameters[:5], parameters[5:])]
        Run(model, None).backward()
        scale = runtime.scaler.get_scale()
        optimizers[0].step()
        assert runtime.scaler.get_scale() != scale
        optimizers[1].step()
        ends.append([master_value(p) for p in parameters])
    assert same(*ends)


def test_values_that_other_code_writes_have_priority() -> None:
    runs = [start(fused_in_groups, "bf16-lean", offload).train([Step()]) for offload in (None, "all")]
    for run in runs:
        weight = run.model.transformer.wte.weight
        with torch.no_grad():
            weight.mul_(1.01)
            weight[3] = 0.1
            weight.data[4].fill_(0.2)
        weight.data = weight.data.clone()
        run.optimizer.state[weight]["exp_avg"] = torch.full_like(run.optimizer.state[weight]["exp_avg"], 0.01)
        run.train([Step(), Step()])
    assert differences(*runs) == []


def test_a_state_that_was_cleared_begins_with_zeros() -> None:
    runs = [start(fused_in_groups, "bf16-lean", offload).train([Step()]) for offload in (None, "optimizer")]
    for run in runs:
        run.optimizer.state.clear()
        run.train([Step()])
    assert differences(*runs) == []


def test_schedulers_and_weights_that_join_later() -> None:
    runs = []
    for offload in (None, "all"):
        model = make_model()
        model.transformer.wpe.requires_grad_(False)
        run = start(
            lambda ps: AdamW([p for p in ps if p.requires_grad], lr=1e-2, fused=True), "bf16-lean", offload, model
        )
        scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
        run.train([Step()])
        scheduler.step()
        model.transformer.wpe.requires_grad_(True)
        run.backward()  # which splits it
        run.optimizer.add_param_group({"params": [model.transformer.wpe.weight]})
        run.optimizer.step()
        run.optimizer.zero_grad()
        runs.append(run.train([Step(2, 0.05)]))
    assert differences(*runs) == []
    assert isinstance(runs[1].model.transformer.wpe.weight, OffloadedParameter)


# Detaching and attaching again


@pytest.mark.parametrize("offload", OFFLOADS)
def test_detaching_leaves_an_ordinary_model_and_its_state(offload: str) -> None:
    ends = []
    for where in (None, offload):
        model = make_model()
        own = fused_in_groups(model.parameters())
        run = Run(*hf_mp.prepare(model, own, "bf16-lean", offload=where)).train([Step(2)])
        run.backward()
        hf_mp.detach(model)
        assert all(type(p) is nn.Parameter and p.dtype is torch.float32 for p in model.parameters())
        assert not any("place" in vars(p) for p in model.parameters())
        before = [p.detach().clone() for p in model.parameters()]
        own.step()
        assert not same(before, model.parameters())
        # The optimizer as it was given trains on under another precision.
        own.zero_grad()
        again = Run(*hf_mp.prepare(model, own, "fp16-lean", offload=where)).train()
        ends.append(again)
    assert differences(*ends) == []


def test_the_optimizer_of_a_training_before_is_used_again() -> None:
    ends = []
    for offload in (None, "all"):
        run = start(fused_in_groups, "bf16-lean", offload).train([Step(), Step(2)])
        hf_mp.detach(run.model)
        runtime = hf_mp.MixedPrecision("bf16-lean", offload=offload)
        runtime.attach(run.model)
        assert runtime.attach_optimizer(run.optimizer) is run.optimizer
        ends.append(run.train())
    assert differences(*ends) == []


def test_a_deep_copy_has_host_memory_of_its_own() -> None:
    import copy

    run = start(fused_in_groups, "bf16-lean", "all").train([Step()])
    twin = copy.deepcopy(run.model)
    assert all(p.dtype is torch.float32 for p in twin.parameters())
    Run(twin, None).backward()
    ours, theirs = ([p.place.rooms["remainder"].view for p in model.parameters()] for model in (run.model, twin))
    assert not memory_of(ours) & memory_of(theirs)
    assert same(map(master_value, run.model.parameters()), map(master_value, twin.parameters()))


def test_a_model_that_goes_leaves_nothing() -> None:
    import gc
    import weakref

    run = start(fused_in_groups, "bf16-lean", "all").train([Step()])
    slab = weakref.ref(run.model.lm_head.weight.place.rooms["remainder"].slab)
    del run
    gc.collect()
    assert slab() is None


# Refused


class Unknown(SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_optimizers_that_cannot_be_streamed_are_refused() -> None:
    model = make_model()
    with pytest.raises(ValueError, match=r"a few parameters at a time.*whether Unknown allows.*adamw_torch_fused"):
        hf_mp.prepare(model, Unknown(model.parameters()), "bf16-lean", offload="optimizer")
    assert all(p.dtype is torch.float32 for p in model.parameters())
    bitsandbytes = pytest.importorskip("bitsandbytes")
    paged = bitsandbytes.optim.PagedAdamW8bit(model.parameters())
    with pytest.raises(ValueError, match=r"PagedAdamW8bit pages its state .*: use the one without pages"):
        hf_mp.prepare(model, paged, "bf16-lean", offload="all")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offload": "cpu"}, r"offload='cpu' is not known: use 'optimizer' or 'all', or None"),
        (
            {"offload": "all", "policy": "bf16"},
            r"needs a lean layout.*not precision='bf16': use 'fp16-lean' or",
        ),
        ({"offload": "all", "free_gradients": "backward"}, r"free_gradients='backward' updates.*leave free_gradients"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf_mp.MixedPrecision(**{"policy": "bf16-lean", **settings})


def test_memory_that_is_not_there_is_an_error_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [10**9]
    monkeypatch.setattr("hf_mp.weights.offload.host_memory.free_bytes", lambda: free[0])
    model = make_model()
    start(fused_in_groups, "bf16-lean", "all", model).model.zero_grad()
    hf_mp.detach(model)
    for free[0] in (1000, 100_000):  # for the remainders, and for the moments
        with pytest.raises(MemoryError, match=r"offload needs .* bytes\) of host memory, and .* are free"):
            start(fused_in_groups, "bf16-lean", "all", model)
        assert all(type(p) is nn.Parameter and p.dtype is torch.float32 for p in model.parameters())


def test_a_weight_of_another_shape_is_refused() -> None:
    weight = start(fused_in_groups, "bf16-lean", "optimizer").model.lm_head.weight
    with pytest.raises(RuntimeError, match=r"shape \(64, 32\) was given a value of shape \(3, 32\).*detach"):
        weight.data = torch.zeros(3, 32)


def test_sparse_gradients_are_refused_by_the_kernel() -> None:
    model = nn.Embedding(50, 8, sparse=True)
    run = Run(*hf_mp.prepare(model, AdamW(model.parameters(), fused=True), "bf16-lean", offload="optimizer"))
    run.model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradient, and torch's Adam takes"):
        run.optimizer.step()


def test_weights_on_several_devices_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"trains weights on one device, and these"):
        hf_mp.MixedPrecision("bf16-lean", offload="all").attach(model)


def test_a_model_that_was_moved_after_attaching_is_refused() -> None:
    run = start(fused_in_groups, "bf16-lean", "optimizer")
    run.backward()
    run.optimizer.transfers.device = torch.device("meta")  # as if the model had come from there
    with pytest.raises(RuntimeError, match=r"moved to cpu after it was attached on meta.*: move the model, then"):
        run.optimizer.step()


def test_nothing_of_it_is_imported_without_it() -> None:
    import subprocess
    import sys

    code = "import sys, torch, hf_mp; m = torch.nn.Linear(2, 2); o = torch.optim.AdamW(m.parameters(), fused=True); "
    code += "m, o = hf_mp.prepare(m, o, 'bf16-lean'); m(torch.ones(1, 2)).sum().backward(); o.step(); "
    code += "print([name for name in sys.modules if 'offload' in name and name.startswith('hf_mp')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_splitting_moves_one_remainder_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[int] = []
    make_split = layout.make_split

    def counted(parameter: nn.Parameter, dtype: torch.dtype) -> None:
        make_split(parameter, dtype)
        there.append(sum(type(p) is SplitParameter for p in model.parameters()))

    monkeypatch.setattr(layout, "make_split", counted)
    model = make_model()
    start(fused_in_groups, "bf16-lean", "optimizer", model)
    assert len(there) > 5 and max(there) == 1
