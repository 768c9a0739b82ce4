"""What the benchmark scripts share: the model that is trained, what this device does at best."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from _results import alternate
from _tensor_memory import peak_tensor_bytes as peak_tensor_bytes
from hf_mp.casting.cpu.fp32_matmul import fp32_product
from hf_mp.casting.cpu.upcast import runs_natively

DEFAULT_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_SQUARE = {"cpu": 2048, "cuda": 8192}  # of a product that is limited by arithmetic alone
_COPIED_ELEMENTS = {"cpu": 2**26, "cuda": 2**29}  # in FP32: far more than caches hold


@dataclass(frozen=True)
class Workload:
    """A GPT-2 and what one update of it is trained on.

    Attributes:
        layers, width, heads, vocab: of the model.
        batch: sequences in one forward.
        seq: tokens in a sequence.
        accumulation: forwards in one update.
        dropout: probability of all three of GPT-2's dropouts.
        positions: that the model has, at least.
        device: ``"cpu"`` or ``"cuda"``.
    """

    layers: int
    width: int
    heads: int
    vocab: int
    batch: int
    seq: int
    accumulation: int = 1
    dropout: float = 0.0
    device: str = "cpu"
    positions: int = 1024

    @property
    def config(self) -> GPT2Config:
        """The configuration of the model."""
        return GPT2Config(
            n_layer=self.layers, n_embd=self.width, n_head=self.heads, vocab_size=self.vocab,
            n_positions=max(self.seq, self.positions), resid_pdrop=self.dropout, embd_pdrop=self.dropout,
            attn_pdrop=self.dropout, use_cache=False, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        """In one update."""
        return self.batch * self.seq * self.accumulation

    def model(self) -> GPT2LMHeadModel:
        """The model with the same random weights for everyone, in FP32, on the device, in training."""
        torch.manual_seed(0)
        with torch.device(self.device):
            return GPT2LMHeadModel(self.config).train()

    def token_ids(self, batch: int | None = None) -> Tensor:
        """Random int64 token ids of shape (batch, seq) on the CPU; default: of one forward."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, self.vocab, (batch or self.batch, self.seq), generator=generator)

    def parameters(self) -> int:
        """How many the model has."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in GPT2LMHeadModel(self.config).parameters())

    def flops(self) -> int:
        """Floating-point operations of the matrix products of one update, counted as they are called.

        Forward and backward of the stock model, recomputation not counted, attention counted without regard to its
        causal mask (PaLM, arXiv 2204.02311, appendix B).
        """
        config = self.config
        config._attn_implementation = "eager"
        with torch.device("meta"):
            model = GPT2LMHeadModel(config)
            ids = torch.zeros((self.batch, self.seq), dtype=torch.long)
            mask = torch.zeros(self.batch, 1, self.seq, self.seq)  # or Transformers reads values to make one
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids, labels=ids, attention_mask=mask).loss.backward()
        return self.accumulation * counter.get_total_flops()

    def as_dict(self) -> dict[str, Any]:
        """For a stored result."""
        return {**asdict(self), "parameters": self.parameters(), "tokens": self.tokens, "flops": self.flops()}


def update_bytes(*, gradient: int, master: int, moments: int, copy: int = 0) -> int:
    """Bytes a parameter that an update with clipping by the global norm has to read and write.

    Two passes: the norm reads the gradients, then gradients, masters and moments are read, and masters, moments and
    working copies written. A working copy that is half of its master (split masters) is counted there.
    """
    return 2 * gradient + 2 * (master + moments) + copy


@dataclass(frozen=True)
class DeviceRates:
    """What this device reached at best, measured in the same run.

    Attributes:
        flops_per_second: of matrix products, by the dtype that a contender computes in.
        copy_bytes_per_second: read and written by a copy of a large tensor.
    """

    flops_per_second: dict[str, float]
    copy_bytes_per_second: float

    @classmethod
    def measure(cls, workload: Workload) -> DeviceRates:
        """The best of the workload's own two largest products and a large square one, for each dtype.

        FP16 on a CPU without FP16 arithmetic has the rate of FP32, in which its products run.
        """
        tokens, square = workload.batch * workload.seq, min(_SQUARE[workload.device], 16 * workload.width)
        shapes = [(tokens, workload.width, n) for n in (4 * workload.width, workload.vocab)] + [(square,) * 3]
        rates: dict[str, float] = {}
        for name, dtype in DTYPES.items():
            through_fp32 = name == "fp16" and not runs_natively(dtype, workload.device)
            measured = "fp32" if through_fp32 else name
            rates[name] = rates.get(measured) or matmul_flops_per_second(dtype, workload.device, shapes)
        return cls(rates, copy_bytes_per_second(workload.device))

    def floor_seconds(self, dtype: str, flops: float, update_bytes: float) -> float:
        """The products at the best rate and the update's bytes at the best bandwidth, one after the other."""
        return flops / self.flops_per_second[dtype] + update_bytes / self.copy_bytes_per_second


def matmul_flops_per_second(dtype: torch.dtype, device: str, shapes: Iterable[tuple[int, ...]]) -> float:
    """Of the fastest repetition of the fastest product; ``shapes`` are rows, inner dimension and columns.

    With the right factor as it is and transposed, as a linear layer has it; in FP32 on a CPU by both of torch's
    libraries for products.
    """
    multiplications: list[Callable[[Tensor, Tensor], Tensor]] = [torch.mm]
    if dtype is torch.float32 and device == "cpu":
        multiplications.append(fp32_product)
    rates = []
    for rows, inner, columns in shapes:
        left = torch.randn(rows, inner, device=device).to(dtype)
        as_it_is = torch.randn(inner, columns, device=device).to(dtype)
        transposed = torch.randn(columns, inner, device=device).to(dtype).t()
        for multiply, right in itertools.product(multiplications, (as_it_is, transposed)):
            seconds = fastest_seconds(lambda: multiply(left, right))  # noqa: B023
            rates.append(2 * rows * inner * columns / seconds)
    return max(rates)


def copy_bytes_per_second(device: str) -> float:
    """Bytes read and written by the fastest of several copies of a large tensor."""
    source = torch.ones(_COPIED_ELEMENTS[device], device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / fastest_seconds(lambda: target.copy_(source))


def fastest_seconds(call: Callable[[], Any]) -> float:
    """Of several calls, after one that is not counted; on a GPU until its work is done."""
    return min(alternate({"call": call}, rounds=5)["call"])


def rounded_copies(model: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """The casts of the weights that ``torch.autocast`` makes in each forward."""
    return [parameter.detach().to(dtype) for parameter in model.parameters()]
