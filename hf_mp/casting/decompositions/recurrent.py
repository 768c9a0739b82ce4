"""Decompositions of recurrent ops: cells, GRUs, LSTMs with projections or packed.

Cells and the loop over time are torch's own (``torch._decomp``); its loop over layers is not used, because it leaves
out the dropout between them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decompositions

Layer = Callable[..., tuple[Tensor, Any]]


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


def _stack(
    layer: Layer, input: Tensor, hidden: Sequence[Any], weights: Sequence[Any], settings: Sequence[Any]
) -> tuple[Tensor, list[Any]]:
    """Run all layers; ``settings`` are has_biases, num_layers, dropout, train, bidirectional."""
    has_biases, num_layers, dropout, train, bidirectional = settings
    finals = []
    for number in range(num_layers):
        outputs = []
        for reverse in (False, True)[: 1 + bidirectional]:
            index = (1 + bidirectional) * number + reverse
            output, final = layer(input, hidden[index], weights[index], has_biases, reverse=reverse)
            outputs.append(output)
            finals.append(final)
        input = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and number < num_layers - 1:
            input = torch.dropout(input, dropout, True)
    return input, finals


def _run(layer: Layer, args: Sequence[Any], hidden: Sequence[Any], has_projections: bool) -> tuple[Tensor, list[Any]]:
    """Run the layers on the arguments of ``torch.gru`` and ``torch.lstm``: input, hidden, weights, ..., batch_first."""
    input, _, weights, *settings, batch_first = args
    grouped = decompositions.gather_params(weights, settings[0], has_projections)
    output, finals = _stack(layer, input.transpose(0, 1) if batch_first else input, hidden, grouped, settings)
    return output.transpose(0, 1) if batch_first else output, finals


def _unpacked(args: Sequence[Any]) -> list[Any]:
    """Arguments of a packed call (data, batch_sizes, hidden, weights, ...) as those of one that is not."""
    data, _, hidden, *rest = args
    return [data, hidden, *rest, False]


def gru(*args: Any) -> tuple[Tensor, Tensor]:
    layer = functools.partial(decompositions.one_layer_rnn, hidden_fn=decompositions.gru_cell)
    if isinstance(args[2], Tensor):
        cell = decompositions.gru_cell_data
        layer = functools.partial(decompositions.one_layer_rnn_data, hidden_fn=cell, batch_sizes=args[1])
        args = tuple(_unpacked(args))
    output, finals = _run(layer, args, args[1].unbind(0), False)
    return output, torch.stack(finals, 0)


def lstm(*args: Any) -> Any:
    """``torch.lstm``; NotImplemented where it is oneDNN's, which is lowered as a whole."""
    layer = decompositions.one_layer_lstm
    if isinstance(args[1], Tensor):
        layer = functools.partial(decompositions.one_layer_lstm_data, batch_sizes=args[1])
        args = tuple(_unpacked(args))
    elif args[1][0].shape[-1] == args[1][1].shape[-1]:
        return NotImplemented
    hidden, cell = args[1]
    has_projections = hidden.shape[-1] != cell.shape[-1]
    output, finals = _run(layer, args, list(zip(hidden, cell, strict=True)), has_projections)
    return output, torch.stack([final[0] for final in finals], 0), torch.stack([final[1] for final in finals], 0)
