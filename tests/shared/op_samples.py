"""A call of every op that is in autocast's tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Operand = Callable[..., Tensor]


class Call:
    """Arguments of an op."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    def of(self, function: Callable[..., Any]) -> Any:
        torch.manual_seed(0)
        return function(*self.args, **self.kwargs)


@contextmanager
def torchs_cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """torch.autocast("cuda") would switch itself off where there is no GPU."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
        torch.clear_autocast_cache()


def operands(*dtypes: torch.dtype) -> Operand:
    """Makes operands in (0.25, 0.75), the same after each call of this function; their dtypes take turns."""
    generator = torch.Generator().manual_seed(0)
    made = 0

    def operand(*shape: int) -> Tensor:
        nonlocal made
        made += 1
        return (0.25 + 0.5 * torch.rand(*shape, generator=generator)).to(dtypes[(made - 1) % len(dtypes)])

    return operand


def regular(r: Operand, size: int = 3) -> Tensor:
    """A matrix that is safe to invert and to factorize."""
    values = r(size, size)
    return values + size * torch.eye(size, dtype=values.dtype)


def _rnn(r: Operand, gates: int, cells: int) -> Call:
    hidden = [r(1, 2, 4) for _ in range(cells)]
    weights = [r(4 * gates, 3), r(4 * gates, 4), r(4 * gates), r(4 * gates)]
    return Call(r(5, 2, 3), hidden if cells > 1 else hidden[0], weights, True, 1, 0.0, False, False, False)


def _rnn_cell(r: Operand, gates: int, cells: int) -> Call:
    hidden = [r(2, 4) for _ in range(cells)]
    return Call(r(2, 3), hidden if cells > 1 else hidden[0], r(4 * gates, 3), r(4 * gates, 4))


def _convolution(r: Operand, *more: Any) -> Call:
    return Call(r(2, 3, 6, 6), r(4, 3, 3, 3), r(4), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, *more)


def longs(*values: int) -> Tensor:
    return torch.tensor(values)


ELEMENTWISE = """
    acos arccos asin arcsin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan softplus
    prod sum norm nuclear_norm linalg.norm linalg.vector_norm linalg.matrix_norm quantile nanquantile
    trace pinverse qr svd geqrf linalg.matrix_rank linalg.svdvals linalg.svd linalg.qr
    fft.fft fft.ifft fft.fft2 fft.ifft2 fft.fftn fft.ifftn fft.rfft fft.irfft fft.rfft2 fft.irfft2 fft.rfftn
    fft.irfftn fft.hfft fft.ihfft
"""
SQUARE = """
    cholesky cholesky_inverse inverse linalg.cond linalg.cholesky linalg.cholesky_ex linalg.eig linalg.eigh
    linalg.eigvals linalg.eigvalsh linalg.inv linalg.inv_ex
"""
OF_TWO = """
    mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss hinge_embedding_loss kl_div binary_cross_entropy
    binary_cross_entropy_with_logits poisson_nll_loss cosine_similarity pairwise_distance dist cdist
    atan2 arctan2 linalg.vecdot
"""
OF_THREE = "addcdiv addcmul margin_ranking_loss triplet_margin_loss"

SAMPLES: dict[str, Callable[[Operand], Call]] = {
    **{name: (lambda r: Call(r(4, 5))) for name in ELEMENTWISE.split()},
    **{name: (lambda r: Call(regular(r))) for name in SQUARE.split()},
    **{name: (lambda r: Call(r(3, 4), r(3, 4))) for name in OF_TWO.split()},
    **{name: (lambda r: Call(r(3, 4), r(3, 4), r(3, 4))) for name in OF_THREE.split()},
    # products
    "conv1d": lambda r: Call(r(2, 3, 8), r(4, 3, 3), r(4)),
    "conv2d": lambda r: Call(r(2, 3, 6, 6), r(4, 3, 3, 3), r(4)),
    "conv3d": lambda r: Call(r(1, 2, 4, 4, 4), r(3, 2, 2, 2, 2), r(3)),
    "conv_tbc": lambda r: Call(r(6, 2, 3), r(3, 3, 4), r(4), 1),
    "conv_transpose1d": lambda r: Call(r(2, 3, 8), r(3, 4, 3), r(4)),
    "conv_transpose2d": lambda r: Call(r(2, 3, 4, 4), r(3, 4, 3, 3), r(4)),
    "conv_transpose3d": lambda r: Call(r(1, 2, 3, 3, 3), r(2, 3, 2, 2, 2), r(3)),
    "convolution": _convolution,
    "_convolution": lambda r: _convolution(r, False, False, True),  # the overload that torch's CPU autocast knows
    "cudnn_convolution": lambda r: Call(r(2, 3, 6, 6), r(4, 3, 3, 3), [0, 0], [1, 1], [1, 1], 1, False, False, True),
    "cudnn_convolution_transpose": lambda r: Call(
        r(2, 3, 6, 6), r(3, 4, 3, 3), [0, 0], [0, 0], [1, 1], [1, 1], 1, False, False, True
    ),
    "prelu": lambda r: Call(-r(3, 4), r(4)),
    "addmm": lambda r: Call(r(5), r(3, 4), r(4, 5)),
    "_addmm_activation": lambda r: Call(r(5), r(3, 4), r(4, 5)),
    "addmv": lambda r: Call(r(3), r(3, 4), r(4)),
    "addr": lambda r: Call(r(3, 4), r(3), r(4)),
    "matmul": lambda r: Call(r(2, 4, 4), r(4, 4)),
    "mm": lambda r: Call(r(3, 4), r(4, 5)),
    "mv": lambda r: Call(r(3, 4), r(4)),
    "linear": lambda r: Call(r(2, 3, 4), r(5, 4), r(5)),
    "bmm": lambda r: Call(r(2, 3, 4), r(2, 4, 5)),
    "_grouped_mm": lambda r: Call(r(8, 16), r(2, 16, 8), torch.tensor([4, 8], dtype=torch.int32)),
    "addbmm": lambda r: Call(r(3, 5), r(2, 3, 4), r(2, 4, 5)),
    "baddbmm": lambda r: Call(r(2, 3, 5), r(2, 3, 4), r(2, 4, 5)),
    "chain_matmul": lambda r: Call(r(3, 4), r(4, 5), r(5, 2)),
    "linalg.multi_dot": lambda r: Call([r(3, 4), r(4, 5), r(5, 2)]),
    "linalg.matmul": lambda r: Call(r(2, 3, 4), r(4, 5)),
    "sparse.mm": lambda r: Call(r(3, 4).to_sparse(), r(4, 5)),
    "sparse.addmm": lambda r: Call(r(3, 5), r(3, 4).to_sparse(), r(4, 5)),
    "inner": lambda r: Call(r(3, 4), r(2, 4)),
    "square": lambda r: Call(r(3)),
    "trapezoid": lambda r: Call(r(4)),
    "trapz": lambda r: Call(r(4)),
    "cumulative_trapezoid": lambda r: Call(r(4)),
    "sum_to_size": lambda r: Call(r(3, 4), 1, 4),
    "einsum": lambda r: Call("bik,bkj->bij", r(2, 3, 4), r(2, 4, 5)),
    "tensordot": lambda r: Call(r(3, 4), r(4, 5), 1),
    "bilinear": lambda r: Call(r(2, 3), r(2, 4), r(5, 3, 4), r(5)),
    "dot": lambda r: Call(r(4), r(4)),
    "vdot": lambda r: Call(r(4), r(4)),
    "cross": lambda r: Call(r(2, 3), r(2, 3), dim=1),
    "linalg.cross": lambda r: Call(r(2, 3), r(2, 3), dim=1),
    "lstm": lambda r: _rnn(r, 4, 2),
    "gru": lambda r: _rnn(r, 3, 1),
    "rnn_tanh": lambda r: _rnn(r, 1, 1),
    "rnn_relu": lambda r: _rnn(r, 1, 1),
    "lstm_cell": lambda r: _rnn_cell(r, 4, 2),
    "gru_cell": lambda r: _rnn_cell(r, 3, 1),
    "rnn_tanh_cell": lambda r: _rnn_cell(r, 1, 1),
    "rnn_relu_cell": lambda r: _rnn_cell(r, 1, 1),
    "scaled_dot_product_attention": lambda r: Call(r(1, 2, 4, 8), r(1, 2, 4, 8), r(1, 2, 4, 8)),
    "_native_multi_head_attention": lambda r: Call(
        *(r(2, 3, 8), r(2, 3, 8), r(2, 3, 8), 8, 2, r(24, 8), r(24), r(8, 8), r(8))
    ),
    # norms, powers, sums
    "pow": lambda r: Call(r(3, 4), 3.0),
    "layer_norm": lambda r: Call(r(3, 4), [4], r(4), r(4)),
    "native_layer_norm": lambda r: Call(r(3, 4), [4], r(4), r(4), 1e-5),
    "rms_norm": lambda r: Call(r(3, 4), [4], r(4)),
    "group_norm": lambda r: Call(r(2, 4, 3), 2, r(4), r(4)),
    "norm_except_dim": lambda r: Call(r(3, 4), 2, 1),
    "frobenius_norm": lambda r: Call(r(3, 4), [0, 1]),
    "renorm": lambda r: Call(r(3, 4), 2, 0, 1.0),
    "pdist": lambda r: Call(r(3, 4)),
    "logsumexp": lambda r: Call(r(3, 4), -1),
    "softmax": lambda r: Call(r(3, 4), -1),
    "log_softmax": lambda r: Call(r(3, 4), -1),
    "cumsum": lambda r: Call(r(3, 4), 0),
    "cumprod": lambda r: Call(r(3, 4), 0),
    "quantile": lambda r: Call(r(3, 4), 0.3),
    "nanquantile": lambda r: Call(r(3, 4), 0.3),
    "polar": lambda r: Call(r(3), r(3)),
    "view_as_complex": lambda r: Call(r(3, 2)),
    "stft": lambda r: Call(r(16), 4, return_complex=True),
    "fake_quantize_per_tensor_affine": lambda r: Call(r(3, 4), 0.1, 0, 0, 255),
    # losses
    "cosine_embedding_loss": lambda r: Call(r(3, 4), r(3, 4), longs(1, -1, 1)),
    "cross_entropy_loss": lambda r: Call(r(3, 5), longs(0, 4, 2)),
    "nll_loss": lambda r: Call(-r(3, 5), longs(0, 4, 2)),
    "nll_loss_nd": lambda r: Call(-r(3, 5), longs(0, 4, 2)),
    "nll_loss2d": lambda r: Call(-r(2, 3, 4, 4), torch.ones(2, 4, 4, dtype=torch.long)),
    "multilabel_margin_loss": lambda r: Call(r(1, 4), longs(3, 0, -1, 1)[None]),
    "multi_margin_loss": lambda r: Call(r(3, 4), longs(1, 0, 3)),
    "ctc_loss": lambda r: Call(-r(6, 1, 4), longs(1, 2)[None], longs(6), longs(2)),
    # pictures
    "avg_pool3d": lambda r: Call(r(1, 2, 4, 4, 4), 2),
    "adaptive_avg_pool3d": lambda r: Call(r(1, 2, 4, 4, 4), [2, 2, 2]),
    "max_pool3d": lambda r: Call(r(1, 2, 4, 4, 4), 2),
    "adaptive_max_pool3d": lambda r: Call(r(1, 2, 4, 4, 4), [2, 2, 2]),
    "max_unpool2d": lambda r: Call(r(1, 1, 2, 2), longs(0, 3, 9, 15).view(1, 1, 2, 2), [4, 4]),
    "max_unpool3d": lambda r: Call(
        r(1, 1, 1, 2, 2), longs(0, 3, 9, 15).view(1, 1, 1, 2, 2), [2, 4, 4], [1, 1, 1], [0, 0, 0]
    ),
    "fractional_max_pool2d": lambda r: Call(r(1, 2, 5, 5), [2, 2], [2, 2], r(1, 2, 2)),
    "fractional_max_pool3d": lambda r: Call(r(1, 2, 5, 5, 5), [2, 2, 2], [2, 2, 2], r(1, 2, 3)),
    "reflection_pad1d": lambda r: Call(r(2, 3, 4), [1, 1]),
    "reflection_pad2d": lambda r: Call(r(2, 3, 4, 4), [1, 1, 1, 1]),
    "replication_pad1d": lambda r: Call(r(2, 3, 4), [1, 1]),
    "replication_pad2d": lambda r: Call(r(2, 3, 4, 4), [1, 1, 1, 1]),
    "replication_pad3d": lambda r: Call(r(2, 3, 4, 4, 4), [1, 1, 1, 1, 1, 1]),
    "grid_sampler": lambda r: Call(r(1, 2, 4, 4), r(1, 3, 3, 2), 0, 0, False),
    "grid_sampler_2d": lambda r: Call(r(1, 2, 4, 4), r(1, 3, 3, 2), 0, 0, False),
    "_grid_sampler_2d_cpu_fallback": lambda r: Call(r(1, 2, 4, 4), r(1, 3, 3, 2), 0, 0, False),
    "grid_sampler_3d": lambda r: Call(r(1, 2, 4, 4, 4), r(1, 3, 3, 3, 3), 0, 0, False),
    "upsample_nearest1d": lambda r: Call(r(1, 2, 4), [6]),
    "_upsample_nearest_exact1d": lambda r: Call(r(1, 2, 4), [6]),
    "upsample_nearest2d": lambda r: Call(r(1, 2, 4, 4), [6, 6]),
    "_upsample_nearest_exact2d": lambda r: Call(r(1, 2, 4, 4), [6, 6]),
    "upsample_nearest3d": lambda r: Call(r(1, 2, 4, 4, 4), [6, 6, 6]),
    "_upsample_nearest_exact3d": lambda r: Call(r(1, 2, 4, 4, 4), [6, 6, 6]),
    "upsample_linear1d": lambda r: Call(r(1, 2, 4), [6], False),
    "upsample_bilinear2d": lambda r: Call(r(1, 2, 4, 4), [6, 6], False),
    "_upsample_bilinear2d_aa": lambda r: Call(r(1, 2, 4, 4), [6, 6], False),
    "upsample_trilinear3d": lambda r: Call(r(1, 2, 4, 4, 4), [6, 6, 6], False),
    "upsample_bicubic2d": lambda r: Call(r(1, 2, 4, 4), [6, 6], False),
    "_upsample_bicubic2d_aa": lambda r: Call(r(1, 2, 4, 4), [6, 6], False),
    # linear algebra
    "linalg.matrix_sqrth": lambda r: Call(torch.eye(3, dtype=r(1).dtype)),
    "cholesky_solve": lambda r: Call(r(3, 2), regular(r)),
    "lu_solve": lambda r: Call(r(3, 2), regular(r), torch.tensor([1, 2, 3], dtype=torch.int32)),
    "orgqr": lambda r: Call(r(4, 3), r(3)),
    "ormqr": lambda r: Call(r(4, 3), r(3), r(4, 2)),
    "triangular_solve": lambda r: Call(r(3, 2), regular(r)),
    "linalg.solve": lambda r: Call(regular(r), r(3, 2)),
    "complex": lambda r: Call(r(3), r(3)),
    "fake_quantize_per_channel_affine": lambda r: Call(
        r(3, 4), torch.ones(3), torch.zeros(3, dtype=torch.int), 0, 0, 9
    ),
    "_fake_quantize_learnable_per_tensor_affine": lambda r: Call(r(3, 4), r(1), torch.zeros(1), 0, 255, 1.0),
    "_fake_quantize_learnable_per_channel_affine": lambda r: Call(r(3, 4), r(3), torch.zeros(3), 0, 0, 255, 1.0),
    "matrix_exp": lambda r: Call(r(3, 3)),
    "linalg.matrix_exp": lambda r: Call(r(3, 3)),
    "linalg.householder_product": lambda r: Call(r(4, 3), r(3)),
    "linalg.tensorinv": lambda r: Call(regular(r, 4).view(4, 2, 2), 1),
    "linalg.tensorsolve": lambda r: Call(regular(r, 4).view(2, 2, 4), r(2, 2)),
    "linalg.lstsq": lambda r: Call(r(5, 3), r(5, 2)),
    "lu": lambda r: Call(regular(r)),
    "_lu_with_info": lambda r: Call(regular(r)),
    "linalg.pinv": lambda r: Call(r(3, 4)),
    # several dtypes at once
    "stack": lambda r: Call([r(3), r(3)]),
    "cat": lambda r: Call([r(3), r(3)]),
    "concat": lambda r: Call([r(3), r(3)]),
    "concatenate": lambda r: Call([r(3), r(3)]),
    "index_copy": lambda r: Call(r(4, 3), 0, longs(2, 0), r(2, 3)),
    "index_put": lambda r: Call(r(4), (longs(2, 0),), r(2)),
    "scatter_add": lambda r: Call(r(3), 0, longs(0, 0, 2), r(3)),
}
