from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import Using, saved_tensors
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import hf_mp
from hf_mp.casting import cpu_handlers as handlers
from hf_mp.casting import plans
from hf_mp.casting.cpu import attention as module
from hf_mp.casting.cpu import upcast
from hf_mp.casting.cpu.attention import Attention, attend, read_attention
from hf_mp.casting.cpu.upcast import CPU_PRODUCTS

pytestmark = pytest.mark.usefixtures("nothing_is_small")

FP16, BF16 = torch.float16, torch.bfloat16
every_dtype = pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)

# The two round an FP32 value once, which was summed in another order: one unit in the last place apart, and a little
# where terms cancel. In units of the largest value, which is what a loss sees of it.
ULPS = 1.5
VALUE_WIDTH = 16  # other than the query's


def random(*shape: int, dtype: torch.dtype = FP16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(
    *,
    heads: int = 4,
    rows: int = 24,
    keys: int = 24,
    dtype: torch.dtype = FP16,
    mask: Tensor | None = None,
    dropout: float = 0.3,
    is_causal: bool = False,
) -> Attention:
    # As Transformers gives them: the projections' outputs, seen with heads before rows.
    def inputs(heads: int, rows: int, width: int, seed: int) -> Tensor:
        return random(2, rows, heads, width, dtype=dtype, seed=seed).transpose(1, 2).requires_grad_()

    query, key, value = inputs(heads, rows, 8, 1), inputs(heads, keys, 8, 2), inputs(heads, keys, VALUE_WIDTH, 3)
    return Attention(query, key, value, mask, dropout, is_causal, 8**-0.5)


def attention_reference(attention: Attention) -> Tensor:
    """As :func:`attend`, whole and in FP32; what is dropped is drawn block by block."""
    query, key, value = (tensor.float() for tensor in (attention.query, attention.key, attention.value))
    scores = query * attention.scale @ key.transpose(-1, -2)
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if attention.is_causal else attention.mask
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    noise = torch.ones_like(scores)
    for place in module._blocks(query, key) if attention.dropout else ():
        noise[place] = F.dropout(torch.ones_like(scores[place]), attention.dropout)
    return (torch.ops.aten._safe_softmax(scores, -1) * noise @ value).to(attention.query.dtype)


def gradients(result: Tensor, given: Attention, **settings: Any) -> tuple[Tensor, ...]:
    direction = random(*result.shape, dtype=result.dtype, seed=4)
    return torch.autograd.grad(result, [given.query, given.key, given.value], direction, **settings)


def check_close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype is expected.dtype and found.shape == expected.shape
    allowed = ULPS * torch.finfo(found.dtype).eps * expected.double().abs().max().item()
    assert (found.double() - expected.double()).abs().max() <= allowed


def check(given: Attention) -> None:
    check_alike(seeded(attend, given), seeded(attention_reference, given), given)


def seeded(compute: Callable[[Attention], Tensor], given: Attention) -> Tensor:
    torch.manual_seed(7)
    return compute(given)


def check_alike(found: Tensor, expected: Tensor, given: Attention) -> None:
    check_close(found.detach(), expected.detach())
    for ours, theirs in zip(gradients(found, given), gradients(expected, given), strict=True):
        check_close(ours, theirs)


@pytest.fixture(params=["a head", "three heads", "all heads"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many of the four heads are taken at a time."""
    count = {"a head": 1, "three heads": 3, "all heads": 4}[request.param]
    monkeypatch.setattr(module, "BLOCK_SCORES", count * 24 * 24)


def masks() -> dict[str, Tensor | None]:
    hidden = torch.ones(2, 1, 1, 24, dtype=torch.bool)
    hidden[0, ..., -5:] = False
    nothing = hidden.clone()
    nothing[1] = False
    return {
        "no mask": None,
        "padding": hidden.expand(2, 4, 24, 24),
        "rows that see nothing": nothing.expand(2, 4, 24, 24),
        "added": random(1, 4, 24, 24, seed=5).expand(2, 4, 24, 24),
    }


@pytest.mark.usefixtures("blocks")
class TestAgainstTheReference:
    @every_dtype
    @pytest.mark.parametrize("mask", masks())
    def test_masks(self, mask: str, dtype: torch.dtype) -> None:
        check(make(mask=masks()[mask], dtype=dtype))

    @every_dtype
    @pytest.mark.parametrize("rows, keys", [(24, 24), (24, 13), (13, 24), (1, 24), (24, 1)])
    def test_causal(self, rows: int, keys: int, dtype: torch.dtype) -> None:
        check(make(rows=rows, keys=keys, is_causal=True, dtype=dtype))


def test_probabilities_are_not_kept_for_backward() -> None:
    given = make(heads=2, rows=128, keys=128, is_causal=True)
    with saved_tensors() as kept:
        attend(given)
    assert sum(tensor.nbytes for tensor in kept) == given.query.nbytes + given.key.nbytes + given.value.nbytes


def test_the_output_lies_as_the_query_does() -> None:
    given = make()
    assert attend(given).transpose(1, 2).is_contiguous()
    assert all(gradient.transpose(1, 2).is_contiguous() for gradient in gradients(attend(given), given))


def test_second_derivatives_are_refused() -> None:
    given = make()
    with pytest.raises(RuntimeError, match=r"create_graph=True .* attn_implementation='eager'"):
        gradients(attend(given), given, create_graph=True)


def test_recomputed_by_checkpointing_it_drops_the_same() -> None:
    given = make(is_causal=True)

    def compute(query: Tensor) -> Tensor:
        return attend(Attention(query, *(getattr(given, name) for name in list(Attention.__annotations__)[1:])))

    torch.manual_seed(7)
    plain = gradients(compute(given.query), given)
    torch.manual_seed(7)
    again = gradients(checkpoint(compute, given.query, use_reentrant=False), given)
    assert all(map(torch.equal, plain, again))


SHAPES = {
    "rows alone": [(24, 8)] * 3,
    "3 dimensions": [(4, 24, 8), (4, 13, 8), (4, 13, 16)],
    "5 dimensions": [(2, 3, 4, 24, 8)] * 3,
    "one batch of keys": [(2, 4, 24, 8), (1, 4, 24, 8), (4, 24, 8)],
    "one head of keys": [(2, 4, 24, 8), (2, 1, 24, 8), (2, 1, 24, 8)],
    "5 dimensions, shared keys": [(2, 3, 4, 24, 8), (1, 3, 2, 24, 8), (2, 3, 2, 24, 8)],
    "3 dimensions, shared keys": [(4, 24, 8), (2, 24, 8), (2, 24, 8)],
}


@pytest.mark.parametrize("setting", ["plain", "causal", "mask", "mask with a gradient", "dropout"])
@pytest.mark.parametrize("name", SHAPES)
def test_calls_of_any_shape_are_as_exact_as_16_bits_are(name: str, setting: str) -> None:
    # large scores: most probabilities lie far below what FP16 resolves
    values = [(18 * torch.rand(shape, generator=torch.Generator().manual_seed(1)) - 9).half() for shape in SHAPES[name]]
    added = random(24, values[1].shape[-2], seed=5)

    def run(dtype: torch.dtype) -> list[Tensor]:
        leaves = [value.to(dtype).requires_grad_() for value in values]
        mask = {"mask": added > -1, "mask with a gradient": added.to(dtype).requires_grad_()}.get(setting)
        inputs = [*leaves, mask] if setting == "mask with a gradient" else leaves
        torch.manual_seed(7)
        found = F.scaled_dot_product_attention(
            *leaves, mask, 0.3 * (setting == "dropout"), setting == "causal", enable_gqa="shared" in name
        )
        return [found, *torch.autograd.grad(found, inputs, random(*found.shape, dtype=dtype, seed=4))]

    exact = run(torch.float64)
    with hf_mp.autocast(FP16):
        found = run(FP16)
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.shape == theirs.shape and ours.dtype is FP16
        assert (ours.double() - theirs).abs().max() <= 2.2e-3 * theirs.abs().max()


def test_whatever_the_default_device() -> None:
    given = make(is_causal=True)

    def result() -> tuple[Tensor, ...]:
        torch.manual_seed(7)
        found = attend(given)
        return found, *torch.autograd.grad(found.sum(), [given.query, given.key, given.value])

    expected = result()
    with torch.device("meta"):
        found = result()
    assert all(map(torch.equal, found, expected))


class TestWhichCallsAreTaken:
    @pytest.mark.parametrize(
        "change",
        [
            {"dropout_p": 0.0},
            {"dropout_p": 1.0},
            {"is_causal": True, "attn_mask": torch.zeros(24, 24)},
            {"attn_mask": torch.zeros(24, 24, requires_grad=True)},
            {"attn_mask": torch.zeros(24)},
        ],
        ids=["no dropout", "all dropped", "two masks", "a mask with a gradient", "a mask without rows"],
    )
    def test_not_by_setting(self, change: dict[str, Any]) -> None:
        inputs = make()[:3]
        assert read_attention(inputs, {"attn_mask": torch.zeros(1, 24), "dropout_p": 0.3}) is not None
        assert read_attention(inputs, {"dropout_p": 0.3, **change}) is None

    def test_not_by_tensors(self) -> None:
        query, key, value = make()[:3]
        given = {"dropout_p": 0.3}
        assert read_attention((query, key, value), given) is not None
        assert read_attention((query, key[:, :2], value[:, :2]), {**given, "enable_gqa": True}) is None
        assert read_attention((query.float(), key.float(), value.float()), given) is None
        assert read_attention((query[0], key[0], value[0]), given) is None
        assert read_attention((query, key[:, :, :3], value), given) is None
        assert read_attention((query, key), given) is None

    @pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["no dropout", "dropout"])
    @pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float64], ids=str)
    def test_a_mask_that_torch_refuses_is_refused(self, dtype: torch.dtype, dropout: float) -> None:
        given = make()
        mask = torch.ones(24, 24).tril().to(dtype)  # as a tokenizer gives it: 0 hides
        with hf_mp.autocast(FP16), pytest.raises(RuntimeError, match="Expected attn_mask dtype to be bool"):
            F.scaled_dot_product_attention(given.query, given.key, given.value, mask, dropout)

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    @pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["no dropout", "dropout"])
    def test_sequences_of_different_lengths_are_torchs(self, dropout: float) -> None:
        sequences = [random(length, 4, 8) for length in (5, 3)]
        nested = torch.nested.nested_tensor(sequences, layout=torch.jagged).transpose(1, 2)
        with hf_mp.autocast(FP16):
            found = F.scaled_dot_product_attention(nested, nested, nested, dropout_p=dropout)
        assert found.is_nested and found.dtype is FP16
        for row, sequence in zip(found.unbind() if not dropout else (), sequences, strict=False):
            heads = sequence.transpose(0, 1).float()
            check_close(row, F.scaled_dot_product_attention(heads, heads, heads).half())

    @pytest.mark.parametrize(
        "dtype, dropout, rows, native, amx, taken, of_a_token",
        [
            pytest.param(FP16, 0.0, 24, False, False, "fp32", "fp32", id="FP16"),
            pytest.param(FP16, 0.3, 24, False, False, "blocks", "blocks", id="FP16, dropout"),
            pytest.param(FP16, 0.0, 24, True, True, "fp32", "fp32", id="native FP16"),
            pytest.param(BF16, 0.0, 24, True, False, "fp32", "fp32", id="native BF16"),
            pytest.param(BF16, 0.0, 24, True, True, "torch's", "torch's", id="AMX"),
            pytest.param(BF16, 0.3, 256, True, False, "blocks", "torch's", id="native BF16, many probabilities"),
            pytest.param(BF16, 0.3, 24, True, False, "torch's", "torch's", id="native BF16, few probabilities"),
        ],
    )
    def test_by_the_mode(
        self, dtype: torch.dtype, dropout: float, rows: int, native: bool, amx: bool, taken: str, of_a_token: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        calls: list[str] = []
        monkeypatch.setattr(module, "HAS_AMX", amx)
        monkeypatch.setattr(plans, "runs_natively", lambda *_: native)
        monkeypatch.setattr(module, "OWN_SCORES", 2**18)
        wide = handlers.run_through_fp32
        monkeypatch.setattr(handlers, "attend", lambda given: calls.append("blocks") or attend(given))
        monkeypatch.setattr(
            handlers, "run_through_fp32", lambda *given, **named: calls.append("fp32") or wide(*given, **named)
        )

        model = Using(
            lambda m, x, queries=rows: F.scaled_dot_product_attention(
                (x * m.weight)[:, :, :queries], x, x, dropout_p=dropout
            ),
            weight=torch.nn.Parameter(random(1, 4, rows, 8).float()),
        )
        hf_mp.MixedPrecision("fp16" if dtype is FP16 else "bf16").attach(model)
        # In training; as in the first forward of a reentrant checkpoint, whose second one is with grad; of a new token.
        for has_grad, queries, expected in [(True, rows, taken), (False, rows, taken), (False, 1, of_a_token)]:
            calls.clear()
            with torch.set_grad_enabled(has_grad):
                model(random(2, 4, rows, 8).float(), queries=queries)
            assert (calls or ["torch's"]) == [expected]


@pytest.mark.parametrize("amx", [False, True])
@pytest.mark.parametrize("rows", [24, 80, 300])
def test_a_token_that_is_generated_is_rounded_as_it_is_in_training(
    rows: int, amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HAS_AMX", amx)
    monkeypatch.setitem(CPU_PRODUCTS, BF16, True)
    model = torch.nn.Linear(8, 8)
    model.forward = lambda q, k, v, **kwargs: F.scaled_dot_product_attention(  # type: ignore[method-assign]
        q + 0 * model.weight[0], k, v, **kwargs
    )
    hf_mp.MixedPrecision("bf16").attach(model)
    query, key, value = (random(2, 4, rows, 8, dtype=BF16, seed=seed) for seed in range(3))
    trained = model(query, key, value, is_causal=True).detach()
    stock = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.equal(trained, stock.float()) == amx
    with torch.no_grad():
        tokens = [model(query[:, :, t : t + 1], key[:, :, : t + 1], value[:, :, : t + 1]) for t in range(rows)]
    with torch.autocast("cpu", BF16):
        alone = [
            F.scaled_dot_product_attention(query[:, :, t : t + 1], key[:, :, : t + 1], value[:, :, : t + 1])
            for t in range(rows)
        ]
    ours = (torch.cat(tokens, 2) != trained).double().mean()
    theirs = (torch.cat(alone, 2) != stock).double().mean()
    # FP32 sums of 300 terms are off by 300 * 2**-24 at most, and BF16 numbers lie 2**-8 apart: one result in a hundred
    # lies so near to the middle of two that it may be rounded to the other one.
    assert ours == theirs if amx else ours < 0.01


@pytest.mark.parametrize("mask", [None, torch.arange(24) < 20])
def test_a_small_attention_has_the_bits_of_a_large_one(mask: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HAS_AMX", False)
    given = [random(2, 4, 24, 8, dtype=BF16, seed=seed).requires_grad_() for seed in range(3)]
    bias = None if mask is None else mask.to(BF16)[None]
    results, mode = [], hf_mp.autocast(BF16)
    for small in (0, 2**16):
        monkeypatch.setattr(upcast, "SMALL_ELEMENTS", small)
        found = handlers.native_attention(mode, "", F.scaled_dot_product_attention, given, {"attn_mask": bias})
        results.append([found, *torch.autograd.grad(found.sum(), given)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("mask", ["no mask", "padding", "causal"])
def test_flash_in_fp32_keeps_its_operands_in_16_bits_and_is_as_the_reference(mask: str) -> None:
    query, key, value = (random(2, 24, 4, 8, seed=seed).transpose(1, 2).requires_grad_() for seed in range(3))
    hidden = masks()["padding"] if mask == "padding" else None
    given = Attention(query, key, value, hidden, 0.0, mask == "causal", 8**-0.5)
    with hf_mp.autocast(FP16), saved_tensors() as kept:
        found = F.scaled_dot_product_attention(query, key, value, hidden, is_causal=mask == "causal")
    check_alike(found, attention_reference(given), given)
    assert [t.dtype for t in kept if t.shape == query.shape].count(FP16) == 3
