"""``Region``: autocast inside an attached model, with the parameter border around every use of a weight."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp.casting.cpu.products import Factor
from hf_mp.casting.decompositions.composites import call
from hf_mp.casting.mode import autocast
from hf_mp.policy import PrecisionPolicy
from hf_mp.scaling.scalers import LossScaler
from hf_mp.step.borders import parameter_border
from hf_mp.weights.split_parameter import SplitParameter
from hf_mp.weights.working_copies import WorkingCopies


class Region(autocast):
    """Autocast inside an attached model: reads working copies and puts the parameter border around every use."""

    takes_products = True

    def __init__(
        self, policy: PrecisionPolicy, scaler: LossScaler[Any], working_copies: WorkingCopies, **settings: Any
    ) -> None:
        super().__init__(policy.compute, **settings)
        self._scaler = scaler
        self._copies = working_copies
        self._local = threading.local()

    @property
    def entered(self) -> bool:
        """Whether this thread is inside the region."""
        return getattr(self._local, "depth", 0) > 0

    def __enter__(self) -> Region:
        super().__enter__()
        self._local.depth = getattr(self._local, "depth", 0) + 1
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._local.depth -= 1
        super().__exit__(*exc_info)

    def cast_parameter(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        has_copy = (
            dtype is self._copies.dtype and parameter.dtype is torch.float32 and not torch.compiler.is_compiling()
        )
        if has_copy and not torch.is_grad_enabled():
            return self._copies.get(parameter)
        inverse = self._scaler.factors(parameter.device).inverse
        if has_copy:
            return parameter_border(parameter, self._copies.get(parameter), inverse)
        if torch.compiler.is_compiling() and isinstance(parameter, SplitParameter) and inverse is not None:
            inside = _border_outside_of_graphs(parameter, inverse)
        else:
            inside = parameter_border(parameter, None, inverse)
        return inside if inside.dtype is dtype else inside.to(dtype)

    def factor(self, tensor: Tensor) -> Factor:
        if not isinstance(tensor, nn.Parameter) or tensor.dtype is not torch.float32 or torch.compiler.is_compiling():
            return super().factor(tensor)
        return Factor(tensor, self._copies.get(tensor), self._scaler.factors(tensor.device).inverse)

    def call_unlisted(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if torch.compiler.is_dynamo_compiling():
            # It cannot look into the set below; a border that nothing differentiates through, a graph drops.
            args = tuple([self._inside(arg) for arg in args])
            return call(func, args, {key: self._inside(value) for key, value in kwargs.items()})
        if not torch.is_grad_enabled() or func in _KEEP_PARAMETERS:
            return func(*args, **kwargs)
        return func(*[self._inside(arg) for arg in args], **{key: self._inside(arg) for key, arg in kwargs.items()})

    def border_argument(self, value: Any) -> Any:
        return self._inside(value) if torch.is_grad_enabled() else value

    def _inside(self, value: Any) -> Any:
        if type(value) is Tensor:
            return value
        if isinstance(value, nn.Parameter):
            return self.cast_parameter(value, value.dtype) if value.requires_grad else value
        if type(value) in (list, tuple):
            return type(value)(self._inside(item) for item in value)
        return value


# A graph gives its inputs gradients of their own dtype: unscaled, they would underflow in FP16.
_border_outside_of_graphs = torch.compiler.disable(
    lambda parameter, inverse: parameter_border(parameter, None, inverse),
    reason="FP16 gradients leave graphs scaled; inside of torch.cond and its kind, where a graph cannot end, use "
    "precision='fp16' instead of 'fp16-lean'",
)


def _keep_parameters() -> frozenset[Callable[..., Any]]:
    """Calls that need the parameter itself: properties that carry no gradient, writers, hooks."""
    names = """
        register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad backward set_ share_memory_
        size dim ndimension stride numel nelement element_size data_ptr storage untyped_storage storage_offset
        is_contiguous is_floating_point is_complex is_shared is_pinned get_device type __len__ __hash__ __repr__
        __format__ __deepcopy__ __reduce_ex__ __setstate__ __dir__ detach
    """
    calls = {getattr(Tensor, name) for name in names.split() if hasattr(Tensor, name)}
    carries_gradient = {"T", "mT", "H", "mH", "real", "imag"}
    for name in dir(Tensor):
        descriptor = getattr(Tensor, name)
        if hasattr(descriptor, "__set__") and not callable(descriptor):
            calls.add(descriptor.__set__)
            if name not in carries_gradient:
                calls.add(descriptor.__get__)
    calls |= {torch.is_floating_point, torch.is_complex, torch.is_tensor, torch.numel}
    return frozenset(calls)


_KEEP_PARAMETERS = _keep_parameters()
