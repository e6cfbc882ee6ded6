"""The mixin for actors that generate."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from twinkle_ray.checkpoint_engine import DEFAULT_TIMEOUT_S, rendezvous_of
from twinkle_ray.errors import UnsupportedActor
from twinkle_ray.naming import actor_repr
from twinkle_ray.serving import Serving, making, target_for
from twinkle_ray.types import OpStatus, RolloutStatus


class RolloutActorMixin:
    """Gives a rollout actor the methods that :class:`~twinkle_ray.CheckpointEngineManager` calls.

    The weights live in ``self.llm`` (a ``vllm.LLM`` or ``vllm.AsyncLLM``) or in a torch module ``self.model``; override
    :meth:`checkpoint_target` if they are elsewhere. All methods are plain ones: one ``async def`` here would move every
    method of a user's actor onto an event loop. They may also be called on an async actor's loop, where none of them
    waits.
    """

    checkpoint_timeout_s: float = DEFAULT_TIMEOUT_S
    """Seconds that one blocking call may take, where the caller does not say."""

    checkpoint_request_wait_s: float = 60.0
    """Seconds that a request waits for an update of the weights to end; then, and with 0 at once, it gets a
    :class:`~twinkle_ray.errors.ReplicaUnavailable`. Read when the engine is first seen."""

    __twinkle_serving: Serving | None = None
    __twinkle_held: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _then_hold(cls.__init__)  # type: ignore[method-assign]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Before the user's __init__ makes the engine: vLLM's processes inherit this, and our vLLM plugin acts on it.
        os.environ.setdefault("TWINKLE_RAY_ROLLOUT", "1")
        return super().__new__(cls)

    def __repr__(self) -> str:
        return actor_repr(self, super().__repr__)

    def __twinkle_role(self) -> str:
        version = 0 if self.__twinkle_serving is None else self.__twinkle_serving.version
        return f"rollout, version {version}" if version else "rollout"

    def checkpoint_target(self) -> Any:
        """What holds the weights. Default: ``self.llm``, else ``self.model``."""
        for attribute in ("llm", "model"):
            candidate = getattr(self, attribute, None)
            if candidate is not None:
                return candidate
        raise UnsupportedActor(
            f"{type(self).__name__} has neither self.llm nor self.model; set one, or override checkpoint_target()"
        )

    # --- driven by the manager ---------------------------------------------------------------------------------

    def start_checkpoint(self, key: str, op: str, request: dict[str, Any], wait_s: float = 0.0) -> OpStatus:
        """Start an operation of :class:`~twinkle_ray.serving.Serving` under the caller's unique key, and return its
        state after at most ``wait_s`` seconds, as :meth:`poll_checkpoint` does."""
        serving = self.__serving()
        serving.start(key, op, request)
        return serving.poll(key, wait_s)

    def poll_checkpoint(self, key: str, wait_s: float = 0.0) -> OpStatus:
        """State of that operation, after at most ``wait_s`` seconds."""
        return self.__serving().poll(key, wait_s)

    def abort_checkpoint(self, reason: str, group: str | None = None) -> None:
        """Give up what is running, with ``group`` only what works in this one; the rollout keeps its old weights if no
        byte of them was overwritten."""
        if self.__twinkle_serving is not None:
            self.__twinkle_serving.abort(reason, group)

    # --- asked by anyone ---------------------------------------------------------------------------------------

    def weights_version(self) -> int:
        """Version of the weights that are held; 0 before the first sync."""
        return self.__serving().version

    def checkpoint_status(self) -> RolloutStatus:
        """Version, contents and state. Never waits."""
        return self.__serving().status()

    def weights_digest(self, names: list[str] | None = None) -> dict[str, str]:
        """``{name: sha256}`` of what the engine really holds, read back tensor by tensor and over all its workers.

        A tensor that cannot be read back has the value ``"unverifiable"``. Names are the trainer's.

        Raises:
            SyncError: no sync has reached this rollout yet.
            UnsupportedActor: called on an async actor's event loop; use ``manager.verify()`` there.
        """
        held = self.__serving().run("digest", {"names": names}, self.checkpoint_timeout_s)
        return {name: digest for name, (_, digest) in held.items()}

    # --- adapters ----------------------------------------------------------------------------------------------

    def lora_request(self, adapter: str | None = None) -> Any:
        """The ``vllm.lora.request.LoRARequest`` with which ``self.llm.generate`` uses an adapter's present version.

        Requests without one are served with the default adapter, so only those for other adapters need this.

        Args:
            adapter: its name; ``None``: the default one.

        Returns:
            ``None`` if there is no default adapter: requests are served with the base.

        Raises:
            ConfigError: no adapter of that name is held.
            UnsupportedActor: the weights are in a plain module, whose adapters PEFT's ``set_adapter`` chooses.
        """
        target = self.__serving().target
        if not hasattr(target, "lora_request"):
            raise UnsupportedActor("lora_request() is for vLLM engines; this rollout holds a plain torch module")
        name = adapter or target.default_adapter
        return None if name is None else target.lora_request(name)

    @staticmethod
    def lora_arguments(*configs: Any, max_loras: int | None = None) -> dict[str, Any]:
        """Arguments for ``vllm.LLM`` with which it can serve adapters of these configurations; see
        :func:`twinkle_ray.vllm.adapters.lora_arguments`.

        Args:
            configs: of each adapter that is to be held at once, a ``peft.LoraConfig`` or what
                ``trainer.get_peft_config_dict()`` returns.
        """
        from twinkle_ray.vllm.adapters import lora_arguments

        plain = [config.to_dict() if hasattr(config, "to_dict") else config for config in configs]
        return lora_arguments(*plain, max_loras=max_loras)

    # --- the seeds' surface, blocking --------------------------------------------------------------------------

    def prepare_checkpoint_engine(self, is_master: bool = False) -> None:
        """Look at the engine. A rollout is never the master.

        Raises:
            UnsupportedActor: ``is_master``, or the actor holds nothing that can be loaded into.
        """
        if is_master:
            raise UnsupportedActor("a rollout cannot be the master; rank 0 is the first trainer")
        self.__serving()

    def init_checkpoint_process_group(
        self, rank: int, world_size: int, master_metadata: Any = None, timeout_s: float | None = None
    ) -> None:
        """Join the group as the one rank ``rank``, within ``timeout_s`` seconds.

        Raises:
            UnsupportedActor: the engine has several workers; only the manager gives each of them a rank.
        """
        serving = self.__serving()
        if serving.target.workers != 1:
            raise UnsupportedActor(
                f"this engine has {serving.target.workers} workers and was given one rank; drive it with "
                "twinkle_ray.CheckpointEngineManager"
            )
        timeout_s = self.checkpoint_timeout_s if timeout_s is None else timeout_s
        rendezvous = rendezvous_of(master_metadata, None)
        if rendezvous is None:
            raise UnsupportedActor("a rollout needs the master's metadata to join the group")
        request = {
            "first_rank": rank,
            "world_size": world_size,
            "rendezvous": asdict(rendezvous),
            "timeout_s": timeout_s,
        }
        serving.run("connect", request, timeout_s)

    def receive_checkpoint_weights(
        self, base_sync_done: bool = False, peft_config: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Receive one sync that says in band what it brings, a base, an adapter or both, and load it.

        Args:
            base_sync_done: accepted for the seeds' driver; what is held is known here.
            peft_config: accepted likewise; an adapter brings its configuration along.
            timeout_s: seconds after which this ends with :class:`~twinkle_ray.errors.SyncTimeout`.
        """
        timeout_s = self.checkpoint_timeout_s if timeout_s is None else timeout_s
        result: dict[str, Any] = self.__serving().run("receive_announced", {"timeout_s": timeout_s}, timeout_s)
        return result

    def finalize_checkpoint_engine(self, leave: bool = False) -> None:
        """End of one sync. The group is kept for the next one unless ``leave``."""
        if leave and self.__twinkle_serving is not None:
            self.__twinkle_serving.run("leave", {}, 30.0)

    def sleep_checkpoint(self, level: int = 1) -> tuple[str, ...]:
        """Put the engine to sleep; the tags that sleep now."""
        result: tuple[str, ...] = self.__serving().run("sleep", {"level": level}, self.checkpoint_timeout_s)
        return result

    def wake_up_checkpoint(self, tags: list[str] | None = None) -> tuple[str, ...]:
        """Wake the engine, all of it or these tags; the tags that still sleep."""
        result: tuple[str, ...] = self.__serving().run("wake_up", {"tags": tags}, self.checkpoint_timeout_s)
        return result

    def _twinkle_hold(self, reason: str) -> None:
        self.__serving().start(f"hold-{os.getpid()}", "hold", {"reason": reason})

    def __serving(self) -> Serving:
        held = self.checkpoint_target()
        with making():
            # An engine that was made anew holds none of the weights that its forerunner had.
            if self.__twinkle_serving is None or self.__twinkle_held is not held:
                self.__twinkle_serving = Serving(target_for(held, self.__advance, self.checkpoint_request_wait_s))
                self.__twinkle_held = held
            return self.__twinkle_serving

    def __advance(self, seconds: float) -> None:
        if self.__twinkle_serving is not None:
            self.__twinkle_serving.advance(seconds)


def _then_hold(init: Callable[..., None]) -> Callable[..., None]:
    """An actor that Ray has started again has the weights that its engine was made with, not those that it had: it may
    serve nobody before a sync has reached it."""

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        outermost = "_twinkle_making" not in vars(self)  # and not one that another class's __init__ calls
        if outermost:
            self._twinkle_making = True
        try:
            init(self, *args, **kwargs)
        finally:
            if outermost:
                del self._twinkle_making
        if outermost and _restarted():
            with contextlib.suppress(UnsupportedActor):  # no engine yet: made later, it is found empty then
                self._twinkle_hold(
                    "Ray has started this rollout again and no sync has brought its weights yet; sync first"
                )

    return wrapped


def _restarted() -> bool:
    import ray

    if not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    return bool(context.get_actor_id() and context.was_current_actor_reconstructed)
