"""Where sent tensors come from: a torch module, sharded or not, or a user's function.

A source says what it has (:meth:`WeightSource.manifest`) and then yields exactly that (:meth:`WeightSource.tensors`).
All trainer ranks walk in one order, because a sharded tensor is gathered by all of them together: whoever starts a
stream must see it to its end, by consuming or by closing it, or the other ranks stay in an all-gather.
"""

from __future__ import annotations

import contextlib
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import eq
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from twinkle_ray.adapter import Adapter
from twinkle_ray.digest import DTYPE_NAMES, DTYPES, has_own_bytes, torch_dtype
from twinkle_ray.errors import ConfigError, ManifestMismatch, TwinkleRayError, UnsupportedModel
from twinkle_ray.fingerprint import PLAIN, Fingerprint
from twinkle_ray.lora import (
    AdapterState,
    Gathered,
    Merging,
    Place,
    active_adapters,
    frozen_or_refuse,
    has_adapters,
    merging,
    places,
)
from twinkle_ray.manifest import CASTABLE, Manifest, TensorMeta
from twinkle_ray.names import loaded_class, walk

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

NamedWeights = Callable[[], Iterable[tuple[str, torch.Tensor]]]
Entry = tuple[str, torch.Tensor, str]
"""Name without wrapper segments, tensor, and kind (``parameter`` or ``buffer``)."""


class WeightSource:
    """The weights of one trainer process.

    Args:
        weights: a module, or a function that returns an iterable of (name, tensor) and is called anew each time the
            weights are walked. Such a function is called on every rank and may itself run collectives; its tensors
            are sent as they come: a tied weight is best yielded once, and a tensor's memory must not be written
            again within the walk, since several may wait for one launch. Kinds are all ``parameter``.
        merge: of a module with LoRA adapters of PEFT send what base and active adapters make together, each tensor
            computed as it is sent, in fp32 and with one cast; else its frozen base. Names are the base model's
            either way; so is the manifest, unless of a tied pair only one has an adapter. May be set between two syncs.
            A bias that was trained in the base itself, and what an initialisation such as PiSSA took out of the base,
            cannot be told from the frozen base.

    Raises:
        ConfigError: ``weights`` is neither; an iterator, for one, could serve a single sync only.
    """

    def __init__(self, weights: nn.Module | NamedWeights, *, merge: bool = True) -> None:
        if not isinstance(weights, nn.Module) and not callable(weights):
            raise ConfigError(
                f"weights are a {type(weights).__name__}, but must be a torch module or a function that returns "
                "(name, tensor) pairs and can be called at each sync"
            )
        self.merge = merge
        self._weights = weights
        self._walked: _Walked | None = None
        self._sent_as = ("", "")
        self._base_marks: list[tuple[int, int, int]] | None = None
        self._base_name = ""

    def manifest(self, *, merge: bool | None = None) -> Manifest:
        """What there is to send now, in the trainer's own dtypes; compare digests to notice a changed model.

        Args:
            merge: as the class has it, this once; ``None``: as it is set.

        Parameters and persistent buffers in the order of ``state_dict``, a DTensor with its global shape. Tensors
        that are one view of one storage are one entry with aliases; other overlaps are separate entries. FSDP2
        modules are resharded first, as their ``state_dict`` does. A user's function is iterated once, on all ranks,
        and nothing of it is kept.

        Raises:
            ConfigError: there is no tensor, or two have one name.
            UnsupportedModel: a tensor is on the meta device, quantised, sparse or of an unknown subclass; or the
                module holds shards of FSDP1, or PEFT adapters of which it is not known exactly what they make of it.
        """
        if isinstance(self._weights, nn.Module):
            merge = self.merge if merge is None else merge
            walked = self._look(self._weights)
            walked.sent(merge=merge)  # refused here, before anybody waits for a tensor
            return walked.manifest(merge=merge)
        metas = []
        for name, tensor in self._weights():
            check_tensor(name, tensor)
            metas.append(TensorMeta(name=name, shape=tuple(tensor.shape), dtype=DTYPE_NAMES[tensor.dtype]))
            del tensor
        if not metas:
            raise ConfigError("the trainer has no weights: its named_weights() yields nothing")
        return Manifest(tuple(metas))

    def tensors(
        self, wire: Manifest, own: str | None = None, *, recheck: bool = False, merge: bool | None = None
    ) -> TensorStream:
        """The tensors of ``wire``, in its order and its dtypes. Collective if any is sharded.

        Args:
            merge: see :meth:`manifest`.
            recheck: names, what shares memory, and whether something was added may be compared later, by
                :meth:`TensorStream.recheck`. That the tensors are all still there, the very ones, is compared at once
                in any case; what is sent of each is the memory that it has then.
            own: digest of the manifest in the trainer's own dtypes from which ``wire`` was agreed. If it is given, a
                module of other dtypes has changed too; else all that can be cast is.

        Use it in a ``with`` block: leaving that early runs the gathers that the other ranks still wait for.

        Raises:
            ManifestMismatch: the model has changed since ``wire`` was agreed. For a module at once, for a user's
                function when the first such tensor comes.
        """
        if not isinstance(self._weights, nn.Module):
            return TensorStream(iter(self._weights()), wire)
        module, known = self._weights, self._walked
        later = recheck and known is not None and known.may_be_sent()
        walked = known if later and known is not None else self._look(module)
        merge = self.merge if merge is None else merge
        mine = walked.manifest(merge=merge)
        if own not in (None, mine.digest):
            _require_same(mine, wire)  # which can say more
            raise _changed("it has other dtypes")
        if self._sent_as != (mine.digest, wire.digest):
            _require_same(mine, wire)
            self._sent_as = mine.digest, wire.digest
        return TensorStream(
            walked.sent(merge=merge),
            wire,
            device=walked.device,
            recheck=(lambda: self._still(module, walked, merge)) if later else None,
        )

    def _still(self, module: nn.Module, walked: _Walked, merge: bool) -> bool:
        """Whether another walk finds what that one found."""
        try:
            now = self._look(module)
        except TwinkleRayError:  # which whoever walks it next will say
            return False
        return now.adapted == walked.adapted and now.manifest(merge=merge).digest == walked.manifest(merge=merge).digest

    def gather_only(self, wire: Manifest, *, merge: bool | None = None) -> None:
        """Take part in the collectives of :meth:`tensors` on a rank that sends nothing, and keep nothing.

        Raises:
            ManifestMismatch: as :meth:`tensors`, and on the same tensor.
        """
        with self.tensors(wire, merge=merge) as stream:
            stream.skip_all()

    def check(self, *, merge: bool) -> None:
        """Refuse what :meth:`tensors` could not send in this way.

        Raises:
            UnsupportedModel: so it is.
        """
        if isinstance(self._weights, nn.Module):
            self._look(self._weights).sent(merge=merge)

    @property
    def adapted(self) -> bool:
        """Whether there are PEFT adapters, as far as was seen when the module was walked last."""
        return self._walked is not None and self._walked.adapted

    @property
    def sharded(self) -> bool:
        """Whether all ranks must gather together, as far as was seen when the module was walked last."""
        return self._walked is not None and self._walked.sharded

    def active(self) -> tuple[str, ...]:
        """Names of the adapters that the forward pass uses, as it was walked last."""
        module = self._weights
        return self._walked.active(module) if self._walked is not None and isinstance(module, nn.Module) else ()

    def adapter(self, name: str) -> Adapter:
        """One LoRA adapter alone, as it is now.

        Raises:
            ConfigError: there is no such adapter, or ``weights`` is a function, which has none.
            UnsupportedModel: it cannot be sent alone.
        """
        if not isinstance(self._weights, nn.Module):
            raise ConfigError(f"the trainer sends by named_weights(), which has no adapter {name!r}; sync merged")
        return self._look(self._weights).adapter(self._weights, name)

    def base_id(self, *, looked: bool = False) -> str:
        """Names the frozen base under PEFT adapters: another one if a tensor of it was written, replaced or moved since
        the last time. Writes through ``tensor.data`` are not seen. ``""``: there are no adapters.

        Args:
            looked: the module was walked just before.
        """
        if not isinstance(self._weights, nn.Module):
            return ""
        walked = self._walked if looked and self._walked is not None else self._look(self._weights)
        marks = walked.frozen_marks()
        if marks is None:
            return ""
        if self._base_marks != marks:
            self._base_marks, self._base_name = marks, uuid.uuid4().hex[:16]
        return self._base_name

    @contextlib.contextmanager
    def base_stays(self) -> Iterator[None]:
        """For the length of the block the module is moved, and nothing of it changed: it keeps its :meth:`base_id`."""
        name = self.base_id()
        yield
        if name and isinstance(self._weights, nn.Module):
            self._base_marks, self._base_name = self._look(self._weights).frozen_marks(), name

    def device(self) -> torch.device:
        """Where the tensors are; see :func:`device_of`. A user's function is iterated once, on all ranks."""
        if not isinstance(self._weights, nn.Module):
            return device_of(self._weights())
        walked = self._walked
        if walked is None or walked.device is None or not walked.fingerprint.holds():
            return device_of(self._weights)  # which a module that cannot be sent has too
        return walked.device

    def _look(self, module: nn.Module) -> _Walked:
        """The present state of the module: as it was walked last, if nothing has changed since."""
        walked = self._walked
        if walked is None or not walked.holds():
            walked = self._walked = _Walked(module, walked)
        return walked


class _Walked:
    """What one walk over a module found, and whether that still holds.

    Shape and dtype of a tensor could differ unseen, if someone put another view of the same memory into it: each one is
    compared again as it is sent.

    Args:
        before: an earlier one of the same module, whose manifest is kept if it is the same.

    Attributes:
        fingerprint: of the module.
        device: of all tensors; ``None`` if it has not been asked for.
        sharded: whether one of them is a DTensor.
    """

    device: torch.device | None

    def __init__(self, module: nn.Module, before: _Walked | None) -> None:
        self._adapters = AdapterState(module) if has_adapters(module) else None
        self._adapted: dict[int, _Adapted] = {}
        if self._adapters is None:
            entries = list(collect(module))
        else:
            entries = []
            for index, (entry, adapted) in enumerate(_collect_adapted(module)):
                entries.append(entry)
                if adapted is not None:
                    self._adapted[index] = adapted
        if not entries:
            raise ConfigError(
                f"the trainer has no weights: {type(module).__name__} holds neither parameters nor persistent buffers"
            )
        self._grouped: dict[bool, tuple[Manifest, list[int]]]
        self._names = [name for name, _, _ in entries]
        self._kinds = [kind for _, _, kind in entries]
        tensors = [tensor for _, tensor, _ in entries]
        self._views = list(map(view_key, self._names, tensors))
        frozen_views = self._views
        if self._adapted:
            frozen_views = self._views.copy()
            for index, adapted in self._adapted.items():
                frozen_views[index] = view_key(self._names[index], adapted.frozen)
                self._views[index] = (*self._views[index], *map(id, adapted.layers))
        if before is not None and before._describes(self._names, self._kinds, self._views):
            self._grouped = before._grouped
        else:
            merged = _group(self._names, tensors, self._kinds, self._views)
            frozen = _group(self._names, tensors, self._kinds, frozen_views) if self._adapted else merged
            self._grouped = {True: merged, False: frozen}
        self._tensors = tensors
        self._ends = self._look_at_ends()
        self.sharded = any(map(is_dtensor, tensors))
        self._sent: dict[bool, Sequence[torch.Tensor | Merging]] = {}
        self._alone: dict[str, Adapter] = {}
        self._active: tuple[str, ...] | None = None
        self.device = None
        with contextlib.suppress(UnsupportedModel):  # said by whoever asks for the device
            self.device = device_of(module)

        self.fingerprint = Fingerprint(module)

    def manifest(self, *, merge: bool) -> Manifest:
        """In the trainer's own dtypes. Tensors that are tied in the frozen base are not if only one has an adapter."""
        return self._grouped[merge][0]

    def sent(self, *, merge: bool) -> Sequence[torch.Tensor | Merging]:
        """What the manifest's entries are, in its order, with or without adapters.

        Raises:
            UnsupportedModel: not to be sent in this way.
        """
        if merge not in self._sent:
            self._sent[merge] = [self._one(index, merge) for index in self._grouped[merge][1]]
        return self._sent[merge]

    @property
    def adapted(self) -> bool:
        """Whether there are PEFT adapters."""
        return self._adapters is not None

    def active(self, module: nn.Module) -> tuple[str, ...]:
        """See :func:`~twinkle_ray.lora.active_adapters`."""
        if self._active is None:
            self._active = tuple(active_adapters(module))
        return self._active

    def adapter(self, module: nn.Module, name: str) -> Adapter:
        """See :meth:`Adapter.of`."""
        if name not in self._alone:
            self._alone[name] = Adapter.of(module, name)
        return self._alone[name]

    def frozen_marks(self) -> list[tuple[int, int, int]] | None:
        """Object, address and count of writes of each tensor of the frozen base; ``None`` without adapters."""
        if self._adapters is None:
            return None
        marks = []
        for index in self._grouped[False][1]:
            adapted = self._adapted.get(index)
            tensor = self._tensors[index] if adapted is None else adapted.frozen
            local = tensor._local_tensor if is_dtensor(tensor) else tensor
            # a tensor made in inference mode has no count
            marks.append((id(tensor), local.data_ptr(), 0 if local.is_inference() else local._version))
        return marks

    def may_be_sent(self) -> bool:
        """Whether what is to be sent is still these tensors. To look at the memory of tens of thousands of them takes
        milliseconds: only that of the first and the last is compared, which shows a module that was moved or cast. That
        of each other is as it is sent, and whether any two share it by :meth:`holds`, while the wire works."""
        if self._adapters is not None or self.sharded:
            return self.fingerprint.same_tensors() and self._same_adapters()
        return self.fingerprint.same_objects() and self._ends == self._look_at_ends()

    def _look_at_ends(self) -> list[tuple[torch.device, torch.dtype, torch.Size]]:
        return [(tensor.device, tensor.dtype, tensor.shape) for tensor in (self._tensors[0], self._tensors[-1])]

    def holds(self) -> bool:
        """Whether another walk would find the same."""
        return self.fingerprint.holds() and self._same_adapters()

    def _same_adapters(self) -> bool:
        return self._adapters is None or self._adapters.holds()

    def _one(self, index: int, merge: bool) -> torch.Tensor | Merging:
        adapted = self._adapted.get(index)
        if adapted is None:
            return self._tensors[index]
        name = self._names[index]
        if merge:
            return adapted.merged
        frozen_or_refuse(name, adapted.layers)
        mine, frozen = self._tensors[index], adapted.frozen
        if mine.shape != frozen.shape or not _castable(DTYPE_NAMES[frozen.dtype], DTYPE_NAMES[mine.dtype]):
            raise UnsupportedModel(
                f"{name}: {frozen.dtype} {tuple(frozen.shape)} in the frozen base, {mine.dtype} {tuple(mine.shape)} "
                "in modules_to_save, so it can be synced merged only"
            )
        return frozen

    def _describes(self, names: list[str], kinds: list[str], views: list[tuple[Any, ...]]) -> bool:
        """A manifest is a function of these lists and of nothing else, so equal lists need no new one. Views are
        compared one by one because a hundred thousand new tuples would set off a full garbage collection."""
        return names == self._names and kinds == self._kinds and all(map(eq, views, self._views))


class TensorStream:
    """Tensors of one sync, each contiguous, of the wire's dtype and shape, detached: an iterator to be closed.

    A tensor that is contiguous and of the right dtype is the parameter's own memory; any other is one copy. A DTensor
    is cast, shard by shard, and then gathered. Besides what the consumer keeps, one tensor is alive at a time.

    Closing runs the gathers that are left, also if none was run yet, so that the other ranks get through theirs. If a
    gather itself failed there is no step to keep, and closing does nothing.

    Args:
        source: a module's tensors in the order of ``wire``, which live on without the consumer, some of them perhaps
            yet to be computed; or an iterator of (name, tensor).
        device: where they are, if that is known.
        recheck: whether the module is still as it was walked, as far as that was left to be compared later.

    Attributes:
        outdated: :meth:`recheck` has found that it is not.
        staged: whether the last tensor is memory made for this sync, which the consumer alone keeps.
    """

    def __init__(
        self,
        source: Sequence[torch.Tensor | Merging] | Iterator[tuple[str, torch.Tensor]],
        wire: Manifest,
        *,
        device: torch.device | None = None,
        recheck: Callable[[], bool] | None = None,
    ) -> None:
        self.staged = True
        self.outdated = False
        self._recheck = recheck
        self.device = device
        self._source = source
        self._lasting = not isinstance(source, Iterator)
        self._gathered = False
        self._wire = wire.tensors
        self._taken = 0
        self._over = False
        self._yielded: dict[int, tuple[str, weakref.ref[torch.Tensor], int]] = {}

    def __iter__(self) -> TensorStream:
        return self

    def __next__(self) -> torch.Tensor:
        """Raises ManifestMismatch if the next tensor is not the next one of the manifest."""
        pair, meta = self._pull()
        # The common case, tens of thousands of times: a module's own tensor, just as agreed.
        if self._lasting and pair is not None and meta is not None:
            own = pair[1]
            if (
                isinstance(own, torch.Tensor)
                and type(own) in PLAIN
                and own.shape == meta.shape
                and own.dtype is DTYPES[meta.dtype]
                and has_own_bytes(own)
            ):
                self.staged = False
                return own.detach()
        step = self._step(pair, meta)
        if step is None:
            raise StopIteration
        tensor, meta = step
        if isinstance(tensor, Gathered):
            tensor = tensor.merged()  # no collective: if it fails, the gathers of the others can still be made
        dtype = torch_dtype(meta.dtype)
        if tensor.dtype == dtype and has_own_bytes(tensor):
            self.staged = not self._lasting or self._gathered
            return tensor.detach()
        self.staged = True
        with torch.no_grad():
            return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)

    def recheck(self) -> None:
        """Compare what was left for later, best while others work."""
        if self._recheck is not None:
            self.outdated = not self._recheck()
            self._recheck = None

    def take(self, count: int) -> Sequence[torch.Tensor] | None:
        """The next ``count`` tensors at once, not detached, if all are a module's own memory and just as agreed; else
        ``None``, and nothing is taken. Ten times as fast as one by one, and a sync may have 20,000."""
        if self._over or isinstance(self._source, Iterator):
            return None
        span = slice(self._taken, self._taken + count)
        tensors: list[torch.Tensor] = []
        for tensor, meta in zip(self._source[span], self._wire[span], strict=True):
            if not (
                isinstance(tensor, torch.Tensor)
                and type(tensor) in PLAIN
                and tensor.shape == meta.shape
                and tensor.dtype is DTYPES[meta.dtype]
                and has_own_bytes(tensor)
            ):
                return None
            tensors.append(tensor)
        self._taken += count
        self.staged = False
        return tensors

    def lasting(self) -> list[torch.Tensor]:
        """Those of the tensors that are a module's own memory, just as it is sent."""
        if isinstance(self._source, Iterator):
            return []
        return [
            tensor
            for tensor, meta in zip(self._source, self._wire, strict=True)
            if isinstance(tensor, torch.Tensor)
            and type(tensor) in PLAIN
            and tensor.shape == meta.shape
            and tensor.dtype is DTYPES[meta.dtype]
            and has_own_bytes(tensor)
        ]

    def skip(self) -> bool:
        """Run the next tensor's collective and checks, and drop the result. ``False`` at the end."""
        return self._step(*self._pull()) is not None

    def skip_all(self) -> None:
        """:meth:`skip` to the end."""
        while self.skip():
            pass

    def close(self) -> None:
        """Run the collectives that are left, and drop their results."""
        while not self._over:
            self._gather(*self._pull())

    def __enter__(self) -> TensorStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as late:
            if error is None:
                raise
            error.add_note(f"while the other trainer ranks were let go: {type(late).__name__}: {late}")

    def _step(
        self, pair: tuple[str, torch.Tensor | Merging] | None, meta: TensorMeta | None
    ) -> tuple[torch.Tensor | Gathered, TensorMeta] | None:
        # every check comes after the gather: ranks that disagree about a tensor must still leave it together
        name, tensor = self._gather(pair, meta)
        if tensor is None and meta is None:
            return None
        if tensor is None:
            assert meta is not None
            raise _changed(f"{meta.name}: agreed, but the trainer no longer yields it")
        if meta is None:
            raise _changed(f"{name}: yielded after all {len(self._wire)} agreed tensors")
        if name != meta.name:
            raise _changed(f"{name}: yielded where {meta.name} was agreed")
        if tuple(tensor.shape) != meta.shape:
            raise _changed(f"{name}: shape {tuple(tensor.shape)}, agreed was {meta.shape}")
        if not _castable(DTYPE_NAMES[tensor.dtype], meta.dtype):
            raise _changed(f"{name}: dtype {tensor.dtype} cannot be sent as the agreed {meta.dtype}")
        return tensor, meta

    def _pull(self) -> tuple[tuple[str, torch.Tensor | Merging] | None, TensorMeta | None]:
        at, wire = self._taken, self._wire
        meta = wire[at] if at < len(wire) else None
        if self._over:
            return None, None
        self._over = True  # stays so if the user's function raises
        pair: tuple[str, torch.Tensor | Merging] | None
        if isinstance(self._source, Iterator):
            with torch.no_grad():
                pair = next(self._source, None)
            if pair is not None:
                self._refuse_rewritten(*pair)
        else:
            pair = (meta.name, self._source[at]) if meta is not None else None
        self._over = pair is None
        self._taken += 1
        return pair, meta

    def _refuse_rewritten(self, name: str, tensor: torch.Tensor) -> None:
        """Several tensors wait for one launch, so a function that fills one buffer again and again would send the last
        contents under every name.

        Raises:
            ConfigError: the memory was yielded before and was written to since.
        """
        if not isinstance(tensor, torch.Tensor) or tensor.is_inference() or type(tensor) not in PLAIN:
            return
        try:
            address = tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # of a layout without one, which is refused elsewhere
            return
        earlier = self._yielded.get(address)
        if address and earlier is not None:
            before, held, version = earlier[0], earlier[1](), earlier[2]
            if held is not None and held._version != version:
                raise ConfigError(
                    f"named_weights() yields {name} in memory that it yielded as {before} before, and has written to "
                    "since; yield each tensor in memory of its own"
                )
        self._yielded[address] = (name, weakref.ref(tensor), tensor._version)

    def _gather(
        self, pair: tuple[str, torch.Tensor | Merging] | None, meta: TensorMeta | None
    ) -> tuple[str, torch.Tensor | Gathered | None]:
        if pair is None:
            return "", None
        name, tensor = pair
        self._over = True  # stays so if the gather raises
        if isinstance(tensor, Merging):
            self._gathered = True
            with torch.no_grad():
                gathered = tensor.gather(_whole)
            self._over = False
            return name, gathered
        check_tensor(name, tensor)
        self._gathered = is_dtensor(tensor)
        if is_dtensor(tensor):
            own = DTYPE_NAMES[tensor.dtype]
            castable = meta is not None and _castable(own, meta.dtype)
            with torch.no_grad():
                tensor = _gather(tensor, meta.dtype if meta is not None and castable else own)
        self._over = False
        return name, tensor


def gather_only(tensors: Sequence[torch.Tensor], manifest: Manifest) -> None:
    """Take part in the collectives of these tensors on a rank that sends nothing, and keep nothing."""
    with TensorStream(tensors, manifest) as stream:
        stream.skip_all()


class _Adapted(NamedTuple):
    """A tensor that PEFT changes, beside its own entry.

    Attributes:
        merged: what is sent with adapters.
        frozen: what is sent without.
        layers: PEFT's layers around it.
    """

    merged: torch.Tensor | Merging
    frozen: torch.Tensor
    layers: tuple[Any, ...]


def collect(module: nn.Module, *, frozen: bool = False) -> Iterator[Entry]:
    """All parameters and persistent buffers, by every name they have, in the order of ``state_dict``.

    Args:
        frozen: of a module with PEFT adapters, those of the base under them.

    Raises:
        UnsupportedModel: as :meth:`WeightSource.manifest`; also if there is any PEFT adapter, but for ``frozen``.
    """
    if frozen:
        for (name, tensor, kind), adapted in _collect_adapted(module):
            yield name, tensor if adapted is None else adapted.frozen, kind
        return
    reject_adapters(module)
    for entry, _ in _collect((Place(prefix, place) for _, prefix, place in walk(module)), module):
        yield entry


def _collect_adapted(module: nn.Module) -> Iterator[tuple[Entry, _Adapted | None]]:
    """The same of the base model under PEFT adapters, with what they make of each."""
    return _collect(places(module), module)


def _collect(found: Iterable[Place], root: nn.Module) -> Iterator[tuple[Entry, _Adapted | None]]:
    # All modules first, also those in PEFT's layers: before that none of their tensors is surely the shard.
    fsdp2 = loaded_class("torch.distributed.fsdp", "FSDPModule")
    fsdp1 = loaded_class("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
    if fsdp2 is not None or fsdp1 is not None:
        for _, prefix, place in walk(root):
            if fsdp2 is not None and isinstance(place, fsdp2):
                cast(Any, place).reshard()
            if fsdp1 is not None and isinstance(place, fsdp1):
                _reject_flat_shards(prefix, place)
    meta: list[str] = []
    for item in found:
        prefix, place, layers, original = item
        for kind, tensors in (("parameter", place._parameters), ("buffer", place._buffers)):
            for key, tensor in tensors.items():
                if tensor is None or (kind == "buffer" and key in place._non_persistent_buffers_set):
                    continue
                name = prefix + key
                if tensor.is_meta:
                    meta.append(name)
                    continue
                check_tensor(name, tensor)
                if not layers and original is None:
                    yield (name, tensor, kind), None
                    continue
                frozen = tensor if original is None else getattr(original, f"_{kind}s").get(key)
                if frozen is None:
                    raise UnsupportedModel(
                        f"{name}: in modules_to_save there is one, in the original module there is none"
                    )
                check_tensor(name, frozen)
                adapted = _Adapted(merging(name, key, tensor, item), frozen, layers)
                yield (name, tensor, kind), adapted
    if meta:
        shown = ", ".join(meta[:10]) + (", ..." if len(meta) > 10 else "")
        raise UnsupportedModel(f"{len(meta)} tensors are on the meta device and have no values: {shown}")


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Refuse what plain bytes cannot express.

    Raises:
        UnsupportedModel: not a tensor, a subclass other than Parameter and DTensor, meta, sparse, or quantised.
    """
    kind = type(tensor)
    if kind not in PLAIN:
        local = tensor._local_tensor if is_dtensor(tensor) else None
        if local is None or type(local) not in PLAIN:
            inner = f"a DTensor of {type(local).__name__}" if local is not None else f"a {kind.__name__}"
            raise UnsupportedModel(f"{name}: {inner} cannot be sent as plain bytes; send it from named_weights()")
    if tensor.layout is not torch.strided:
        raise UnsupportedModel(f"{name}: its layout is {tensor.layout}, only strided tensors can be sent")
    if tensor.dtype not in DTYPE_NAMES:
        raise UnsupportedModel(f"{name}: its dtype {tensor.dtype} cannot be sent")
    if tensor.is_meta:
        raise UnsupportedModel(f"{name}: it is on the meta device and has no values")


def view_key(name: str, tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two living tensors exactly if they are the same view of the same memory.

    Raises:
        UnsupportedModel: the tensor's storage is freed.
    """
    shape, dtype = tensor.shape, tensor.dtype
    # a shard may be empty on some ranks only, and empty tensors all have one address: there the object counts
    if type(tensor) not in PLAIN or 0 in shape:
        return shape, dtype, id(tensor)
    address = tensor.data_ptr()
    if address == 0:
        raise UnsupportedModel(f"{name}: its storage is freed; bring the parameters back before the sync")
    return shape, dtype, address, tensor.stride(), tensor.device, tensor.is_conj(), tensor.is_neg()


def device_of(weights: nn.Module | Iterable[tuple[str, torch.Tensor]]) -> torch.device:
    """The one device of a module's parameters and persistent buffers, or of (name, tensor) pairs. Meta is ignored.

    A DTensor counts where its mesh gathers it, which is not where its shard is under CPU offload.

    Raises:
        UnsupportedModel: two tensors are on different devices.
        ConfigError: there is no tensor with a device.
    """
    if isinstance(weights, nn.Module):
        weights = (
            (prefix + key, tensor)
            for _, prefix, place in walk(weights)
            for tensors in (place._parameters, place._buffers)
            for key, tensor in tensors.items()
            if tensor is not None and key not in place._non_persistent_buffers_set
        )
    found: tuple[str, torch.device] | None = None
    for name, tensor in weights:
        if tensor.is_meta:
            continue
        device = _gathered_on(tensor) if is_dtensor(tensor) else tensor.device
        if found is None:
            found = name, device
        elif device != found[1]:
            raise UnsupportedModel(f"{found[0]} is on {found[1]}, but {name} on {device}; one device is needed")
    if found is None:
        raise ConfigError("there are no weights, so there is no device")
    return found[1]


def reject_adapters(module: nn.Module) -> None:
    """Refuse a module with PEFT adapters. PEFT is not imported for it.

    Raises:
        UnsupportedModel: one is there.
    """
    if has_adapters(module):
        raise UnsupportedModel(
            f"{type(module).__name__} holds PEFT adapters; they can be sent, but not received: sync into the base model"
        )


def is_dtensor(tensor: torch.Tensor) -> TypeIs[DTensor]:
    if type(tensor) in PLAIN:
        return False
    cls = loaded_class("torch.distributed.tensor", "DTensor")
    return cls is not None and isinstance(tensor, cls)


def _reject_flat_shards(prefix: str, module: Any) -> None:
    handle = module._handle
    if handle is not None and (handle.uses_sharded_strategy or not module._use_orig_params):
        raise UnsupportedModel(
            f"{prefix.rstrip('.') or 'the trainer'} is sharded or flattened by FSDP1, whose parameters have no shapes "
            "of their own; use fully_shard (FSDP2), or send full tensors from named_weights()"
        )


def _gathered_on(tensor: DTensor) -> torch.device:
    local = tensor._local_tensor.device
    mesh = tensor.device_mesh.device_type
    return local if local.type == mesh else torch.device(mesh, torch.get_device_module(mesh).current_device())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return _gather(tensor, DTYPE_NAMES[tensor.dtype]) if is_dtensor(tensor) else tensor


def _gather(tensor: DTensor, dtype: str) -> torch.Tensor:
    shards: Any = tensor
    if tensor._local_tensor.device.type != tensor.device_mesh.device_type:
        shards = shards.to(tensor.device_mesh.device_type)  # CPU offload: the mesh's group cannot move CPU memory
    if not any(placement.is_partial() for placement in tensor.placements):
        shards = shards.to(torch_dtype(dtype))  # a sum of casts is not the cast of a sum
    gathered: torch.Tensor = shards.full_tensor()
    return gathered


def _group(
    names: list[str], tensors: list[torch.Tensor], kinds: list[str], keys: list[tuple[Any, ...]]
) -> tuple[Manifest, list[int]]:
    """One entry per key, under its first name; also the index of that name."""
    first_of: dict[tuple[Any, ...], int] = {}
    aliases: dict[int, list[str]] = {}
    for index, key in enumerate(keys):
        first = first_of.setdefault(key, index)
        if first != index:
            aliases.setdefault(first, []).append(names[index])
    metas = tuple(
        TensorMeta(
            name=names[index],
            shape=tuple(tensors[index].shape),
            dtype=DTYPE_NAMES[tensors[index].dtype],
            kind=kinds[index],
            aliases=tuple(aliases.get(index, ())),
        )
        for index in first_of.values()
    )
    return Manifest(metas), list(first_of.values())


def _castable(own: str, agreed: str) -> bool:
    return own == agreed or (own in CASTABLE and agreed in CASTABLE)


def _changed(problem: str) -> ManifestMismatch:
    return ManifestMismatch(f"the trainer changed since the manifest was agreed: {problem}", problems=(problem,))


def _require_same(mine: Manifest, wire: Manifest) -> None:
    if mine.digest == wire.digest:
        return
    if len(mine) != len(wire):
        raise _changed(f"it has {len(mine)} tensors, agreed were {len(wire)}")
    for have, agreed in zip(mine, wire, strict=True):
        if have.names != agreed.names or have.shape != agreed.shape:
            raise _changed(
                f"{have.name} {have.shape} also named {have.aliases}, agreed was "
                f"{agreed.name} {agreed.shape} also named {agreed.aliases}"
            )
        if not _castable(have.dtype, agreed.dtype):
            raise _changed(f"{have.name}: dtype {have.dtype} cannot be sent as the agreed {agreed.dtype}")
