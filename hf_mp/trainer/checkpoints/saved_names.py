"""Load the weights that ``save_pretrained`` wrote, and raise an error for tensors that are not loaded.

Transformers saves Hub names (single experts, older prefixes of vision-language models). The Trainer does not convert
them and loads with ``strict=False``. Here the functions of ``from_pretrained`` do.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel, conversion_mapping, core_model_loading, modeling_utils
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME, logging

from hf_mp.kernels.tensors import version_of
from hf_mp.ranks.parallelism import is_dtensor
from hf_mp.trainer.checkpoints.manifest import CheckpointError

logger = logging.get_logger(__name__)

_MAX_NAMES = 4  # tensor names in a message
_COMPILED = "_orig_mod"  # attribute of compiled modules
# Not public. If one of these is missing, only equal names are loaded.
_mapping_of = getattr(conversion_mapping, "get_model_conversion_mapping", None)
_convert_into = getattr(core_model_loading, "convert_and_load_state_dict_in_model", None)
_settings_of_loading = getattr(modeling_utils, "LoadStateDictConfig", None)
_PrefixChange = getattr(core_model_loading, "PrefixChange", ())


def weight_files(checkpoint: Path) -> list[Path]:
    """Return the files of a full model, in the Trainer's order of preference."""
    for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        if (checkpoint / name).is_file():
            return [checkpoint / name]
    for name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        if (checkpoint / name).is_file():
            index = json.loads((checkpoint / name).read_text(encoding="utf-8"))
            return [checkpoint / shard for shard in sorted(set(index["weight_map"].values()))]
    return []


def load_weights(files: Sequence[Path], model: nn.Module) -> None:
    """Load a full model from its :func:`weight_files`; warn of missing frozen parameters and unexpected tensors.

    Raises a CheckpointError, before anything is loaded, for other shapes and missing trainable parameters and buffers;
    for missing frozen parameters only if there are unexpected tensors.
    """
    checkpoint = files[0].parent
    # save_pretrained() of a compiled model writes the prefix.
    model = getattr(model, _COMPILED, model)
    with ExitStack() as at_end:
        stored = {name.removeprefix(f"{_COMPILED}."): value for name, value in _open(files, at_end).items()}
        found = _match(stored, model)
        _check_complete(found, checkpoint, model)
        model.load_state_dict({name: value[...] for name, value in found.tensors.items()}, strict=False)
    if found.missing:
        logger.warning(
            f"{checkpoint} has no tensor for {shorten_list(found.missing)}: frozen, they keep the values of before"
        )
    if found.unexpected:
        logger.warning(f"the model has no place for {shorten_list(found.unexpected)} of {checkpoint}")


@contextmanager
def require_all_loaded(checkpoint: Path | str, model: nn.Module) -> Iterator[None]:
    """Raise a CheckpointError if a trainable parameter was not written in this context."""
    before = {name: (p, _version_and_address(p)) for name, p in model.named_parameters() if p.requires_grad}
    yield
    after = dict(model.named_parameters())
    # Loaders write a parameter in place, change its memory, or replace it by a new one.
    not_loaded = [
        name for name, (p, written) in before.items() if after.get(name) is p and _version_and_address(p) == written
    ]
    check_all_loaded(not_loaded, checkpoint, model)


def check_all_loaded(not_loaded: Sequence[str], checkpoint: Path | str, model: nn.Module) -> None:
    if not_loaded and not Path(checkpoint).is_dir():
        raise CheckpointError(
            f"{checkpoint} is not there for this process: save to a file system that all processes share, or with "
            "save_on_each_node=True"
        )
    if not_loaded:
        raise CheckpointError(
            f"{checkpoint} has no values for {shorten_list(not_loaded)} of this {type(model).__name__}. They train, "
            "and keep the values of before: freeze them, or resume with the model that was saved. PEFT saves the "
            "parameters of its adapters and of modules_to_save, and not the encoder of P-tuning"
        )


def _version_and_address(parameter: Tensor) -> tuple[int, int]:
    # FSDP2 may change the memory of a shard without loading it.
    return version_of(parameter), 0 if is_dtensor(parameter) else parameter.data_ptr()


@dataclass(frozen=True)
class _Match:
    """Tensors of a checkpoint by their names in the model.

    Attributes:
        tensors: tensors, or slices of safetensors to read by ``[...]``.
        missing, unexpected: names that only the model or only the checkpoint has.
        problems: messages about other shapes and failed conversions.
    """

    tensors: Mapping[str, Any]
    missing: set[str]
    unexpected: set[str]
    problems: list[str] = field(default_factory=list)

    @property
    def errors(self) -> int:
        return len(self.missing) + len(self.unexpected) + len(self.problems)


def _open(files: Sequence[Path], at_end: ExitStack) -> dict[str, Any]:
    """Return all tensors by name; those of safetensors are read on use, until ``at_end``."""
    stored: dict[str, Any] = {}
    for path in files:
        if path.suffix == ".safetensors":
            file = at_end.enter_context(safe_open(path, framework="pt"))
            stored |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        else:
            stored |= torch.load(path, map_location="cpu", weights_only=True)
    return stored


def _match(stored: Mapping[str, Any], model: nn.Module) -> _Match:
    """Match ``stored`` with ``model`` by the first conversion without errors, or the one with the fewest."""
    matches: list[_Match] = []
    for conversion in _conversions(model):
        match = _convert(stored, conversion, model) if conversion else _match_equal_names(stored, model)
        matches.append(_without_expected(match, model))
        if not matches[-1].errors:
            break
    return min(matches, key=lambda match: match.errors)


def _conversions(model: nn.Module) -> Iterator[list[Any]]:
    """Yield conversions of Hub names, the likeliest first; an empty list means equal names."""
    if not (isinstance(model, PreTrainedModel) and _mapping_of and _convert_into and _settings_of_loading):
        yield []
        return
    # save_pretrained() reverts the conversion of from_pretrained(); without one, this default.
    of_this_model = getattr(model, "_weight_conversions", None)
    if of_this_model is None:
        of_this_model = [one for one in _mapping_of(model, add_legacy=False) if not isinstance(one, _PrefixChange)]
    yield copy.deepcopy(of_this_model)
    # The saved model may have been created differently.
    yield _mapping_of(model)


def _match_equal_names(stored: Mapping[str, Any], model: nn.Module) -> _Match:
    shapes = {name: value.shape for name, value in _tensors_of(model).items()}
    stored_shapes = {name: torch.Size(_shape(value)) for name, value in stored.items() if name in shapes}
    mismatched = [(name, shape, shapes[name]) for name, shape in stored_shapes.items() if shape != shapes[name]]
    missing, unexpected = shapes.keys() - stored.keys(), stored.keys() - shapes.keys()
    return _Match(stored, missing, unexpected, _shape_problems(mismatched))


def _shape_problems(mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> list[str]:
    """``mismatched`` are a name, the saved shape and that in the model."""
    ordered = sorted(mismatched)
    if not ordered:
        return []
    name, saved, here = ordered[0]
    more = f", and {len(ordered) - 1} more" if len(ordered) > 1 else ""
    return [f"size mismatch for {name}: {tuple(saved)}, and {tuple(here)} in the model{more}"]


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _shape(value: Any) -> Iterable[int]:
    return value.shape if isinstance(value, Tensor) else value.get_shape()


def _convert(stored: Mapping[str, Any], conversion: list[Any], model: nn.Module) -> _Match:
    """Convert by Transformers' function, which replaces parameters: load into a copy of ``model``."""
    assert _convert_into is not None and _settings_of_loading is not None
    target = _MetaCopy(model)
    try:
        info, _ = _convert_into(target, dict(stored), _settings_of_loading(weight_mapping=conversion))
    except (TypeError, AttributeError) as error:  # another version of Transformers
        names = target.state_dict().keys()
        return _Match({}, set(names), set(stored), [f"Transformers does not convert them ({error})"])
    state, failed = target.state_dict(), info.conversion_errors
    tensors = {name: value for name, value in state.items() if not value.is_meta}
    problems = _shape_problems(info.mismatched_keys)
    if failed:  # stack traces by name; the last line names the operation
        problems.append(f"{shorten_list(failed)} cannot be converted ({failed[min(failed)].splitlines()[-1]})")
    with_problem = failed.keys() | {name for name, *_ in info.mismatched_keys}
    missing = state.keys() - tensors.keys() - with_problem
    return _Match(tensors, missing, set(info.unexpected_keys), problems)


class _MetaCopy(nn.Module):
    """Copy of names, shapes and dtypes on the meta device."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model_prefix, self.config = model.base_model_prefix, model.config
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for name, value in _tensors_of(model).items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
            if name in parameters:
                module.register_parameter(last, nn.Parameter(empty, requires_grad=False))
            else:
                module.register_buffer(last, empty)


def _without_expected(match: _Match, model: nn.Module) -> _Match:
    """Remove the other names of tied weights, and names that the model class ignores."""
    names_by_tensor: dict[Any, set[str]] = {}
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        # save_pretrained() also treats parameters that share memory as tied.
        names_by_tensor.setdefault((tensor.data_ptr() or id(tensor), tensor.shape), set()).add(name)
    loaded = set().union(*(names for names in names_by_tensor.values() if names & match.tensors.keys()))
    missing = match.missing - loaded
    keys = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(match.unexpected))
    adjust = getattr(model, "_adjust_missing_and_unexpected_keys", None)
    if adjust is not None:
        adjust(keys)
    trained = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    return _Match(match.tensors, keys.missing_keys | (missing & trained), keys.unexpected_keys, match.problems)


def _check_complete(match: _Match, checkpoint: Path, model: nn.Module) -> None:
    frozen = {name for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    # With unexpected tensors, a missing one may have another name.
    missing = match.missing if match.unexpected else match.missing - frozen
    problems = list(match.problems)
    if missing:
        problems.append(f"no tensor for {shorten_list(missing)}")
        if match.unexpected:
            problems.append(f"no place in the model for {shorten_list(match.unexpected)}")
    if problems:
        raise CheckpointError(
            f"the model of {checkpoint} does not fit this run: {'; '.join(problems)}. Resume with the model that was "
            "saved, and with the version of Transformers that saved it"
        )


def shorten_list(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _MAX_NAMES
    return ", ".join(ordered[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
