"""Ops that contract tensors and that C++ makes of listed products and sums: einsum, inner, tensordot, matrix_power."""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.backends import opt_einsum

from hf_mp.casting.decompositions import AS_GIVEN

_ATEN: Any = torch.ops.aten


def einsum(equation: Any, *operands: Any, path: Sequence[int] | None = None) -> Any:
    if not isinstance(equation, str):  # operands and lists of numbers in turns
        numbers = (equation, *operands)
        equation = ",".join(map(_letters, numbers[1::2])) + ("->" + _letters(numbers[-1]) if len(numbers) % 2 else "")
        operands = numbers[: len(numbers) // 2 * 2 : 2]
    elif isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    if path is None and len(operands) > 2 and opt_einsum.enabled:
        pairs = opt_einsum.get_opt_einsum().contract_path(equation, *operands, optimize=opt_einsum.strategy)[0]
        path = [number for pair in pairs for number in pair]
    # Refuses what torch refuses, in its words.
    _ATEN.einsum(equation, [operand.detach().to("meta", torch.float32) for operand in operands])
    terms, tensors, output = _read_einsum(equation, operands)
    if len(terms) == 2 and not (set(terms[0]) ^ set(terms[1])) - set(output):
        return NotImplemented if set(terms[0]) - set(output) else AS_GIVEN  # a product of matrices, or of elements
    order = list(path or ())
    while len(terms) > 1:
        first, second = sorted(order[:2]) or (0, 1)
        del order[:2]
        (left, a), (right, b) = [(terms.pop(place), tensors.pop(place)) for place in (second, first)][::-1]
        later = "".join(terms) + output
        left, a = _sum_out(left, a, set(left) - set(right + later))
        right, b = _sum_out(right, b, set(right) - set(left + later))
        joined = "".join(letter for letter in dict.fromkeys(left + right) if letter in later)
        place = len(terms) if path else 0
        terms.insert(place, joined)
        tensors.insert(place, torch.einsum(f"{left},{right}->{joined}", a, b))
    term, tensor = _sum_out(terms[0], tensors[0], set(terms[0]) - set(output))
    return _ATEN.einsum(f"{term}->{output}", [tensor])


def _letters(numbers: Iterable[Any]) -> str:
    alphabet = string.ascii_uppercase + string.ascii_lowercase
    return "".join("..." if number is Ellipsis else alphabet[number] for number in numbers)


def _read_einsum(equation: str, operands: Sequence[Tensor]) -> tuple[list[str], list[Tensor], str]:
    """Terms, operands and output of a valid call, with a letter for each dimension.

    Single elements are squeezed where another operand has more or the output none: sizes of what is summed agree.
    """
    inputs, arrow, output = equation.replace(" ", "").replace("...", ".").partition("->")
    terms, tensors = inputs.split(","), list(operands)
    hidden = [tensor.dim() - len(term.replace(".", "")) for term, tensor in zip(terms, tensors, strict=True)]
    dots = "".join(letter for letter in string.ascii_letters if letter not in equation)[: max(hidden)]
    letters = inputs.replace(",", "").replace(".", "")
    if not arrow:
        output = "." + "".join(letter for letter in sorted(set(letters)) if letters.count(letter) == 1)
    terms = [term.replace(".", dots[len(dots) - n :]) for term, n in zip(terms, hidden, strict=True)]
    output = output.replace(".", dots)
    sizes: dict[str, set[int]] = {}
    for term, tensor in zip(terms, tensors, strict=True):
        for letter, size in zip(term, tensor.shape, strict=True):
            sizes.setdefault(letter, set()).add(size)
    for number, (term, tensor) in enumerate(zip(terms, tensors, strict=True)):
        single = [
            d for d in range(len(term)) if tensor.shape[d] == 1 and not (term[d] in output and sizes[term[d]] == {1})
        ]
        terms[number] = "".join(letter for d, letter in enumerate(term) if d not in single)
        tensors[number] = tensor.squeeze(single) if single else tensor
    return terms, tensors, output


def _sum_out(term: str, tensor: Tensor, letters: set[str]) -> tuple[str, Tensor]:
    """An operand of einsum summed over the dimensions with these letters."""
    if not letters:
        return term, tensor
    kept = "".join(letter for letter in dict.fromkeys(term) if letter not in letters)
    arranged = _ATEN.einsum(f"{term}->{kept}{''.join(sorted(letters))}", [tensor])
    return kept, torch.sum(arranged, tuple(range(-len(letters), 0)))


def inner(input: Tensor, other: Tensor) -> Any:
    if input.dim() == 0 or other.dim() == 0 or input.shape[-1] != other.shape[-1]:
        return AS_GIVEN  # multiplied by a number, or refused
    return torch.tensordot(input, other, ([-1], [-1]))


def tensordot(input: Tensor, other: Tensor, dims: Any = 2, dims_other: Sequence[int] | None = None) -> Any:
    if isinstance(dims, Tensor):
        return NotImplemented
    if dims_other is not None:  # as torch._VF.tensordot takes them
        dims = (dims, dims_other)
    elif isinstance(dims, int):
        dims = (range(-dims, 0), range(dims))
    left, right = list(dims[0]), list(dims[1])
    if len(left) != len(right) or not (_are_dims_of(input, left) and _are_dims_of(other, right)):
        return AS_GIVEN  # refused
    left, right = [dim % input.dim() for dim in left], [dim % other.dim() for dim in right]
    free = [dim for dim in range(input.dim()) if dim not in left]
    free_other = [dim for dim in range(other.dim()) if dim not in right]
    shape, columns = [input.shape[dim] for dim in free], [other.shape[dim] for dim in free_other]
    if math.prod(shape) == math.prod(columns) == 1:
        return AS_GIVEN  # a dot product, which is not listed
    for a, b in zip(left, right, strict=True):  # one element stands for as many as the other has
        if other.shape[b] == 1:
            input = input.sum(a, keepdim=True)
        elif input.shape[a] == 1:
            other = other.sum(b, keepdim=True)
    inner = [input.shape[dim] for dim in left]
    if inner != [other.shape[dim] for dim in right]:
        return AS_GIVEN  # refused
    matrix = input.permute(free + left).reshape(math.prod(shape), math.prod(inner))
    matrix_other = other.permute(right + free_other).reshape(math.prod(inner), math.prod(columns))
    return torch.mm(matrix, matrix_other).reshape(shape + columns)


def _are_dims_of(tensor: Tensor, dims: Sequence[int]) -> bool:
    return all(-tensor.dim() <= dim < tensor.dim() for dim in dims)


def matrix_power(input: Tensor, n: int) -> Any:
    if n in (0, 1):
        return AS_GIVEN
    power = input if n > 0 else torch.linalg.inv(input)
    n = abs(n)
    if n == 3:
        return torch.matmul(torch.matmul(power, power), power)
    result = power if n % 2 else None
    while n := n // 2:
        power = torch.matmul(power, power)
        if n % 2:
            result = power if result is None else torch.matmul(result, power)
    return result


def sparse_mm(mat1: Tensor, mat2: Tensor, reduce: str | None = None) -> Any:
    """``torch.sparse.mm``: an ``addmm``, but for two sparse matrices, and with ``reduce``."""
    both_sparse = mat1.layout is not torch.strided and mat2.layout is not torch.strided
    return AS_GIVEN if both_sparse or reduce is not None else NotImplemented
