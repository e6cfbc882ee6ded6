"""Which adapters an engine's requests are served with: the engine's side of :mod:`twinkle_ray.vllm.adapters`.

A worker that has an adapter of a request's integer id uses it and opens no file; one that has not looks for its path,
and the failure ends the whole engine. So requests are looked at before they are added: those for a version that is gone
get the present one, those for an adapter that is not there are refused.

vLLM's prefix cache finds blocks by an adapter's name (0.25) or name and path (0.32), never by its id, and a batch
merges requests for adapters of equal names. So the name that vLLM sees is new for each version.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

from twinkle_ray.errors import ConfigError, SyncError
from twinkle_ray.vllm.adapters import FIRST

_SCHEME = "memory://"


class ServedAdapters:
    """The adapters that all workers of an engine hold, and the default one.

    Args:
        facts: of the engine, see :func:`~twinkle_ray.vllm.adapters.lora_facts`.

    Attributes:
        held: version and number by name.
        last: the highest number that any worker has given.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts
        self._requests: dict[str, Any] = {}
        self.held: dict[str, tuple[int, int]] = {}
        self.last = FIRST
        self.default: str | None = None

    def take(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Learn what the workers hold.

        Args:
            answers: of each worker, :meth:`~twinkle_ray.vllm.adapters.Adapters.entries`.

        Raises:
            SyncError: they do not hold the same. Only what all of them hold can be asked for then.
        """
        self.last = max(int(answer["last"]) for answer in answers)
        held = [{name: (int(v), int(n)) for name, (v, n) in answer["held"].items()} for answer in answers]
        self.held = {name: entry for name, entry in held[0].items() if all(h.get(name) == entry for h in held)}
        self._requests.clear()
        if any(other != held[0] for other in held):
            raise SyncError(f"the workers of this vLLM engine hold different adapters: {held}", phase="transfer")

    def request(self, name: str) -> Any:
        """The ``vllm.lora.request.LoRARequest`` for the present version of a name. Valid until the next version.

        Raises:
            ConfigError: there is none.
        """
        if name not in self.held:
            known = f"it holds {', '.join(map(repr, self.held))}" if self.held else "it holds none"
            raise ConfigError(f"this vLLM engine holds no adapter {name!r}; {known}")
        if name not in self._requests:
            version, number = self.held[name]
            label = f"{name}@{version}+{number - FIRST}"
            make = importlib.import_module("vllm.lora.request").LoRARequest
            self._requests[name] = make(lora_name=label, lora_int_id=number, lora_path=f"{_SCHEME}{label}")
        return self._requests[name]

    def choose(self, given: Any) -> Any:
        """What a request is to be served with that came with ``given`` (a ``LoRARequest`` or ``None``).

        Raises:
            ConfigError: an adapter of ours that is not held any more, or one of the user's own for which the engine has
                no room or whose id is in our range.
        """
        if given is None:
            return None if self.default is None else self.request(self.default)
        if str(given.lora_path).startswith(_SCHEME):
            return self.request(str(given.lora_name).rpartition("@")[0])
        if given.lora_int_id >= FIRST:
            raise ConfigError(
                f"integer ids of adapters from {FIRST} on are twinkle_ray's; give {given.lora_name!r} another"
            )
        if self.held and len(self.held) >= int(self._facts.get("max_cpu_loras", 0)):
            raise ConfigError(
                f"no room for adapter {given.lora_name!r} beside {', '.join(map(repr, self.held))}; raise max_cpu_loras"
            )
        return given

    def filler(self, method: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]:
        """For a method of vLLM that takes a ``lora_request``: from the arguments of a call those that it is to have.
        The keyword arguments are changed in place."""
        accepted = signature(method).parameters
        positional = [
            n for n, p in accepted.items() if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        ]
        at = positional.index("lora_request") if "lora_request" in positional else len(accepted)

        def fill(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
            for value in (*args[:2], kwargs.get("prompt")):
                if type(value).__name__ == "EngineCoreRequest":  # made before by vLLM's own processor
                    value.lora_request = self.choose(value.lora_request)
                    return args
            if len(args) > at:
                return (*args[:at], self.choose(args[at]), *args[at + 1 :])
            chosen = self.choose(kwargs.get("lora_request"))
            if chosen is not None:
                kwargs["lora_request"] = chosen
            return args

        return fill
