"""What ``ray.util.collective`` hands to a group: torch tensors, numpy or cupy arrays, of any strides, in lists.

A collective needs contiguous memory. A tensor that is not contiguous (transposed, sliced) goes through a copy, and is
filled from it afterwards; sent as it lies in memory, it would arrive scrambled without any error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from twinkle_ray.errors import ConfigError


class Operand:
    """One tensor of a call. ``tensor`` is contiguous; after it has been written, :meth:`put_back` is due.

    Raises:
        ConfigError: not a tensor or array of the wanted kind of device, or of a dtype that torch lacks.
    """

    __slots__ = ("_array", "_target", "tensor")

    def __init__(self, value: Any, device_type: str) -> None:
        self._array: np.ndarray[Any, Any] | None = None
        self._target = self._as_tensor(value).detach()
        if self._target.device.type != device_type:
            raise ConfigError(f"a tensor is on {self._target.device}, but this group moves tensors on {device_type}")
        self.tensor = self._target.resolve_conj().resolve_neg().contiguous()

    def _as_tensor(self, value: Any) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value
        try:
            if not isinstance(value, np.ndarray):
                return torch.utils.dlpack.from_dlpack(value)  # cupy's, without a copy
            if not value.flags.writeable or any(stride < 0 for stride in value.strides):
                self._array = value
                return torch.from_numpy(value.copy())
            return torch.from_numpy(value)
        except (TypeError, ValueError, AttributeError, BufferError, RuntimeError) as error:
            raise ConfigError(f"a {type(value).__name__} cannot be used in a collective: {error}") from None

    @property
    def bytes(self) -> torch.Tensor:
        """The contiguous memory as a flat uint8 tensor."""
        return as_bytes(self.tensor)

    def first(self, n_elements: int) -> torch.Tensor:
        """:attr:`bytes` of the first ``n_elements``; of all for 0, which is Ray's default."""
        return self.bytes[: n_elements * self.tensor.element_size()] if n_elements > 0 else self.bytes

    def put_back(self) -> None:
        """Bring what was received into the caller's tensor. A read-only numpy array raises ValueError."""
        if self.tensor.data_ptr() != self._target.data_ptr() or self._target.is_conj() or self._target.is_neg():
            self._target.copy_(self.tensor)
        if self._array is not None:
            np.copyto(self._array, self._target.numpy())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a flat uint8 tensor."""
    return tensor.view(-1).view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)


def single(tensors: Sequence[Any], device_type: str) -> Operand:
    """The one tensor of a call, which Ray wraps in a list. Its ``*_multigpu`` calls pass several.

    Raises:
        ConfigError: several.
    """
    if len(tensors) != 1:
        raise ConfigError(f"{len(tensors)} tensors in one call; each process of this group has one device")
    return Operand(tensors[0], device_type)


def per_rank(tensor_lists: Sequence[Sequence[Any]], like: Operand, world_size: int) -> list[Operand]:
    """The tensors of an allgather or reducescatter, one per rank, all of the size and dtype of ``like``.

    Raises:
        ConfigError: another number, size or dtype.
    """
    if len(tensor_lists) != 1 or len(tensor_lists[0]) != world_size:
        raise ConfigError(f"{world_size} tensors are needed, one per rank")
    operands = [Operand(value, like.tensor.device.type) for value in tensor_lists[0]]
    for rank, operand in enumerate(operands):
        if (operand.tensor.dtype, operand.tensor.numel()) != (like.tensor.dtype, like.tensor.numel()):
            raise ConfigError(
                f"the tensor for rank {rank} is {operand.tensor.dtype} x {operand.tensor.numel()}, "
                f"but {like.tensor.dtype} x {like.tensor.numel()} is needed"
            )
    return operands
