"""Rules that scale one of stacked experts: its products are of divided numbers, all other experts as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mixtures import IMPLEMENTATIONS, KINDS, make
from torch import Tensor

import hf_mp

ALL = pytest.mark.parametrize(("kind", "implementation"), [(k, i) for k in KINDS for i in IMPLEMENTATIONS])


def experts_of(kind: str, implementation: str) -> Any:
    return make(kind, implementation).model.layers[1].mlp.experts


def routed(tokens: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the two experts of each, and their weights."""
    generator = torch.Generator().manual_seed(3)
    chosen = torch.rand(tokens, 4, generator=generator).topk(2).indices
    return torch.randn(tokens, 64, generator=generator), chosen, torch.rand(tokens, 2, generator=generator)


def results(experts: Any, mode: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The output, and the gradients of the input and of all weights."""
    hidden, chosen, weights = routed()
    hidden = hidden.to(dtype).requires_grad_()
    for parameter in experts.parameters():
        parameter.grad = None
    with mode:
        output = experts(hidden, chosen, weights.to(dtype))
    generator = torch.Generator().manual_seed(4)
    output.backward(torch.randn(output.shape, generator=generator).to(output.dtype))
    found = [output.detach(), hidden.grad, *(parameter.grad for parameter in experts.parameters())]
    return [one.double() for one in found if one is not None]


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)]


@ALL
@pytest.mark.parametrize("rule", ["scaled/64", "scaled/1/64", "scaled/1/1/64", "scaled/4/8/16"])
def test_a_scaled_expert_computes_what_it_did(kind: str, implementation: str, rule: str) -> None:
    experts = experts_of(kind, implementation)
    expected = results(experts_of(kind, "eager").double(), torch.enable_grad(), torch.float64)
    rules = {"gate_up_proj[2]": rule, "down_proj[2]": rule, "down_proj[0]": "scaled/2"}
    model = torch.nn.ModuleDict({"experts": experts})
    mode = hf_mp.autocast(torch.float16, rules={f"experts.{key}": one for key, one in rules.items()}, model=model)
    assert max(errors(results(experts, mode), expected)) < 2e-3


@ALL
def test_one_that_leaves_the_range_is_held_and_the_others_keep_their_bits(kind: str, implementation: str) -> None:
    experts, seen = experts_of(kind, implementation), list[dict[str, Tensor]]()
    experts.gate_up_proj.data[2] *= 3e5

    class Products(torch.overrides.TorchFunctionMode):
        """The results of products; of a rule, those in 16 bits."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if getattr(func, "__name__", "") in ("_grouped_mm", "bmm", "linear", "matmul"):
                seen.append(result.detach().float().flatten(1))
            return result

    model = torch.nn.ModuleDict({"experts": experts})
    for rules in ({}, {"experts.gate_up_proj[2]": "scaled/64"}):
        with hf_mp.autocast(torch.float16, rules=rules, model=model), torch.no_grad(), Products():
            hidden, chosen, weights = routed()
            experts(hidden, chosen, weights)
    plain, scaled = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    first = {"grouped_mm": 1, "batched_mm": 1, "eager": 8}[implementation]
    overflows = finite = 0
    for one, other in list(zip(plain, scaled, strict=True))[:first:2]:
        is_finite = one.isfinite().all(1)
        overflows, finite = overflows + int((~is_finite).sum()), finite + int(is_finite.sum())
        assert torch.equal(one[is_finite], other[is_finite]) and other.isfinite().all()
    assert overflows == int((chosen == 2).sum()) and finite == int((chosen != 2).sum())


def test_what_fits_no_expert_is_refused() -> None:
    model = torch.nn.ModuleDict({"experts": experts_of("Mixtral", "grouped_mm"), "plain": torch.nn.Linear(4, 4)})
    for key in ("experts.gate_up_proj[4]", "plain.gate_up_proj[0]", "exports.down_proj[0]"):
        with pytest.raises(ValueError, match=r"rule '.*' matches no module of ModuleDict; close to it"):
            hf_mp.autocast(torch.float16, rules={key: "scaled/4"}, model=model)
    with pytest.raises(ValueError, match=r"'fp32' is not known for one expert: use 'scaled/16', or name the module"):
        hf_mp.autocast(torch.float16, rules={"experts.gate_up_proj[1]": "fp32"}, model=model)
