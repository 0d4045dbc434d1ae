"""A stand-in for the dense weight of a quantized layer.

Model code reads ``layer.weight.dtype`` or ``.shape`` (T5 does on every forward), and sometimes
computes with the weight. Both work: the attributes cost nothing, and any operation dequantizes first.
Writing to it is refused; a slice of it is a dense copy, and writing to that changes nothing else.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from woq_triton.scheme import QuantScheme
from woq_triton.weight import QuantizedWeight


class LazyWeight(Tensor):
    """A read-only tensor that is dequantized, anew each time, when an operation uses it.

    Args:
        read: Gives the weight it stands for, when an operation needs it.
        scheme: How that is quantized.
        shape: ``(out_features, in_features)``.
        dtype: The dtype it shows and dequantizes to.
        device: Where the weight is.
    """

    _read: Callable[[], QuantizedWeight]
    scheme: QuantScheme

    @staticmethod
    def __new__(
        cls,
        read: Callable[[], QuantizedWeight],
        scheme: QuantScheme,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "LazyWeight":
        """Make the wrapper, which has no storage."""
        wrapper: LazyWeight = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=False
        )
        wrapper._read, wrapper.scheme = read, scheme
        return wrapper

    def __init__(self, *args: Any) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        """Name, shape and scheme; printing does not dequantize."""
        return f"LazyWeight({tuple(self.shape)}, {self.scheme}, dtype={self.dtype})"

    def dequantize(self) -> Tensor:
        """The dense weight."""
        return self._read().dequantize(self.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy is dense: it may be written to."""
        return self.dequantize()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the dense weight."""
        return self.dequantize().__reduce_ex__(protocol)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:
        """Run the operation on the dense weight; refuse one that would write to it."""
        if func is torch.ops.aten.detach.default:  # `weight.data` and `weight.detach()`
            return args[0]
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if isinstance(value, cls) and argument.alias_info is not None and argument.alias_info.is_write:
                raise RuntimeError(
                    f"{func} would write to the weight of a quantized layer, which is read-only; "
                    "change the dense weight before quantizing"
                )
        dense_args, dense_kwargs = pytree.tree_map_only(cls, cls.dequantize, (args, kwargs or {}))
        return func(*dense_args, **dense_kwargs)
