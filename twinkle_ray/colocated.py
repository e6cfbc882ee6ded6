"""Trainer and rollout on one device: where Ray puts them, and the train group of naive mode.

:class:`Placement` makes one bundle per device and gives each actor its share of it::

    with Placement(4) as place:
        trainers = [Trainer.options(**place.trainer(i)).remote() for i in range(4)]
        rollouts = [Rollout.options(**place.rollout(i)).remote() for i in range(4)]
        manager = CheckpointEngineManager(trainers, rollouts, is_colocated=True)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from twinkle_ray.errors import ConfigError, SyncTimeout, UnsupportedActor
from twinkle_ray.replica import has_method
from twinkle_ray.rounds import Call, Round
from twinkle_ray.types import Deadline

_GPU = "GPU"


class Placement:
    """A placement group with one bundle per device, which trainers and rollouts share.

    Args:
        devices: how many.
        resource: Ray's name of the device: ``GPU``, ``NPU`` or another; ``None``: none, for actors on CPUs.
        trainer_share: of each device, what a trainer is given in Ray's books; rollouts are given the rest.
        cpus: of each bundle, of which trainer and rollout are given one half each.
        strategy: Ray's, such as ``PACK`` or ``STRICT_PACK``.
        timeout_s: seconds to wait for the group.

    Attributes:
        group: Ray's placement group.

    Raises:
        ConfigError: a number that makes no sense.
        SyncTimeout: the cluster has no such bundles free.
    """

    def __init__(
        self,
        devices: int,
        *,
        resource: str | None = _GPU,
        trainer_share: float = 0.5,
        cpus: float = 2.0,
        strategy: str = "PACK",
        timeout_s: float = 120.0,
    ) -> None:
        if devices < 1:
            raise ConfigError(f"devices is {devices}, but a placement needs at least one")
        if not 0 < trainer_share < 1:
            raise ConfigError(f"trainer_share is {trainer_share}, but a rollout needs a part of the device as well")
        if cpus <= 0:
            raise ConfigError(f"cpus is {cpus}, but the actors of a bundle need some")
        self._resource, self._share, self._cpus = resource, trainer_share, cpus
        self.devices = devices
        bundle = {"CPU": cpus} | ({resource: 1.0} if resource else {})
        self.group: PlacementGroup = placement_group([dict(bundle) for _ in range(devices)], strategy=strategy)
        if not self.group.wait(timeout_s):
            remove_placement_group(self.group)
            there: Any = ray
            raise SyncTimeout(
                f"no place for {devices} bundles of {bundle} within {timeout_s:.0f} s; the cluster has "
                f"{_shown(there.cluster_resources())}, of which {_shown(there.available_resources())} are free",
                phase="prepare",
            )

    def trainer(self, index: int) -> dict[str, Any]:
        """For ``.options()`` of the trainer actor on this device.

        Raises:
            ConfigError: there is no such device.
        """
        return self._options(index, self._share)

    def rollout(self, *indices: int) -> dict[str, Any]:
        """For ``.options()`` of the rollout actor on this device, or on these.

        On several, vLLM starts one worker actor in each of these bundles: make the engine with
        ``tensor_parallel_size=len(indices)`` and ``distributed_executor_backend="ray"``. What it needs to find them is
        in ``runtime_env`` of these options, to which the actor's own variables must be added.

        Raises:
            ConfigError: there is no such device, one is named twice, or none is.
        """
        if not indices or len(set(indices)) < len(indices):
            raise ConfigError(f"a rollout needs one or more devices, each once, not {indices}")
        if len(indices) == 1:
            return self._options(indices[0], 1 - self._share)
        for index in indices:
            self._require(index)
        # The actor itself computes nothing; the workers take the devices' shares.
        options = self._options(indices[0], 0.0, capture=True)
        options["runtime_env"] = {
            "env_vars": {
                "VLLM_RAY_PER_WORKER_GPUS": str(1 - self._share),
                "VLLM_RAY_BUNDLE_INDICES": ",".join(map(str, indices)),
            }
        }
        return options

    def remove(self) -> None:
        """Give the bundles back; Ray ends the actors that are in them."""
        remove_placement_group(self.group)

    def __enter__(self) -> Placement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _options(self, index: int, share: float, *, capture: bool = False) -> dict[str, Any]:
        self._require(index)
        where = PlacementGroupSchedulingStrategy(self.group, index, placement_group_capture_child_tasks=capture)
        options: dict[str, Any] = {"num_cpus": self._cpus / 2, "num_gpus": 0, "scheduling_strategy": where}
        if self._resource == _GPU:
            options["num_gpus"] = share
        elif self._resource and share:
            options["resources"] = {self._resource: share}
        return options

    def _require(self, index: int) -> None:
        if not 0 <= index < self.devices:
            raise ConfigError(f"there is no device {index}; this placement has {self.devices}, counted from 0")


def _shown(resources: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in resources.items() if ":" not in name and "memory" not in name}


class TrainGroup:
    """The seeds' train group, made of train actors: what ``weight_sync_mode="naive"`` drives.

    Args:
        actors: with :class:`~twinkle_ray.mixins.TrainActorMixin`; or a function that gives them.
        sync: brings the rollouts to the trainers' weights, given whether with adapters merged, such as
            ``manager.sync_weights`` of another manager; ``None``: the manager that drives this group does it.
        timeout_s: seconds that one call to the actors may take.
    """

    def __init__(
        self,
        actors: Sequence[Any] | Callable[[], Sequence[Any]],
        sync: Callable[[bool], Any] | None = None,
        *,
        timeout_s: float = 300.0,
    ) -> None:
        self._actors = actors if callable(actors) else lambda: actors
        self._timeout_s = timeout_s
        self._merged = False
        self._by: Callable[[bool], Any] | None = None
        self.sync = sync

    def merge_lora(self) -> None:
        """What is sent next has its adapters merged, beside the model."""
        self._merged = True

    def unmerge_lora(self) -> None:
        """What is sent next is the plain base with the adapter beside it."""
        self._merged = False

    def offload_to_cpu(self) -> None:
        """Let every actor move its model to the CPU.

        Raises:
            UnsupportedActor: one cannot.
            SyncError: one failed.
        """
        self.call("offload_to_cpu")

    def reload_to_gpu(self) -> None:
        """Bring the models back. Raises as :meth:`offload_to_cpu`."""
        self.call("reload_to_gpu")

    def update_weights(self, adapter_only: bool = False) -> Any:
        """Bring the rollouts to the trainers' weights; what ``sync`` returns.

        Args:
            adapter_only: the adapter beside the plain base, which goes before it where it is not held.
        """
        sync = self.sync or self._by
        if sync is None:
            raise ConfigError("this train group has nobody to sync by; give it sync=manager.sync_weights")
        return sync(self._merged and not adapter_only)

    @contextlib.contextmanager
    def syncing_by(self, sync: Callable[[bool], Any]) -> Iterator[None]:
        """For the length of the block, ``update_weights`` does this."""
        self._by = sync
        try:
            yield
        finally:
            self._by = None

    def call(self, method: str) -> None:
        """Call a method of every actor, each to its own end."""
        members: dict[str, Any] = {}
        for index, actor in enumerate(self._actors()):
            if not has_method(actor, method):
                raise UnsupportedActor(
                    f"trainer[{index}] has no {method}(); define it, or let its class inherit "
                    "twinkle_ray.mixins.TrainActorMixin"
                )
            members[f"trainer[{index}]"] = actor
        calls = {name: Call(ref=getattr(actor, method).remote()) for name, actor in members.items()}
        Round("offload", Deadline.after(self._timeout_s)).run_each(calls)
