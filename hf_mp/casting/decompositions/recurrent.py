"""Decompositions of recurrent ops: cells, GRUs, LSTMs with projections or packed.

They are torch's own (``torch._decomp``), a layer at a time, because its loop over layers leaves out the dropout between
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decompositions


def _of_input_and_hidden(input: Tensor, hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
    ih, hh, ih_bias, hh_bias = (*weights, None, None)[:4]
    return F.linear(hidden, hh, hh_bias) + F.linear(input, ih, ih_bias)  # type: ignore[arg-type]


def rnn_tanh_cell(input: Tensor, hx: Tensor, *weights: Tensor) -> Tensor:
    return torch.tanh(_of_input_and_hidden(input, hx, weights))


def rnn_relu_cell(input: Tensor, hx: Tensor, *weights: Tensor) -> Tensor:
    return torch.relu(_of_input_and_hidden(input, hx, weights))


def gru_cell(input: Tensor, hx: Tensor, *weights: Tensor) -> Tensor:
    ih, hh, ih_bias, hh_bias = (*weights, None, None)[:4]
    return decompositions.gru_cell_data(input, hx, ih, ih_bias, hh, hh_bias)


def lstm_cell(input: Tensor, hx: Sequence[Tensor], *weights: Tensor) -> tuple[Tensor, Tensor]:
    ih, hh, ih_bias, hh_bias = (*weights, None, None)[:4]
    of_input = F.linear(input, ih, ih_bias)  # type: ignore[arg-type]
    return decompositions.lstm_cell(of_input, hx[0], hx[1], hh, hh_bias, None, chunk_dim=1)


def _by_layer(
    whole: Callable[..., Any], sizes: Sequence[Tensor], input: Tensor, hidden: Sequence[Any], weights: Sequence[Tensor],
    has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Run a decomposition of torch's layer by layer; ``sizes`` are the batch sizes of a packed input.

    ``hidden`` is the hidden state of each layer; the result is the output, then each final state of all layers.
    """
    input = input.transpose(0, 1) if batch_first else input
    settings = (has_biases, 1, 0.0, train, bidirectional, *([] if sizes else [False]))
    each = len(weights) // num_layers
    finals = []
    for number, state in enumerate(hidden):
        input, *final = whole(input, *sizes, state, weights[number * each : (number + 1) * each], *settings)
        finals.append(final)
        if dropout and train and number < num_layers - 1:
            input = torch.dropout(input, dropout, True)
    # torch 2.11 gives the final states of a layer one dimension more.
    joined = [torch.cat(of_layers, 0).flatten(0, -3) for of_layers in zip(*finals, strict=True)]
    return [input.transpose(0, 1) if batch_first else input, *joined]


def gru(*args: Any) -> tuple[Any, ...]:
    packed = isinstance(args[2], Tensor)  # data, batch_sizes, hidden, weights, ...
    input, sizes, (hidden, *rest) = args[0], args[1 : 1 + packed], args[1 + packed :]
    whole = decompositions.gru_impl_data if packed else decompositions.gru_impl
    return tuple(_by_layer(whole, sizes, input, hidden.chunk(rest[2]), *rest))


def lstm(*args: Any) -> Any:
    """``torch.lstm``; NotImplemented where it is oneDNN's, which is lowered as a whole."""
    packed = isinstance(args[1], Tensor)
    input, sizes, ((hidden, cell), *rest) = args[0], args[1 : 1 + packed], args[1 + packed :]
    if not packed and hidden.shape[-1] == cell.shape[-1]:
        return NotImplemented
    whole = decompositions.lstm_data_impl if packed else decompositions.lstm_impl
    states = list(zip(hidden.chunk(rest[2]), cell.chunk(rest[2]), strict=True))
    return tuple(_by_layer(whole, sizes, input, states, *rest))
