"""What runs inside a vLLM worker: one method that vLLM's ``collective_rpc`` can call by name.

vLLM mixes :class:`WorkerExtension` into its worker class (``worker_extension_cls``), in whichever process that worker
lives. Between a client and a child engine vLLM speaks msgpack, which turns tuples into lists and dataclasses into
dictionaries, refuses enums' and exceptions' own types and cannot carry tensors; and an exception that leaves a worker
arrives as text. So :func:`answer` takes and gives plain data only, and errors are part of the answer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from twinkle_ray.errors import to_plain

_SIDE = "_twinkle_ray_side"
_LINE = "_twinkle_ray_line"
_ADAPTERS = "adapters."


class WorkerExtension:
    """Mixed into vLLM's worker class. Its methods must not clash with any of vLLM's."""

    def twinkle_call(self, method: str, *args: Any) -> list[Any]:
        """:func:`answer` for this worker."""
        return answer(self, method, *args)

    def twinkle_line(self) -> list[Any]:
        """Where this worker's :class:`~twinkle_ray.vllm.line.Server` listens; made at the first call."""
        from twinkle_ray.vllm.line import Server

        if _LINE not in vars(self):
            setattr(self, _LINE, Server(functools.partial(answer, self)))
        address: list[Any] = vars(self)[_LINE].address
        return address


def answer(worker: Any, method: str, *args: Any) -> list[Any]:
    """Call a method of this process's ``WorkerSide``, which is made at the first call.

    Args:
        worker: vLLM's worker, or the wrapper in which an in-process executor hands it to a callable.
        method: a public method of :class:`twinkle_ray.worker.WorkerSide`, or ``adapters.`` and one of
            :class:`twinkle_ray.vllm.adapters.Adapters`.
        args: plain data.

    Returns:
        ``["ok", result]``, or ``["error", {...}]`` as :func:`~twinkle_ray.errors.to_plain` makes it. Never raises an
        ``Exception``.
    """
    try:
        worker = vars(worker).get("worker") or worker
        if method.removeprefix(_ADAPTERS).startswith("_"):
            raise AttributeError(f"{method} is not public")
        if method.startswith(_ADAPTERS):
            from twinkle_ray.vllm.adapters import adapters_of

            return ["ok", getattr(adapters_of(worker), method.removeprefix(_ADAPTERS))(*args)]
        return ["ok", getattr(side(worker), method)(*args)]
    except Exception as error:
        return ["error", to_plain(error)]


def side(worker: Any) -> Any:
    """The ``WorkerSide`` of a worker, made if there is none yet. It may be set beforehand by :func:`attach`."""
    if _SIDE not in vars(worker):
        from twinkle_ray.vllm.adapters import adapters_of
        from twinkle_ray.vllm.caches import shorten_resets
        from twinkle_ray.vllm.loading import EngineSink
        from twinkle_ray.worker import WorkerSide

        shorten_resets()  # with one worker the engine core is in this process too
        attach(worker, WorkerSide(EngineSink(worker), lambda: adapters_of(worker), index=int(worker.rank)))
    return vars(worker)[_SIDE]


def attach(worker: Any, worker_side: Any) -> None:
    """Give a worker its side."""
    setattr(worker, _SIDE, worker_side)


def device_of(worker: Any) -> torch.device:
    """The device that the thread of a worker's side must make current: torch's current device is thread-local."""
    device = getattr(worker, "device", None)
    return torch.device(device) if device is not None else torch.device("cpu")
