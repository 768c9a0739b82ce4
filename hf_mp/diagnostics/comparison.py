"""``compare_precisions``: how far a model's logits and log-probabilities in 16 bits are from those in FP32."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_mp.casting.nested import apply_to_tensors, named_tensors, tensors_in
from hf_mp.casting.rules import Rules, parse_rules
from hf_mp.casting.tables import TABLES, TableName, op_name
from hf_mp.diagnostics.comparison_report import LayerError, PrecisionComparison, PrecisionError
from hf_mp.diagnostics.given_batches import by_name, call, checked
from hf_mp.diagnostics.kept_state import eagerly, gradients_set_aside, untouched, weights_kept
from hf_mp.diagnostics.ranges import MASK, max_of
from hf_mp.policy import LOWER_PRECISION_DTYPES, PrecisionPolicy
from hf_mp.step.forward import AttachedForward
from hf_mp.step.mixed_precision import MixedPrecision

Precision = PrecisionPolicy | torch.dtype | str
IGNORED = -100  # of Transformers and torch: a label that does not count
ROWS_ELEMENTS = 2**22  # logits that are compared at once, in FP64


@torch.no_grad()
def compare_precisions(
    model: nn.Module,
    batches: Iterable[Any],
    precisions: Sequence[Precision | tuple[Precision, Rules]] = ("bf16", "fp16"),
    *,
    tables: TableName = "compact",
) -> PrecisionComparison:
    """Measure how far the precisions of a model are from FP32, where the error arises, and what rules buy.

    Each batch runs forward in FP32, without autocast, and in each precision, without dropout. In a second forward every
    layer is given the inputs that it has in FP32: the error of its output is what arises in it. Layers are numbered
    blocks, and the modules outside of them that have no modules inside.

    Every precision is measured without rules, with its last linear layer in FP32 (the head, whose rounding weighs most:
    arXiv 2510.26788), and with each of the rules given with it alone, and with all of these.

    The chosen tokens are the labels where the batches have integer ones that fit the logits, shifted by one where the
    model's own loss shifts them; else the next tokens of ``input_ids``, for a model that generates. Class labels count
    as tokens. Otherwise (regression, features) the logits alone are compared. Positions that ``attention_mask`` hides
    and logits that are masked do not count. A model without ``logits`` is compared by its first floating output.

    Args:
        model: any module; it is not changed. Of an attached one, a copy of its FP32 masters is compared, without the
            rules that it has: give them. Weights in 16 bits are cast to FP32 while this runs.
        batches: what to call it with: mappings of arguments, tuples of them, or one tensor each.
        precisions: presets, policies or dtypes, or pairs of one and its rules (as ``rules`` of autocast); default
            ``"bf16"`` and ``"fp16"``.
        tables: of autocast; default ``"compact"``.

    Returns:
        A :class:`PrecisionComparison`; ``print`` shows tables, ``to_dict()`` the data, ``save_plot(path)`` draws it.

    Raises:
        TypeError: for anything but a module, and for one precision in the place of several.
        ValueError: without a batch or a precision, for a batch with inf or NaN, a precision or rule that is not known,
            and a model that is inf or NaN in FP32, or returns no floating tensor.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"compare_precisions takes a model, not a {type(model).__name__}")
    asked, given = _parse(precisions, tables), checked(batches)
    found: dict[_Variant, _Differences] = {}
    notes: list[str] = []
    with _plain_model(model) as plain:
        layers = layers_of(plain)
        for number, batch in enumerate(given, 1):
            reference = _in_fp32(plain, layers, batch, number)
            found = found or {variant: _Differences() for variant in _variants(asked, reference.head)}
            for variant, differences in found.items():
                _compare(plain, layers, batch, variant, tables, reference, differences)
    first = next(iter(found.values()))
    if reference.output != "logits":
        notes.append(f"The model returns no logits: compared is its first floating output, {reference.output!r}.")
    if not first.chosen:
        notes.append("No log-probabilities: the batches have no integer labels that fit the logits.")
    errors = tuple(differences.error(*variant.described()) for variant, differences in found.items())
    for one in errors:
        if not math.isfinite(one.logits_rms):
            notes.append(f"{one.name} gives inf or NaN: hf_mp.calibrate finds the rules that keep it in range.")
    return PrecisionComparison(type(model).__name__, len(given), first.positions, first.chosen, errors, tuple(notes))


class _Variant(NamedTuple):
    """A precision with rules."""

    policy: PrecisionPolicy
    rules: tuple[tuple[Any, str], ...]

    def described(self) -> tuple[str, dict[str, str]]:
        return str(self.policy), {key if isinstance(key, str) else op_name(key): value for key, value in self.rules}


def _parse(precisions: Any, tables: TableName) -> list[_Variant]:
    if isinstance(precisions, (str, torch.dtype, PrecisionPolicy)):
        raise TypeError(f"precisions are several: write [{str(precisions)!r}]")
    asked = []
    for one in precisions:
        if isinstance(one, tuple) and (len(one) != 2 or not isinstance(one[1], Mapping)):
            raise TypeError(f"{one!r} is no precision with rules: write ('fp16', {{'lm_head': 'fp32'}})")
        precision, rules = one if isinstance(one, tuple) else (one, {})
        policy = PrecisionPolicy.parse(precision)
        parse_rules(rules, TABLES[tables])
        asked.append(_Variant(policy, tuple(rules.items())))
    if not asked:
        raise ValueError("precisions is empty: give at least one, such as 'fp16'")
    return asked


def _variants(asked: Iterable[_Variant], head: str | None) -> list[_Variant]:
    """Each precision without rules, with the head in FP32, with each rule that was asked for, and with all of them."""
    found: list[_Variant] = []
    for policy, rules in asked:
        several = [(), *([((head, "fp32"),)] if head else []), *((rule,) for rule in rules), rules]
        found += [_Variant(policy, one) for one in (several if policy.is_mixed else [()])]
    return list(dict.fromkeys(found))


# The model, plain and in FP32


@contextmanager
def _plain_model(model: nn.Module) -> Iterator[nn.Module]:
    """``model`` in evaluation mode and FP32, or a copy of it where mixed precision is attached; restores it."""
    with ExitStack() as restored:
        restored.enter_context(gradients_set_aside(list(model.parameters())))
        if any(isinstance(module.__dict__.get("forward"), AttachedForward) for module in model.modules()):
            model = copy.deepcopy(model)
            forwards = [module.__dict__.get("forward") for module in model.modules()]
            for forward in forwards:
                if isinstance(forward, AttachedForward):
                    forward.runtime.detach()
        restored.enter_context(untouched(model))
        restored.enter_context(weights_kept(model))
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dtype in LOWER_PRECISION_DTYPES:
                tensor.data = tensor.data.float()
        model.eval()
        restored.enter_context(eagerly())
        yield model


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Numbered blocks, and the modules outside of them that have none inside, each once."""
    found: dict[nn.Module, str] = {}

    def walk(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            if name.isdecimal() or next(child.children(), None) is None:
                found.setdefault(child, prefix + name)
            else:
                walk(child, f"{prefix}{name}.")

    walk(model, "")
    return {name: module for module, name in found.items()}


# A batch in FP32


@dataclass
class _LayerCall:
    """One call of a layer in FP32."""

    inputs: list[Tensor]
    output: Tensor | None = None


@dataclass
class _Reference:
    """What a batch gives in FP32."""

    output: str  # name of the model's output that is compared
    logits: Tensor  # (positions, classes)
    counts: Tensor  # bool, (positions,)
    chosen: Tensor  # int64, (positions,): below 0 where none is
    head: str | None
    calls: dict[str, list[_LayerCall]]

    def call(self, layer: str, number: int) -> _LayerCall | None:
        calls = self.calls.get(layer, [])
        return calls[number] if number < len(calls) else None


@contextmanager
def _watching(layers: Mapping[str, nn.Module], enter: Callable[..., Any], leave: Callable[..., Any]) -> Iterator[None]:
    """Call ``enter(layer, number of the call, args, kwargs)`` and ``leave(layer, number, first floating output)``."""
    begun: Counter[str] = Counter()
    handles = []
    for name, layer in layers.items():

        def entered(_: Any, args: Any, kwargs: Any, name: str = name) -> Any:
            begun[name] += 1
            with torch._C.DisableTorchFunction():
                return enter(name, begun[name] - 1, args, kwargs)

        def left(_: Any, args: Any, output: Any, name: str = name) -> None:
            tensor = next((t for t in tensors_in(output) if t.is_floating_point()), None)
            with torch._C.DisableTorchFunction():
                leave(name, begun[name] - 1, tensor)

        handles.append(layer.register_forward_pre_hook(entered, with_kwargs=True))
        handles.append(layer.register_forward_hook(left))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _in_fp32(model: nn.Module, layers: Mapping[str, nn.Module], batch: Any, number: int) -> _Reference:
    calls: dict[str, list[_LayerCall]] = {}
    linear: list[tuple[str, tuple[int, ...]]] = []  # by name, with the width of its output, in the order of the calls

    def enter(name: str, number: int, args: Any, kwargs: Any) -> None:
        # Cloned: the model may write into them later.
        inputs = [t.clone() if t.is_floating_point() else t for t in tensors_in((args, kwargs))]
        calls.setdefault(name, []).append(_LayerCall(inputs))

    def leave(name: str, number: int, output: Tensor | None) -> None:
        calls[name][number].output = None if output is None else output.clone()

    heads = [
        module.register_forward_hook(lambda m, args, out, name=name: linear.append((name, tuple(out.shape)[-1:])))
        for name, module in model.named_modules()
        if name and isinstance(module, nn.Linear)
    ]
    try:
        with untouched(model), _watching(layers, enter, leave):
            outputs = call(model, batch)
    finally:
        for handle in heads:
            handle.remove()
    name, logits = _logits_of(outputs)
    rows = _in_rows(logits)
    if rows.isnan().any() or (rows == math.inf).any():
        raise ValueError(
            f"{type(model).__name__} is inf or NaN in FP32 for batch {number}, so that no precision can be compared "
            "with it: the cause is the model or its data, look for weights that are not finite"
        )
    counts, chosen = _what_counts(model, logits, outputs, by_name(model, batch))
    head = next((name for name, width in reversed(linear) if width == logits.shape[-1:]), None)
    return _Reference(name, rows, counts, chosen, head, calls)


def _logits_of(outputs: Any) -> tuple[str, Tensor]:
    """The logits, or the first floating output that is no loss, with its name."""
    named = [(name, t) for name, t in named_tensors(outputs) if t.is_floating_point() and t.dim()]
    if not named:
        raise ValueError("the model returns no floating tensor besides a loss: there is nothing to compare")
    return next((one for one in named if one[0] == "logits"), named[0])


def _in_rows(logits: Tensor) -> Tensor:
    return logits.detach().reshape(-1, logits.shape[-1] if logits.dim() > 1 else 1)


def _what_counts(model: nn.Module, logits: Tensor, outputs: Any, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Which positions count, and the token that is chosen at each; below 0 where none is."""
    shape = logits.shape[:-1] if logits.dim() > 1 else logits.shape
    prefix = "decoder_" if getattr(getattr(model, "config", None), "is_encoder_decoder", False) else ""

    def fitting(name: str) -> Tensor | None:
        found = arguments.get(name)
        is_integer = isinstance(found, Tensor) and not found.is_floating_point() and found.shape == shape
        return found if is_integer and logits.dim() > 1 and logits.shape[-1] > 1 else None

    mask = fitting(f"{prefix}attention_mask")
    counts = torch.ones(shape, dtype=torch.bool, device=logits.device) if mask is None else mask.bool()
    nothing = torch.full(shape, IGNORED, device=logits.device)
    if (labels := fitting("labels")) is not None:
        chosen = _as_the_loss_does(logits, labels.long(), outputs)
    elif (ids := fitting(f"{prefix}input_ids")) is not None and getattr(model, "can_generate", bool)():
        chosen = _next(ids.masked_fill(~counts, IGNORED))
    else:
        chosen = nothing
    return counts.flatten(), chosen.flatten()


def _as_the_loss_does(logits: Tensor, labels: Tensor, outputs: Any) -> Tensor:
    """The labels, shifted by one where that gives the model's loss."""
    loss = next((t for t in tensors_in(outputs) if t.is_floating_point() and not t.dim()), None)
    if loss is None or labels.dim() < 2:
        return labels
    found = [labels, _next(labels)]
    off = [abs(F.cross_entropy(_in_rows(logits).float(), one.flatten()).item() - loss.item()) for one in found]
    return found[off[1] < off[0]]


def _next(ids: Tensor) -> Tensor:
    return F.pad(ids[:, 1:], (0, 1), value=IGNORED)


# A batch in another precision


def _compare(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    batch: Any,
    variant: _Variant,
    tables: TableName,
    reference: _Reference,
    differences: _Differences,
) -> None:
    """Run a batch in a precision twice: as it is, and with FP32's inputs to each layer."""
    fits: set[tuple[str, int]] = set()

    def give_fp32(name: str, number: int, args: Any, kwargs: Any) -> Any:
        exact, came = reference.call(name, number), list(tensors_in((args, kwargs)))
        if exact is None or [t.shape for t in exact.inputs] != [t.shape for t in came]:
            return None
        fits.add((name, number))
        inputs = {id(old): _as(new, old) for old, new in zip(came, exact.inputs, strict=True)}
        return apply_to_tensors(lambda tensor: inputs.get(id(tensor), tensor), (args, kwargs))

    def take_total(name: str, number: int, output: Tensor | None) -> None:
        differences.totals.setdefault(name, _Ratio()).add(output, reference.call(name, number))

    def take_own(name: str, number: int, output: Tensor | None) -> None:
        if (name, number) in fits:
            differences.owns.setdefault(name, _Ratio()).add(output, reference.call(name, number))

    runtime = MixedPrecision(variant.policy, rules=dict(variant.rules), tables=tables)
    with weights_kept(model):  # FP16 and 16 bits more do not hold all of FP32
        try:
            runtime.attach(model)
            with untouched(model), _watching(layers, lambda *entered: None, take_total):
                logits = _logits_of(call(model, batch))[1]
            with untouched(model), _watching(layers, give_fp32, take_own):
                call(model, batch)
        finally:
            runtime.detach()
    differences.add(_in_rows(logits), reference)


def _as(new: Tensor, old: Tensor) -> Tensor:
    """``new`` in the dtype of ``old``; ``old`` where that does not hold it: a mask of FP32's smallest number."""
    cast = new.to(old.dtype)
    return cast if cast.isfinite().all() else old


@dataclass
class _Ratio:
    """The norm of differences over the norm of what is expected."""

    squares: float = 0.0
    expected: float = 0.0

    def add(self, found: Tensor | None, exact: _LayerCall | None) -> None:
        if found is None or exact is None or exact.output is None or exact.output.shape != found.shape:
            return
        expected = exact.output.double()
        difference = (found.double() - expected).masked_fill(~expected.isfinite(), 0.0)
        self.squares += difference.square().sum().item()
        self.expected += expected.masked_fill(~expected.isfinite(), 0.0).square().sum().item()

    def value(self) -> float:
        if not self.expected:
            return 0.0 if not self.squares else math.nan
        return _finite(math.sqrt(self.squares / self.expected))


@dataclass
class _Differences:
    """What one precision differs from FP32 by, over the batches."""

    positions: int = 0
    chosen: int = 0
    elements: int = 0  # logits
    squares: float = 0.0
    maximum: float = 0.0
    chosen_squares: float = 0.0
    chosen_maximum: float = 0.0
    divergence: float = 0.0
    totals: dict[str, _Ratio] = field(default_factory=dict)
    owns: dict[str, _Ratio] = field(default_factory=dict)

    def add(self, logits: Tensor, reference: _Reference) -> None:
        found, expected = logits[reference.counts], reference.logits[reference.counts]
        size = max(ROWS_ELEMENTS // expected.shape[-1], 1)
        parts = (tensor.split(size) for tensor in (found, expected, reference.chosen[reference.counts]))
        for rows in zip(*parts, strict=True):
            self._add_rows(rows[0].double(), rows[1].double(), rows[2])
        self.positions += len(expected)

    def _add_rows(self, found: Tensor, expected: Tensor, chosen: Tensor) -> None:
        difference = (found - expected)[expected > MASK]
        self.elements += difference.numel()
        self.squares += difference.square().sum().item()
        self.maximum = max_of([self.maximum, _largest(difference)])
        if not (chosen >= 0).any():
            return
        found, expected, chosen = (tensor[chosen >= 0] for tensor in (found, expected, chosen))
        found, expected = found.log_softmax(-1), expected.log_softmax(-1)
        probability = expected.exp()
        off = (found - expected).gather(-1, chosen[:, None])
        self.chosen += len(chosen)
        self.chosen_squares += off.square().sum().item()
        self.chosen_maximum = max_of([self.chosen_maximum, _largest(off)])
        self.divergence += (probability * (expected - found)).masked_fill(probability == 0.0, 0.0).sum().item()

    def error(self, precision: str, rules: dict[str, str]) -> PrecisionError:
        layers = tuple(
            LayerError(name, self.owns[name].value() if name in self.owns else None, total.value())
            for name, total in self.totals.items()
        )
        logits = _rms(self.squares, self.elements), _finite(self.maximum)
        if not self.chosen:
            return PrecisionError(precision, rules, *logits, layers=layers)
        chosen = _rms(self.chosen_squares, self.chosen), _finite(self.chosen_maximum)
        return PrecisionError(precision, rules, *logits, *chosen, _finite(self.divergence / self.chosen), layers)


def _rms(squares: float, count: int) -> float:
    return _finite(math.sqrt(squares / count)) if count else 0.0


def _largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan
