"""torch.compile and torch.func under our autocast: the same numbers as without them."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from tiny import Using, assert_true, attached, gradients_of, take_step
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hf_mp
from hf_mp.casting.mode import active_autocast, autocast
from hf_mp.scaling.scalers import DynamicLossScaler, StaticLossScaler
from hf_mp.step.mixed_precision import MixedPrecision

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LOWER = pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])
NOT_DISTRIBUTED = covering(["eager", "aot_eager"], [FP16, BF16], together=1)
EACH_BACKEND_AND_DTYPE = pytest.mark.parametrize(("backend", "dtype"), NOT_DISTRIBUTED, ids=str)
# Of compiled code autograd saves other values and aot_eager adds gradients up in another order: a few roundings.
GRADIENT_TOLERANCE = {FP16: 2.0**-9, BF16: 2.0**-6}
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))

Function = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def gpt2(gpt2_config: GPT2Config) -> GPT2LMHeadModel:
    """Of one layer: compiling takes as long as there are layers."""
    gpt2_config.n_layer = 1
    return GPT2LMHeadModel(gpt2_config).train()


def raw_attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x)[:, None].chunk(3, dim=-1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def norm() -> Using:
    return Using(lambda m, x: torch.softmax(m.out(m.norm(x)), -1) * x, norm=nn.LayerNorm(16), out=nn.Linear(16, 16))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4)),
    "attention": lambda: Using(raw_attention, qkv=nn.Linear(16, 48)),
    "multi-head attention": lambda: Using(
        lambda m, x: m.heads(x, x, x, need_weights=False)[0], heads=nn.MultiheadAttention(16, 2, batch_first=True)
    ),
    "norm": norm,
}


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def result_and_gradients(function: Function, module: nn.Module) -> tuple[Tensor, list[Tensor]]:
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(2))
    result = function(x)
    gradients = torch.autograd.grad(result.float().square().sum(), list(module.parameters()))
    return result.detach(), list(gradients)


@pytest.mark.parametrize(
    ("name", "entered", "backend", "dtype"),
    covering(MODULES, ["inside", "outside"], ["eager", "aot_eager"], [FP16, BF16]),
    ids=str,
)
def test_compiled_is_as_eager(name: str, entered: str, backend: str, dtype: torch.dtype) -> None:
    module = MODULES[name]()

    def enters(x: Tensor) -> Tensor:
        with autocast(dtype):
            return module(x)

    expected, expected_gradients = result_and_gradients(enters, module)
    if entered == "inside":
        found, gradients = result_and_gradients(torch.compile(enters, fullgraph=True, backend=backend), module)
    else:
        compiled = torch.compile(lambda x: module(x), fullgraph=True, backend=backend)
        found, gradients = result_and_gradients(autocast(dtype)(compiled), module)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)
    assert max(map(relative, gradients, expected_gradients)) <= GRADIENT_TOLERANCE[dtype]


def test_compiled_code_is_not_used_again_under_another_autocast() -> None:
    compiled = torch.compile(lambda x: x @ W, fullgraph=True, backend="eager")
    x = torch.randn(4, 8)
    assert compiled(x).dtype is FP32
    with autocast(BF16):
        assert compiled(x).dtype is BF16
    with autocast(FP16):
        assert compiled(x).dtype is FP16
    with autocast(FP16, enabled=False):
        assert compiled(x).dtype is FP32
    assert compiled(x).dtype is FP32


class TestIslandsOfTorchsInsideOfAGraph:
    @pytest.mark.parametrize("spelling", ["with", "decorator", "object", "torch.cuda.amp"])
    @pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.autocast:FutureWarning")
    def test_are_in_fp32(self, spelling: str) -> None:
        if spelling == "torch.cuda.amp" and torch.__version__.startswith("2.15"):
            pytest.skip("torch 2.15 traces no torch.cuda.amp.autocast, also without ours: KeyError: dtype")
        made_before = torch.autocast("cpu", enabled=False)

        def in_fp32(x: Tensor) -> Tensor:
            if spelling == "decorator":
                return made_before(lambda: x @ W)()
            if spelling == "object":
                with made_before:
                    return x @ W
            of_cuda = spelling == "torch.cuda.amp"
            with torch.cuda.amp.autocast(enabled=False) if of_cuda else torch.autocast("cpu", enabled=False):
                return x @ W

        compiled = torch.compile(lambda x: [in_fp32(x), x @ W], fullgraph=True, backend="eager")
        x = torch.randn(4, 8)
        for _ in range(2):
            with autocast(BF16):
                inside, after = compiled(x)
            assert torch.equal(inside, x @ W) and after.dtype is BF16
            assert compiled(x)[1].dtype is FP32

    def test_a_graph_that_breaks_inside_of_one(self) -> None:
        @torch.compile(backend="eager")
        def function(x: Tensor) -> list[Tensor]:
            with torch.autocast("cpu", enabled=False):
                first = x @ W
                torch._dynamo.graph_break()
                second = x @ W
            return [first, second, x @ W]

        with autocast(BF16):
            assert [t.dtype for t in function(torch.randn(4, 8))] == [FP32, FP32, BF16]
        assert active_autocast() is None

    def test_torchs_switched_on_is_an_error(self) -> None:
        @torch.compile(backend="eager")
        def function(x: Tensor) -> Tensor:
            with torch.autocast("cpu", BF16):
                return x @ W

        with autocast(BF16), pytest.raises(RuntimeError, match=r"torch.autocast was entered inside"):
            function(torch.randn(4, 8))
        assert active_autocast() is None


def test_torchs_autocast_compiles_outside_of_ours() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def function(x: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", BF16):
            first = x @ W
            with torch.autocast("cpu", enabled=False):
                second = x @ W
        return [first, second, x @ W]

    assert [t.dtype for t in function(torch.randn(4, 8))] == [BF16, FP32, FP32]


def tiny_llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=50, num_key_value_heads=2)).eval()


@EACH_BACKEND_AND_DTYPE
def test_an_attached_model_has_the_gradients_of_eager(
    gpt2: GPT2LMHeadModel, batch: dict[str, Tensor], backend: str, dtype: torch.dtype
) -> None:
    precision = "fp16" if dtype is FP16 else "bf16"
    MixedPrecision(precision).attach(gpt2)
    losses: list[Tensor] = []

    def gradients(run: Any) -> list[Tensor | None]:
        return gradients_of(gpt2, lambda: losses.append(run(**batch).loss) or losses[-1])  # type: ignore[func-returns-value]

    expected = gradients(gpt2)
    found = gradients(torch.compile(gpt2, backend=backend))
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    assert all(gradient is not None and gradient.dtype is FP32 for gradient in found)
    assert_true(found, expected, GRADIENT_TOLERANCE[dtype], 0.0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_rule_by_module_holds_from_the_first_compiled_forward_on(backend: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    MixedPrecision("bf16", rules={"1": "fp32"}).attach(model)
    x, seen = torch.randn(2, 8), []
    model[1].register_forward_hook(lambda module, args, output: seen.append((args[0].dtype, output.dtype)))
    compiled = torch.compile(model, backend=backend)
    found = [compiled(x), compiled(x)]  # nothing ran in eager mode before
    assert all(torch.equal(one, model(x)) for one in found)
    assert seen == [(FP32, FP32)] * 4


def convolution_net() -> Using:
    """Batch and group norms, an activation and dropout as modules, and a loss that the forward makes."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8))
    return Using(
        lambda m, images, labels: F.cross_entropy(m.head(F.relu(m.layers(images)).mean((2, 3))), labels),
        layers=nn.Sequential(*layers, nn.Dropout(0.0)),
        head=nn.Linear(8, 10),
    )


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16-lean", marks=pytest.mark.slow)])
def test_a_convolution_net_trains_compiled_as_eager(precision: str, backend: str) -> None:
    images, labels = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0)), torch.arange(4)

    def losses(is_compiled: bool) -> list[float]:
        net: Any = convolution_net()
        net, optimizer = hf_mp.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True), precision)
        forward = torch.compile(net, backend=backend) if is_compiled else net
        return [take_step(forward(images, labels), optimizer, clip=1.0) for _ in range(4)]

    assert losses(is_compiled=True) == pytest.approx(losses(is_compiled=False), rel=5e-3)
    assert counters["stats"]["unique_graphs"] == 1


def test_another_loss_scale_needs_no_compiling_and_changes_no_gradient(
    gpt2: GPT2LMHeadModel, batch: dict[str, Tensor]
) -> None:
    runtime = MixedPrecision("fp16", loss_scaler=DynamicLossScaler("cpu", 2.0**10))
    runtime.attach(gpt2)
    optimizer = runtime.attach_optimizer(torch.optim.SGD(gpt2.parameters(), lr=0.1))
    compiled = torch.compile(gpt2, backend="aot_eager")
    for _ in range(2):  # the first call makes what the later ones find
        gpt2.zero_grad()
        compiled(**batch).loss.backward()
    expected = [p.grad.clone() for p in gpt2.parameters()]
    before = runtime.scaler.get_scale()
    gpt2.transformer.wte.weight.grad[0, 0] = torch.inf
    optimizer.step()
    assert runtime.step_was_skipped and runtime.scaler.get_scale() < before
    gpt2.zero_grad()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(**batch).loss.backward()
    gradients = [p.grad for p in gpt2.parameters()]
    assert max(map(relative, gradients, expected)) <= 2.0**-10


class TestTransforms:
    @pytest.fixture
    def layer(self) -> nn.Linear:
        return nn.Linear(8, 4)

    @LOWER
    def test_grad(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        x = torch.randn(3, 8)

        def loss(parameters: dict[str, Tensor]) -> Tensor:
            with autocast(dtype):
                return functional_call(layer, parameters, (x,)).float().square().sum()

        found = grad(loss)(dict(layer.named_parameters()))
        with autocast(dtype):
            layer(x).float().square().sum().backward()
        for name, parameter in layer.named_parameters():
            assert relative(found[name], parameter.grad) <= GRADIENT_TOLERANCE[dtype]

    @LOWER
    def test_vmap(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        x = torch.randn(5, 3, 8)
        with autocast(dtype):
            found = vmap(layer)(x)
            expected = torch.stack([layer(part) for part in x])
        assert found.dtype is dtype
        assert relative(found, expected) <= torch.finfo(dtype).eps


MADE_OF_OTHERS: dict[str, Function] = {
    "einsum of a list": lambda x: torch.einsum("ij,kj->ik", [x, x]),
    "einsum by numbers": lambda x: torch.einsum(x, [0, 1], x, [2, 1], [0, 2]),
    "tensordot": lambda x: torch.tensordot(x, x, ([1], [1])),
    "inner": lambda x: torch.inner(x, x),
    "pad": lambda x: F.pad(x[None], (1, 1), mode="reflect"),
    "bilinear": lambda x: F.bilinear(x, x, torch.ones(2, 8, 8)),
    "gru_cell": lambda x: torch.gru_cell(x, x, torch.ones(24, 8), torch.ones(24, 8)),
}


def test_a_loss_module_that_a_forward_makes_is_computed_in_fp32() -> None:
    # torch.compile calls nn.CrossEntropyLoss of a forward by a way of its own
    x, target = torch.randn(4, 8), torch.arange(4)

    def function(x: Tensor) -> Tensor:
        return nn.CrossEntropyLoss(torch.ones(8), label_smoothing=0.1)(x @ x.t() @ x, target)

    with autocast(BF16):
        found, expected = torch.compile(function, backend="aot_eager", fullgraph=True)(x), function(x)
    assert found.dtype is FP32 and torch.equal(found, expected)


@pytest.mark.parametrize("tables", ["cpu", "cuda"])
@pytest.mark.parametrize("name", MADE_OF_OTHERS)
def test_what_is_made_of_other_ops_compiles_to_the_same(name: str, tables: str) -> None:
    function, x = MADE_OF_OTHERS[name], torch.randn(3, 8)
    with autocast(BF16, tables=tables):
        expected = function(x)
        found = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    assert found.dtype is expected.dtype and torch.equal(found, expected)


@BACKENDS
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_parts_of_a_compiled_model_have_casts_and_unscale_nodes(backend: str, use_reentrant: bool) -> None:
    x, model = torch.randn(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model.forward = lambda x: checkpoint(model[1], model[0](x), use_reentrant=use_reentrant)  # type: ignore[method-assign]
    expected = gradients_of(model, lambda: model(x).square().sum())
    attached(model)
    compiled = torch.compile(model, backend=backend)
    assert_true(gradients_of(model, lambda: compiled(x).square().sum()), expected, 0.01)


class TestOneGraph:
    """An attached model is compiled to one graph, which takes working copies and casts no weight itself."""

    def compiled(self, model: nn.Module, graphs: list[Any]) -> Any:
        def backend(graph: Any, inputs: list[Tensor]) -> Any:
            graphs.append(graph)
            return graph.forward

        return torch.compile(model, backend=backend)

    @pytest.mark.parametrize(
        "precision", ["fp16", *(pytest.param(other, marks=pytest.mark.slow) for other in ("bf16", "fp16-lean"))]
    )
    def test_a_transformers_model_with_its_base_model_is_one(self, precision: str) -> None:
        graphs: list[Any] = []
        model = tiny_llama().train()
        MixedPrecision(precision).attach(model)
        ids = torch.arange(10)[None]
        self.compiled(model, graphs)(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert len(graphs) == 1

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_weights_come_in_rounded(self, precision: str) -> None:
        graphs: list[Any] = []
        model = norm()
        runtime = MixedPrecision(precision, loss_scaler=StaticLossScaler(4.0) if precision == "fp16" else None)
        runtime.attach(model)
        optimizer = runtime.attach_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        reference = copy.deepcopy(model)
        compiled, x = self.compiled(model, graphs), torch.randn(4, 16)
        for _ in range(3):  # the copies are those of the weights after each update
            for call in (compiled, reference):
                call(x).square().sum().backward()
            for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(found.grad, expected.grad)
            optimizer.step()
            optimizer.zero_grad()
            reference = copy.deepcopy(model)
        dtypes = [node.meta["example_value"].dtype for node in graphs[0].graph.find_nodes(op="placeholder")]
        assert len(graphs) == 1 and dtypes.count(runtime.policy.compute) == 2  # weight and bias
        casts = [node.args for node in graphs[0].graph.find_nodes(op="call_method", target="to")]
        assert all(tensor.meta["example_value"].dtype is not FP32 or tensor.op != "placeholder" for tensor, _ in casts)


@pytest.mark.parametrize("has_grad", [True, False])
@pytest.mark.parametrize("breaks", ["nowhere", "between", "in a frame that is skipped"])
def test_a_compiled_forward_is_examined_once(breaks: str, has_grad: bool) -> None:
    """Where its code breaks off, the mode is not taken for code to compile; and no call looks at the forward anew."""

    def use(m: Any, x: Tensor) -> Tensor:
        if breaks == "in a frame that is skipped":
            try:
                x = F.silu(m.first(x))
                torch._dynamo.graph_break()
                return F.dropout(F.layer_norm(m.second(x), (4,)), 0.0, True)
            finally:
                pass
        x = F.gelu(m.first(x))
        if breaks == "between":
            torch._dynamo.graph_break()
        return m.second(x)

    model, x = Using(use, first=nn.Linear(4, 4), second=nn.Linear(4, 4)), torch.ones(2, 4)
    MixedPrecision("bf16").attach(model)
    expected = model(x)
    compiled = torch.compile(model, backend="eager")
    with torch.set_grad_enabled(has_grad):
        for _ in range(3):
            assert torch.equal(compiled(x), expected)
        examined = counters["frames"]["total"]
        compiled(x)
    assert counters["frames"]["total"] == examined
