"""Load the weights that ``save_pretrained`` wrote, by the names of the model.

Transformers writes the names of the Hub: experts one by one, older prefixes of vision-language models. The Trainer
looks in such a file for the names of the model, with ``strict=False``, and leaves the other tensors as they were.
Here the file is converted by the functions of ``from_pretrained``, and a tensor that stays unloaded is an error.
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

_MOST_NAMES = 4  # of tensors, in a message
_COMPILED = "_orig_mod"  # the model inside the module that torch.compile returns
# Transformers has no public function for this. Without one of these, equal names alone are loaded.
_mapping_of = getattr(conversion_mapping, "get_model_conversion_mapping", None)
_convert_into = getattr(core_model_loading, "convert_and_load_state_dict_in_model", None)
_settings_of_loading = getattr(modeling_utils, "LoadStateDictConfig", None)
_PrefixChange = getattr(core_model_loading, "PrefixChange", ())


def weight_files(checkpoint: Path) -> list[Path]:
    """The files with the weights of a whole model, as the Trainer chooses them; empty if there are none."""
    for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        if (checkpoint / name).is_file():
            return [checkpoint / name]
    for name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        if (checkpoint / name).is_file():
            index = json.loads((checkpoint / name).read_text(encoding="utf-8"))
            return [checkpoint / shard for shard in sorted(set(index["weight_map"].values()))]
    return []


def load_weights(files: Sequence[Path], model: nn.Module) -> None:
    """Load a whole model from its :func:`weight_files`, in the names of the model or of the Hub.

    A warning names frozen parameters that are not in the files, and tensors that the model does not have.

    Raises:
        CheckpointError: before anything is loaded, naming the tensors, for other shapes, and for parameters that train
            and buffers that are not in the files. Also for frozen parameters, if the files have tensors without a place
            in the model: those may be the same under other names.
    """
    checkpoint = files[0].parent
    # save_pretrained of a model that torch.compile wraps writes the names of the wrapper.
    model = getattr(model, _COMPILED, model)
    with ExitStack() as at_end:
        stored = {name.removeprefix(f"{_COMPILED}."): value for name, value in _open(files, at_end).items()}
        found = _find(stored, model)
        _check_complete(found, checkpoint, model)
        model.load_state_dict({name: value[...] for name, value in found.tensors.items()}, strict=False)
    if found.missing:
        logger.warning(
            f"{checkpoint} has no tensor for {listed(found.missing)}: frozen, they keep the values of before"
        )
    if found.unexpected:
        logger.warning(f"the model has no place for {listed(found.unexpected)} of {checkpoint}")


@contextmanager
def require_all_loaded(checkpoint: Path | str, model: nn.Module) -> Iterator[None]:
    """Check at the end of the context that ``checkpoint`` was loaded into each parameter of ``model`` that trains.

    Raises:
        CheckpointError: naming the parameters that nothing was written to.
    """
    before = {name: (p, _written(p)) for name, p in model.named_parameters() if p.requires_grad}
    yield
    after = dict(model.named_parameters())
    # A loader writes a parameter, gives it other memory, or puts a new one in its place.
    left = [name for name, (p, written) in before.items() if after.get(name) is p and _written(p) == written]
    check_all_loaded(left, checkpoint, model)


def check_all_loaded(left: Sequence[str], checkpoint: Path | str, model: nn.Module) -> None:
    """Raise a CheckpointError if ``left``, the parameters that train and were not loaded, is not empty."""
    if left and not Path(checkpoint).is_dir():
        raise CheckpointError(
            f"{checkpoint} is not there for this process: save to a file system that all processes share, or with "
            "save_on_each_node=True"
        )
    if left:
        raise CheckpointError(
            f"{checkpoint} has no values for {listed(left)} of this {type(model).__name__}. They train, and keep the "
            "values of before: freeze them, or resume with the model that was saved. PEFT saves the parameters of its "
            "adapters and of modules_to_save, and not the encoder of P-tuning"
        )


def _written(parameter: Tensor) -> tuple[int, int]:
    """Return the version and the address of ``parameter``; a write in place or other memory changes one of them."""
    # FSDP2 may give a shard other memory in a load that does not write it.
    return version_of(parameter), 0 if is_dtensor(parameter) else parameter.data_ptr()


# Names


@dataclass(frozen=True)
class _Found:
    """The tensors of a model in a checkpoint, by their names in the model."""

    tensors: Mapping[str, Any]  # tensors, or slices of safetensors, which are read by [...]
    missing: set[str]
    unexpected: set[str]
    problems: list[str] = field(default_factory=list)  # other shapes, failed conversions

    @property
    def distance(self) -> int:
        """The number of tensors that have no partner; 0 if all are found."""
        return len(self.missing) + len(self.unexpected) + len(self.problems)


def _open(files: Sequence[Path], at_end: ExitStack) -> dict[str, Any]:
    """All tensors of ``files`` by name; those of safetensors are read when they are used, before ``at_end``."""
    stored: dict[str, Any] = {}
    for path in files:
        if path.suffix == ".safetensors":
            file = at_end.enter_context(safe_open(path, framework="pt"))
            stored |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        else:
            stored |= torch.load(path, map_location="cpu", weights_only=True)
    return stored


def _find(stored: Mapping[str, Any], model: nn.Module) -> _Found:
    """Return the tensors of ``model`` in ``stored``, by the first conversion that finds all or by the nearest."""
    nearest: _Found | None = None
    for mapping in _mappings(model):
        found = _expected(_converted(stored, mapping, model) if mapping else _by_equal_names(stored, model), model)
        if nearest is None or found.distance < nearest.distance:
            nearest = found
        if not nearest.distance:
            break
    assert nearest is not None
    return nearest


def _mappings(model: nn.Module) -> Iterator[list[Any]]:
    """Conversions from the names of the Hub, the likeliest first; an empty one is that of equal names."""
    if not (isinstance(model, PreTrainedModel) and _mapping_of and _convert_into and _settings_of_loading):
        yield []
        return
    # save_pretrained reverts the conversion that from_pretrained used, or this default for a model from a config.
    used = getattr(model, "_weight_conversions", None)
    if used is None:
        used = [one for one in _mapping_of(model, add_legacy=False) if not isinstance(one, _PrefixChange)]
    yield copy.deepcopy(used)
    # The model may have been made otherwise when the checkpoint was saved.
    yield _mapping_of(model)


def _by_equal_names(stored: Mapping[str, Any], model: nn.Module) -> _Found:
    shapes = {name: value.shape for name, value in _tensors_of(model).items()}
    sizes = {name: torch.Size(_shape(value)) for name, value in stored.items() if name in shapes}
    others = [(name, size, shapes[name]) for name, size in sizes.items() if size != shapes[name]]
    return _Found(stored, shapes.keys() - stored.keys(), stored.keys() - shapes.keys(), _other_sizes(others))


def _other_sizes(mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> list[str]:
    """One sentence for tensors of another shape than in the model, of which the first is named; none for none."""
    if not (ordered := sorted(mismatched)):
        return []
    name, saved, here = ordered[0]
    more = f", and {len(ordered) - 1} more" if len(ordered) > 1 else ""
    return [f"size mismatch for {name}: {tuple(saved)}, and {tuple(here)} in the model{more}"]


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _shape(value: Any) -> Iterable[int]:
    return value.shape if isinstance(value, Tensor) else value.get_shape()


def _converted(stored: Mapping[str, Any], mapping: list[Any], model: nn.Module) -> _Found:
    """Convert ``stored`` by Transformers' function; it replaces parameters, so it loads into a shadow of ``model``."""
    assert _convert_into is not None and _settings_of_loading is not None
    shadow = _Shadow(model)
    try:
        info, _ = _convert_into(shadow, dict(stored), _settings_of_loading(weight_mapping=mapping))
    except (TypeError, AttributeError) as error:  # of a Transformers in which it takes other arguments
        names = shadow.state_dict().keys()
        return _Found({}, set(names), set(stored), [f"Transformers does not convert them ({error})"])
    tensors = {name: value for name, value in shadow.state_dict().items() if not value.is_meta}
    problems = _other_sizes(info.mismatched_keys)
    if failed := info.conversion_errors:  # by name, each a stack trace and, in its last line, the operation
        problems.append(f"{listed(failed)} cannot be converted ({failed[min(failed)].splitlines()[-1]})")
    lost = shadow.state_dict().keys() - tensors.keys() - failed.keys() - {name for name, *_ in info.mismatched_keys}
    return _Found(tensors, lost, set(info.unexpected_keys), problems)


class _Shadow(nn.Module):
    """A module with the names, shapes and dtypes of a model on the meta device, to receive the loaded tensors."""

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


def _expected(found: _Found, model: nn.Module) -> _Found:
    """Return ``found`` without other names of tied weights that are found, and without those that a class ignores."""
    tied: dict[Any, set[str]] = {}
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        # Two parameters of one memory are tied as well, for save_pretrained.
        tied.setdefault((tensor.data_ptr() or id(tensor), tensor.shape), set()).add(name)
    there = set().union(*(names for names in tied.values() if names & found.tensors.keys()))
    keys = SimpleNamespace(missing_keys=found.missing - there, unexpected_keys=set(found.unexpected))
    if (adjust := getattr(model, "_adjust_missing_and_unexpected_keys", None)) is not None:
        adjust(keys)
    trained = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    missing = keys.missing_keys | ((found.missing - there) & trained)
    return _Found(found.tensors, missing, keys.unexpected_keys, found.problems)


def _check_complete(found: _Found, checkpoint: Path, model: nn.Module) -> None:
    """Raise a CheckpointError for tensors that would stay as they are."""
    frozen = {name for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    lost = found.missing if found.unexpected else found.missing - frozen
    said = list(found.problems)
    if lost:
        said.append(f"no tensor for {listed(lost)}")
    if lost and found.unexpected:
        said.append(f"no place in the model for {listed(found.unexpected)}")
    if said:
        raise CheckpointError(
            f"the model of {checkpoint} does not fit this run: {'; '.join(said)}. Resume with the model that was "
            "saved, and with the version of Transformers that saved it"
        )


def listed(names: Iterable[str]) -> str:
    """The first of several names, and the number of the others, for a message."""
    ordered = sorted(names)
    more = len(ordered) - _MOST_NAMES
    return ", ".join(ordered[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
