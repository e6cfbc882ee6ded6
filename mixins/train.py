"""The mixin for actors that train."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from twinkle_ray.checking import process_facts
from twinkle_ray.checkpoint_engine import DEFAULT_TIMEOUT_S, metadata_of, rendezvous_of
from twinkle_ray.errors import ConfigError, UnsupportedActor
from twinkle_ray.moving import empty_cache, move
from twinkle_ray.naming import actor_repr
from twinkle_ray.plan import DEFAULT_BUCKET_SIZE
from twinkle_ray.sources import NamedWeights
from twinkle_ray.training import Training
from twinkle_ray.types import OpStatus, Seat, TrainerStatus


class TrainActorMixin:
    """Gives a trainer actor the methods that :class:`~twinkle_ray.CheckpointEngineManager` calls.

    Inherit it beside whatever the actor is. The weights are those of ``self.model``; override
    :meth:`checkpoint_model` or :meth:`named_weights` if they are elsewhere. The methods are plain ones, so they work in
    actors of every kind; those with the seeds' names block, within their deadline.
    """

    checkpoint_bucket_size: int = DEFAULT_BUCKET_SIZE
    """Bytes of one chunk at most, where the caller does not say (driven without our manager)."""
    checkpoint_timeout_s: float = DEFAULT_TIMEOUT_S
    """Seconds that one blocking call may take, where the caller does not say."""
    checkpoint_backend: str | None = None
    """``TWINKLE_GLOO`` ... where the caller does not say; ``None``: the one for the model's device."""

    __twinkle_training: Training | None = None
    __twinkle_device: torch.device | None = None

    def __repr__(self) -> str:
        return actor_repr(self, super().__repr__)

    def __twinkle_role(self) -> str:
        rank = None if self.__twinkle_training is None else self.__twinkle_training.rank
        return "trainer" if rank is None else f"trainer, rank {rank}"

    def checkpoint_model(self) -> torch.nn.Module:
        """The module whose parameters and persistent buffers are synced. Default: ``self.model``."""
        model = getattr(self, "model", None)
        if not isinstance(model, torch.nn.Module):
            raise UnsupportedActor(
                f"{type(self).__name__} has no torch module in self.model; set it, or override checkpoint_model() or "
                "named_weights()"
            )
        return model

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]] | None:
        """Override to send something else than a module's weights.

        Called on every trainer rank at each sync, and anew whenever the weights are walked; yields ``(name, tensor)``
        in one order, each tensor in memory that is not written to again within the walk. ``None``, the default, means
        :meth:`checkpoint_model`.
        """
        return None

    def checkpoint_status(self, merge: bool = True) -> TrainerStatus:
        """Digest, sizes, device, group and adapters of this trainer; raises if its weights cannot be sent, with LoRA
        adapters merged or (``merge=False``) as the frozen base."""
        return self.__training().status(merge=merge)

    def checkpoint_manifest(self, merge: bool = True) -> list[Any]:
        """Names, shapes, dtypes and kinds of what is sent, in JSON form; ``merge`` as in :meth:`checkpoint_status`."""
        return self.__training().manifest(merge=merge)

    def checkpoint_facts(self, backend: str | None = None) -> dict[str, Any]:
        """Versions and free memory of this process, and whether a backend can be used in it; see
        :func:`twinkle_ray.checking.process_facts`."""
        return process_facts(self.__training().endpoint.device, backend)

    def checkpoint_adapter(self, name: str | None = None) -> dict[str, Any]:
        """One LoRA adapter, as it would be sent alone: ``name``, ``config``, ``manifest`` and ``digest``, plain data.

        Args:
            name: PEFT's; ``None``: the one that is active.

        Raises:
            ConfigError: there is no such adapter, or not one that is active.
            UnsupportedModel: it cannot be sent alone.
        """
        return self.__training().adapter(name).as_json()

    def agree_checkpoint(
        self, digest: str, dtypes: tuple[str, ...], cuts: tuple[tuple[int, ...], ...] = (), merge: bool = True
    ) -> str:
        """Fix the wire dtypes for the manifest with this digest; returns the wire manifest's digest."""
        return self.__training().agree(digest, dtypes, cuts, merge=merge)

    def prepare_checkpoint_engine(
        self,
        is_master: bool,
        backend: str | None = None,
        fresh: bool = False,
        groups: list[tuple[str, str]] | None = None,
    ) -> dict[str, Any] | None:
        """On the master: open the place where the group meets, and return its metadata; else ``None``.

        A group that is sound is kept, and its metadata returned again, unless ``fresh`` asks for a new one.

        Args:
            groups: from the manager, names and backends of the new groups in which this trainer will send; the result
                is the metadata of each, by name.
        """
        training = self.__training()
        if not is_master:
            return None
        if groups is not None:
            opened = training.endpoint.open_meetings([(name, chosen) for name, chosen in groups])
            return {rendezvous.group: metadata_of(rendezvous) for rendezvous in opened}
        return metadata_of(training.endpoint.open_meeting(self.__backend(backend), fresh=fresh))

    def init_checkpoint_process_group(
        self, rank: int, world_size: int, master_metadata: Any = None, timeout_s: float | None = None
    ) -> None:
        """Join the group, within ``timeout_s`` seconds. Rank -1 is not in it and only takes part in gathers.

        Raises:
            ConfigError: a rank other than the master's, and no metadata.
            SyncTimeout: not all ranks came in time.
        """
        training = self.__training()
        if rank < 0:
            training.rank = None
            if training.endpoint.group is not None:  # in an earlier one it may have sent
                training.endpoint.leave()
            return
        rendezvous = rendezvous_of(master_metadata, training.endpoint)
        if rendezvous is None:
            raise ConfigError(
                f"rank {rank} needs master_metadata, the dict that prepare_checkpoint_engine(True) returned on rank 0"
            )
        training.connect(rank, world_size, rendezvous, self.checkpoint_timeout_s if timeout_s is None else timeout_s)

    def start_checkpoint(self, key: str, op: str, request: dict[str, Any], wait_s: float = 0.0) -> OpStatus:
        """Start ``connect``, :meth:`init_checkpoint_process_group` for the manager, under the caller's unique key;
        returns its state after at most ``wait_s`` seconds, as :meth:`poll_checkpoint` does."""
        if op != "connect":
            raise UnsupportedActor(f"a trainer cannot {op}")
        training = self.__training()
        if "seats" in request:
            training.start_join(key, [Seat.from_plain(seat) for seat in request["seats"]], request["timeout_s"])
            return training.poll(key, wait_s)
        rendezvous = rendezvous_of(request["rendezvous"], None)
        assert rendezvous is not None
        training.start_connect(key, request["first_rank"], request["world_size"], rendezvous, request["timeout_s"])
        return training.poll(key, wait_s)

    def poll_checkpoint(self, key: str, wait_s: float = 0.0) -> OpStatus:
        """State of that operation, after at most ``wait_s`` seconds."""
        return self.__training().poll(key, wait_s)

    def send_checkpoint_weights(
        self,
        adapter_only: bool = False,
        *,
        bucket_size: int | None = None,
        timeout_s: float | None = None,
        agreed: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Send the weights; returns once the last byte has been read from this trainer's memory.

        Args:
            adapter_only: send only the active LoRA adapter; and the frozen base before it, if that is not known to be
                there. Receivers find out by themselves what comes.
            bucket_size: bytes of one chunk at most.
            timeout_s: seconds after which this ends with :class:`~twinkle_ray.errors.SyncTimeout`.
            agreed: from the manager, the arguments of :meth:`twinkle_ray.training.Training.send`; ``None``: the
                manifest is sent in band first.
        """
        if agreed is not None:
            return self.__training().send(**agreed)
        bucket_size = bucket_size or self.checkpoint_bucket_size
        timeout_s = self.checkpoint_timeout_s if timeout_s is None else timeout_s
        return self.__training().send_announced(bucket_size, timeout_s, adapter_only=adapter_only)

    def finalize_checkpoint_engine(self, leave: bool = False, group: str | None = None) -> None:
        """End of one sync. The group is kept unless ``leave``; with ``group`` one of another name is kept even then."""
        if leave and self.__twinkle_training is not None:
            endpoint = self.__twinkle_training.endpoint
            if group is None or endpoint.sound_group in ("", group):
                endpoint.leave()

    def abort_checkpoint(self, reason: str, group: str | None = None) -> None:
        """Give the group up, from whatever state; with ``group`` only if it is this one."""
        if self.__twinkle_training is not None:
            endpoint = self.__twinkle_training.endpoint
            if group is None or endpoint.group_name in ("", group):
                endpoint.abort(reason)

    def merge_lora(self) -> None:
        """What is sent next has its LoRA adapters merged, as at the start. A model without an adapter is sent as it is.

        Nothing is merged here: each tensor is, beside the model, while it is sent. Our manager does not need it, since
        it says at each sync what it wants.
        """
        self.__training().merge = True

    def unmerge_lora(self) -> None:
        """What is sent next is the frozen base, under the same names."""
        self.__training().merge = False

    def get_peft_config_dict(self, adapter: str | None = None) -> dict[str, Any] | None:
        """The configuration of an adapter as PEFT has it, in JSON values; ``None``: the model has no adapter.

        Args:
            adapter: its name; ``None``: the one that is active.

        Raises:
            ConfigError: there is no such adapter, or not one that is active.
        """
        return self.__training().peft_config(adapter)

    # --- one device for trainer and rollout --------------------------------------------------------------------

    def release_cached_memory(self) -> None:
        """Give memory back to the device that torch's allocator keeps and nobody uses."""
        empty_cache(self.__training().endpoint.device)

    def offload_to_cpu(self) -> None:
        """Move the model of :meth:`checkpoint_model` to the CPU, with its gradients. Parameters stay the same objects.

        Nothing, if it is there. Override it, and :meth:`reload_to_gpu`, to move an optimizer's state as well. A method
        of this name in another base class of the actor takes its place.

        Raises:
            UnsupportedActor: the model is on several devices.
        """
        inherited = getattr(super(), "offload_to_cpu", None)
        if inherited is not None:
            inherited()
            return
        model = self.checkpoint_model()
        devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
        if devices == {torch.device("cpu")}:
            return
        if len(devices) > 1:
            raise UnsupportedActor(
                f"{type(self).__name__}'s model is on {', '.join(sorted(map(str, devices)))}, and its tensors' places "
                "are not kept; override offload_to_cpu() and reload_to_gpu()"
            )
        (self.__twinkle_device,) = devices
        with self.__training().base_stays():
            move(model, torch.device("cpu"))
        empty_cache(self.__twinkle_device)

    def reload_to_gpu(self) -> None:
        """Move the model back to where :meth:`offload_to_cpu` took it from. Nothing, if it took it from nowhere."""
        inherited = getattr(super(), "reload_to_gpu", None)
        if inherited is not None:
            inherited()
        elif self.__twinkle_device is not None:
            with self.__training().base_stays():
                move(self.checkpoint_model(), self.__twinkle_device)
            self.__twinkle_device = None

    def weights_digest(
        self,
        names: list[str] | None = None,
        digest: str | None = None,
        dtypes: tuple[str, ...] | None = None,
        merge: bool | None = None,
    ) -> dict[str, str]:
        """``{name: sha256}`` of the weights as they are sent. Collective over the ranks of a sharded trainer.

        Args:
            names: only these; ``None``: all.
            digest, dtypes: of the manifest to digest by and its wire dtypes; ``None``: the trainer's own.
            merge: with LoRA adapters merged, or the frozen base; ``None``: as they were sent last.
        """
        return self.__training().digests(names, digest, dtypes, merge=merge)

    def __weights(self) -> torch.nn.Module | NamedWeights:
        # A generator function runs nothing yet when it is called.
        return self.checkpoint_model() if self.named_weights() is None else self.__named

    def __named(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.named_weights() or ()

    def __training(self) -> Training:
        if self.__twinkle_training is None:
            self.__twinkle_training = Training(self.__weights)
        return self.__twinkle_training

    def __backend(self, asked: str | None) -> str:
        from twinkle_ray.backends import backend_for

        return asked or self.checkpoint_backend or backend_for(self.__training().endpoint.device.type)
