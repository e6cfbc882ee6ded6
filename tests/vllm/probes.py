"""Runs of real vLLM that write down what they saw, as JSON: ``python probes.py CHECKPOINTS OUT NAME [ARGS]``."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shutil
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import models

from tests.wire import deliver
from twinkle_ray.digest import assemble
from twinkle_ray.errors import ReplicaUnavailable, SyncError, TwinkleRayError
from twinkle_ray.manifest import Manifest, TensorMeta, agree_cuts
from twinkle_ray.types import Deadline
from twinkle_ray.vllm.engine import adapt, encodes
from twinkle_ray.vllm.loading import EngineSink
from twinkle_ray.vllm.placement import record

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 32 << 20,
}


def llm_of(checkpoint: Path, **more: Any) -> Any:
    from vllm import LLM

    return LLM(model=str(checkpoint), **ENGINE, **more)


def generate(llm: Any, new_tokens: int = models.NEW_TOKENS) -> list[Any]:
    """``[finish reason, token ids]`` per prompt."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    outputs = llm.generate(models.PROMPTS, params, use_tqdm=False)
    return [[o.outputs[0].finish_reason, list(o.outputs[0].token_ids)] for o in outputs]


def tokens(llm: Any) -> list[list[int]]:
    return [ids for _, ids in generate(llm)]


def manifest_of(tensors: dict[str, torch.Tensor]) -> Manifest:
    """As a trainer would send it: a tied head is an alias of the embedding."""
    tied = "lm_head.weight" not in tensors
    return Manifest(
        tuple(
            TensorMeta(
                name=name,
                shape=tuple(t.shape),
                dtype="float32",
                aliases=("lm_head.weight",) if tied and name == "model.embed_tokens.weight" else (),
            )
            for name, t in tensors.items()
        )
    )


BUCKET = 300 << 10
"""Bytes: a chunk has one of the large tensors of a tiny model, or several of the small ones."""


def load(
    sink: EngineSink,
    tensors: dict[str, torch.Tensor],
    *,
    bucket_size: int = BUCKET,
    chunks: int | None = None,
    cuts: Any = (),
) -> Any:
    """One sync through the sink; with ``chunks`` the wire breaks after so many."""
    manifest = manifest_of(tensors).with_cuts(cuts)
    if chunks is None:
        return asdict(deliver(sink, manifest, tensors, bucket_size))
    with contextlib.suppress(SyncError):
        deliver(sink, manifest, tensors, bucket_size, fail_at=chunks)
        raise AssertionError("the wire did not break")
    return None


def checkpoint_digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Not ours: ``hashlib`` over numpy's bytes."""
    return {name: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for name, t in tensors.items()}


def in_process(root: Path, kind: str) -> dict[str, Any]:
    """One architecture, worker in this process: three syncs, one given up, and manifests that do not fit."""
    llm = llm_of(root / f"{kind}-0")
    worker = llm.llm_engine.model_executor.driver_worker.worker
    model = worker.model_runner.get_model()
    sink = EngineSink(worker)
    facts: dict[str, Any] = {
        "extension": llm.llm_engine.vllm_config.parallel_config.worker_extension_cls,
        "before": tokens(llm),
        "syncs": [],
        "describe": sink.describe(),
    }
    for seed in models.SEEDS[1:]:
        tensors = models.tensors(root / f"{kind}-{seed}")
        agreement = sink.agree(manifest_of(tensors))
        report = load(sink, tensors)
        llm.llm_engine.reset_prefix_cache()
        pieces, unverifiable = sink.pieces(manifest_of(tensors), None)
        facts["syncs"].append(
            {
                "seed": seed,
                "agreement": asdict(agreement),
                "report": report,
                "tokens": tokens(llm),
                "held": {p.name: p.sha256 for p in pieces},
                "sent": checkpoint_digests(tensors),
                "unverifiable": unverifiable,
            }
        )
    last = models.tensors(root / f"{kind}-{models.SEEDS[-1]}")
    load(sink, models.tensors(root / f"{kind}-1"), chunks=4)
    facts["meta_after_abandon"] = [n for n, p in model.named_parameters() if p.is_meta]
    load(sink, last)
    llm.llm_engine.reset_prefix_cache()
    facts["healed"] = tokens(llm)
    facts["proof"] = {"indirect": sink._proof.indirect if sink._proof else None}
    facts["sabotaged"] = sabotaged(llm, worker, models.tensors(root / f"{kind}-2"))
    facts["cut off after the proof"] = cut_off(llm, worker, models.tensors(root / f"{kind}-1"))
    facts["constants"] = constants(worker, last)
    load(sink, last)

    frozen = {n: (p.data_ptr(), p.detach().clone()) for n, p in model.named_parameters()}
    facts["misfits"] = {}
    for name, change in MISFITS.items():
        changed = dict(last)
        change(changed)
        facts["misfits"][name] = asdict(sink.agree(manifest_of(changed)))
    now = dict(model.named_parameters())
    facts["unchanged"] = list(now) == list(frozen) and all(
        now[n].data_ptr() == address and torch.equal(now[n], value) for n, (address, value) in frozen.items()
    )
    if kind == "llama":
        facts["odd"] = odd_loaders(llm.llm_engine.vllm_config)
        facts["foreign_extension"] = foreign_extension()
    return facts


def swap(sink: EngineSink, manifest: Manifest, names: list[str]) -> None:
    """Exchange two recorded destinations."""
    places = sink.placement(manifest).destinations
    places[names[0]], places[names[1]] = places[names[1]], places[names[0]]


def sabotaged(llm: Any, worker: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A sync by a map in which the k and v of one layer are exchanged."""
    sink, manifest = EngineSink(worker), manifest_of(tensors)
    swapped = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "kv"]
    swap(sink, manifest, swapped)
    report = load(sink, tensors)
    llm.llm_engine.reset_prefix_cache()
    assert sink._proof is not None
    return {"swapped": swapped, "indirect": sink._proof.indirect, "report": report, "tokens": tokens(llm)}


def cut_off(llm: Any, worker: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A sync that fails between the proof and the first tensor, and the one after it."""
    sink, touched = EngineSink(worker), []
    before = worker.model_runner.get_model().model.norm.weight.clone()
    sink.begin(manifest_of(tensors))
    sink.arm(lambda: touched.append(True))
    sink.abandon()
    patterns = not torch.equal(before, worker.model_runner.get_model().model.norm.weight)
    load(sink, tensors)
    llm.llm_engine.reset_prefix_cache()
    return {"touched": bool(touched), "patterns": patterns, "tokens": tokens(llm)}


def constants(worker: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Norms of one everywhere, and a map in which two of them are exchanged."""
    changed = {n: torch.ones_like(t) if "norm" in n else t for n, t in tensors.items()}
    sink, manifest = EngineSink(worker), manifest_of(changed)
    swapped = [f"model.layers.{i}.input_layernorm.weight" for i in (0, 1)]
    load(EngineSink(worker), changed)  # so that what is live is constant too
    swap(sink, manifest, swapped)
    load(sink, changed)
    pieces, _ = EngineSink(worker).pieces(manifest, None)
    assert sink._proof is not None
    return {
        "swapped": swapped,
        "caught": [n for n in swapped if n in sink._proof.indirect],
        "held": {p.name: p.sha256 for p in pieces},
        "sent": checkpoint_digests(changed),
    }


def _everything_wrong(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.nonsense.weight"] = torch.zeros(3)
    tensors["banana"] = torch.zeros(3)
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(32, 128)  # too small
    tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(130, 128)  # too large, which vLLM cuts silently
    tensors["model.norm.weight"] = torch.zeros(1)
    del tensors["model.layers.1.self_attn.v_proj.weight"]  # a part of a fused parameter
    del tensors["model.layers.1.post_attention_layernorm.weight"]


def _other_names(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[f"module.{name}"] = tensors.pop(name)


def _own_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = torch.zeros(models.VOCAB, 128)


MISFITS = {
    "several": _everything_wrong,
    "prefix": _other_names,
    "empty": lambda tensors: tensors.clear(),
    "own head": _own_head,
}


class Odd(torch.nn.Module):
    """Loaders that do what loaders may do."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("plain", "derived", "scaled", "rebound", "read", "transposed", "padded", "each", "never"):
            self.register_parameter(name, torch.nn.Parameter(torch.full((4, 6), 7.0), requires_grad=False))
        self.register_parameter("gone", torch.nn.Parameter(torch.empty(0), requires_grad=False))

    def load_weights(self, weights: Any) -> None:
        for name, value in weights:
            parameter = getattr(self, name)  # AttributeError: unknown
            if name == "plain":
                parameter.data.copy_(value)
            elif name == "derived":
                parameter.data.copy_(-torch.exp(value))
            elif name == "scaled":
                parameter.data.copy_(value)
                parameter.data.mul_(2)
            elif name == "rebound":
                parameter.data = torch.zeros(4, 6)
            elif name == "read":
                parameter.data.fill_(value.sum().item())
            elif name == "transposed":
                parameter.data.copy_(value.t())
            elif name == "padded":
                parameter.data[:3].copy_(value)
                parameter.data[3:].fill_(0)
            elif name == "each":
                torch._foreach_copy_([parameter.data], [value])
            elif name == "gone":
                assert parameter.shape == value.shape, "no room"


def odd_loaders(vllm_config: Any) -> dict[str, Any]:
    """What the recorder makes of :class:`Odd`."""
    model = Odd()
    shapes = {"transposed": (6, 4), "padded": (3, 6)}
    names = [n for n, _ in model.named_parameters() if n != "never"] + ["unheard"]
    manifest = Manifest(tuple(TensorMeta(name=n, shape=shapes.get(n, (4, 6)), dtype="float32") for n in names))
    placement = record(model, manifest, vllm_config)
    source = torch.arange(24.0).reshape(6, 4)
    (turned,) = placement.destinations["transposed"]
    turned.dest.copy_(turned.source(source))
    return {
        "destinations": sorted(placement.destinations),
        "indirect": placement.indirect,
        "unknown": placement.unknown,
        "mismatched": placement.mismatched,
        "missing": placement.missing,
        "transposed": torch.equal(model.transposed.data, source.t()) and not turned.whole,
        "whole": placement.destinations["plain"][0].whole and placement.destinations["plain"][0].contiguous,
        "sevens": all(bool((getattr(model, n) == 7).all()) for n in names if n not in ("transposed", "unheard")),
    }


def foreign_extension() -> str:
    """An engine argument that the user gave stays as he gave it."""
    from vllm.engine.arg_utils import EngineArgs

    from twinkle_ray.vllm import plugin

    plugin.register()
    plugin.register()
    patched = EngineArgs.create_engine_config
    given = SimpleNamespace(worker_extension_cls="mine.Extension")
    # vLLM's own method goes on with what this stand-in lacks.
    with contextlib.suppress(AttributeError):
        patched(given)
    assert not hasattr(getattr(patched, plugin._MARK), plugin._MARK), "patched twice"
    return given.worker_extension_cls


def parameter_digests(model: torch.nn.Module) -> dict[str, str]:
    return checkpoint_digests({name: parameter.detach() for name, parameter in model.named_parameters()})


def odd_model(root: Path) -> dict[str, Any]:
    """A model of the user's own, whose loader transposes, sums and pads, through three syncs."""
    import zoo

    zoo.register()
    llm = llm_of(root / "odd-0")
    worker = llm.llm_engine.model_executor.driver_worker.worker
    model, sink = worker.model_runner.get_model(), EngineSink(worker)
    facts: dict[str, Any] = {"model": type(model).__name__, "before": tokens(llm), "syncs": []}
    for seed in models.SEEDS[1:]:
        tensors = models.tensors(root / f"odd-{seed}")
        problems = sink.agree(manifest_of(tensors)).problems
        # In chunks so small that the two parts of a sum are never in the same.
        report = load(sink, tensors, bucket_size=64 << 10)
        llm.llm_engine.reset_prefix_cache()
        assert sink._proof is not None
        facts["syncs"].append(
            {
                "seed": seed,
                "problems": problems,
                "report": report,
                "direct": sorted(sink._proof.direct),
                "indirect": sink._proof.indirect,
                "nbytes": {name: tensor.nbytes for name, tensor in tensors.items()},
                "constant": sorted(n for n, t in tensors.items() if bool((t == t.view(-1)[0]).all())),
                "parameters": parameter_digests(model),
                "tokens": tokens(llm),
            }
        )
    return facts


def nested_model(root: Path) -> dict[str, Any]:
    """An engine that has the model within another module, and a table of names."""
    import zoo

    zoo.register()
    folder = root / "nested-0"
    shutil.copytree(root / "llama-0", folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["NestedLlamaForCausalLM"]}))
    llm = llm_of(folder)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    model, sink = worker.model_runner.get_model(), EngineSink(worker)
    facts: dict[str, Any] = {"names": sorted(name for name, _ in model.named_parameters())[:2], "syncs": []}
    for seed in models.SEEDS[1:3]:
        tensors = models.tensors(root / f"llama-{seed}")
        problems = sink.agree(manifest_of(tensors)).problems
        report = load(sink, tensors)
        llm.llm_engine.reset_prefix_cache()
        facts["syncs"].append({"seed": seed, "problems": problems, "report": report, "tokens": tokens(llm)})
    before = parameter_digests(model)
    wrong = dict(tensors)
    wrong["model.other.weight"] = wrong.pop("model.norm.weight")
    facts["wrong"] = sink.agree(manifest_of(wrong)).problems
    try:
        load(sink, wrong)
    except TwinkleRayError as error:
        facts["error"] = [type(error).__name__, str(error)]
    facts["unchanged"] = parameter_digests(model) == before
    return facts


def odd_from_disk(root: Path, seed: str) -> dict[str, Any]:
    """What vLLM itself makes of such a checkpoint."""
    import zoo

    zoo.register()
    llm = llm_of(root / f"odd-{seed}")
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    return {"parameters": parameter_digests(model), "tokens": tokens(llm)}


def layerwise(root: Path) -> dict[str, Any]:
    """The CPU build as it comes: linears are packed away, so vLLM's own reload is the way."""
    llm = llm_of(root / "llama-0")
    worker = llm.llm_engine.model_executor.driver_worker.worker
    model = worker.model_runner.get_model()
    sink = EngineSink(worker)
    first, last = models.tensors(root / "llama-1"), models.tensors(root / "llama-2")
    facts: dict[str, Any] = {"agreement": asdict(sink.agree(manifest_of(first))), "tokens": {}}
    facts["report"] = load(sink, first)
    llm.llm_engine.reset_prefix_cache()
    facts["tokens"]["1"] = tokens(llm)
    changed = dict(last)
    _everything_wrong(changed)
    facts["misfit"] = asdict(sink.agree(manifest_of(changed)))
    load(sink, last, bucket_size=BUCKET // 2, chunks=6)
    facts["meta_after_abandon"] = [n for n, p in model.named_parameters() if p.is_meta]
    load(sink, last, bucket_size=BUCKET // 2)
    llm.llm_engine.reset_prefix_cache()
    facts["tokens"]["2"] = tokens(llm)
    pieces, unverifiable = sink.pieces(manifest_of(last), None)
    facts["pieces"], facts["unverifiable"], facts["names"] = len(pieces), unverifiable, list(last)
    return facts


def wanted_cuts(worker: Any, checkpoint: str) -> Any:
    """Runs in a worker process: what it says to a manifest."""
    worker = vars(worker).get("worker") or worker
    agreement = EngineSink(worker).agree(manifest_of(models.tensors(Path(checkpoint))))
    return agreement.problems, agreement.cuts


def load_here(worker: Any, checkpoint: str, cuts: Any) -> Any:
    """Runs in a worker process: one sync of the tensors as they are, one with them cut, then what is held."""
    worker = vars(worker).get("worker") or worker
    sink = EngineSink(worker)
    tensors = models.tensors(Path(checkpoint))
    sink.agree(manifest_of(tensors))
    reports = [load(sink, tensors), load(sink, {n: t + 1 for n, t in tensors.items()}, cuts=cuts)]
    reports.append(load(sink, tensors, cuts=cuts))
    pieces, unverifiable = sink.pieces(manifest_of(tensors), None)
    return pieces, unverifiable, reports


def tensor_parallel(root: Path, kind: str) -> dict[str, Any]:
    """Two worker processes, each with its shards."""
    llm = llm_of(root / f"{kind}-0", tensor_parallel_size=2)
    checkpoint = str(root / f"{kind}-1")
    said = llm.llm_engine.collective_rpc(wanted_cuts, args=(checkpoint,))
    sent = models.tensors(Path(checkpoint))
    cuts = agree_cuts(manifest_of(sent), [wanted for _, wanted in said])
    answers = llm.llm_engine.collective_rpc(load_here, args=(checkpoint, cuts))
    llm.llm_engine.reset_prefix_cache()
    digests, partial = assemble([pieces for pieces, *_ in answers])
    engine = adapt(llm)
    assert engine is not None
    return {
        "kind": engine.kind,
        "workers": engine.workers,
        "ranks": [d["tp_rank"] for d in now(engine.call("describe", timeout_s=20))],
        "problems": [problems for problems, _ in said],
        "unverifiable": [names for _, names, _ in answers],
        "reports": {way: [r[i] for *_, r in answers] for i, way in ((0, "whole"), (2, "cut"))},
        "nbytes": {name: tensor.nbytes for name, tensor in sent.items()},
        "partial": partial,
        "cut": sorted({p.name for pieces, *_ in answers for p in pieces if p.data is not None}),
        "held": digests,
        "sent": checkpoint_digests(sent),
        "tokens": tokens(llm),
    }


def now(coroutine: Any) -> Any:
    """Run a coroutine that must not suspend."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it suspended")


def error_of(call: Any) -> list[str]:
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


LONG = 200


class Client(threading.Thread):
    """A user's call of ``llm.generate`` in another thread of the actor; ``heard`` is what came of it."""

    def __init__(self, llm: Any) -> None:
        super().__init__(daemon=True)
        self.llm, self.heard = llm, None
        self.start()

    def run(self) -> None:
        try:
            self.heard = [[reason, len(ids)] for reason, ids in generate(self.llm, LONG)]
        except Exception as error:
            self.heard = [type(error).__name__, str(error)]

    def outcome(self) -> Any:
        self.join(30)
        return "hangs" if self.is_alive() else self.heard


def llm_engine(root: Path) -> dict[str, Any]:
    """The adapter and its door over a ``vllm.LLM`` with users in other threads."""
    llm = llm_of(root / "llama-0")
    own = sorted(vars(llm.llm_engine))
    engine = adapt(llm, wait_s=20.0)
    assert engine is not None
    facts: dict[str, Any] = {
        "kind": engine.kind,
        "workers": engine.workers,
        "loop": engine.loop is None,
        "same": adapt(llm) is engine,
        "stranger": adapt(object()) is None,
        "describe": now(engine.call("describe", timeout_s=20)),
        "typed error": error_of(lambda: now(engine.call("pieces", None, timeout_s=20))),
        "other error": error_of(lambda: now(engine.call("nonsense", timeout_s=20))),
        "private": error_of(lambda: now(engine.call("_manifests", timeout_s=20))),
        "asleep": [now(engine.asleep())],
        "encodes": encodes(llm.llm_engine.vllm_config),
    }
    alone = [[reason, len(ids)] for reason, ids in generate(llm, LONG)]
    facts["undisturbed"] = alone
    for mode in ("wait", "abort", "keep"):
        client = Client(llm)
        time.sleep(0.1)
        now(engine.pause(mode, Deadline.after(20)))
        # Two threads in generate at once get each other's outputs from vLLM: no newcomer beside kept requests.
        newcomer = Client(llm) if mode != "keep" else None
        time.sleep(0.3)
        early, later = client.heard, newcomer and newcomer.heard
        now(engine.drop_caches())
        now(engine.resume())
        late = [client.outcome(), newcomer.outcome() if newcomer else None]
        facts[mode] = {"early": early, "newcomer": later, "late": late}
    client = Client(llm)
    time.sleep(0.05)
    facts["deadline"] = error_of(lambda: now(engine.pause("wait", Deadline.after(0.01))))
    facts["serves on"] = client.outcome()
    client = Client(llm)
    time.sleep(0.05)
    now(engine.pause("keep", Deadline.after(20)))
    waiting = Client(llm)
    time.sleep(0.05)
    now(engine.refuse(ReplicaUnavailable("poisoned")))
    facts["refused"] = [client.outcome(), waiting.outcome(), Client(llm).outcome()]
    now(engine.pause("wait", Deadline.after(20)))
    engine.door.wait_s = 0.2
    facts["impatient"] = Client(llm).outcome()
    now(engine.drop_caches())
    now(engine.resume())
    facts["healed"] = Client(llm).outcome()
    now(engine.pause("wait", Deadline.after(20)))
    slices = []

    def advance(seconds: float) -> None:
        slices.append(seconds)
        if len(slices) == 3:
            now(engine.resume())

    adapt(llm, advance=advance)
    facts["single thread"] = [[reason, len(ids)] for reason, ids in generate(llm, LONG)]
    engine.door.advance = None
    now(engine.sleep(1))
    facts["asleep"].append(now(engine.asleep()))
    now(engine.wake_up(["weights"]))
    now(engine.pause("wait", Deadline.after(20)))
    now(engine.resume())
    facts["asleep"].append(now(engine.asleep()))
    now(engine.wake_up(["kv_cache"]))
    facts["asleep"].append(now(engine.asleep()))
    facts["awake"] = Client(llm).outcome()
    engine.detach()
    # What vLLM keeps for itself meanwhile (cached tasks) is no trace of ours.
    facts["traces"] = [n for n in vars(llm.llm_engine) if n not in own and not n.startswith("_")]
    facts["detached"] = Client(llm).outcome()
    llm.llm_engine.vllm_config.parallel_config.worker_extension_cls = ""
    bare = adapt(llm)
    assert bare is not None
    facts["without extension"] = error_of(lambda: now(bare.call("describe", timeout_s=20)))
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        bare.detach()
        parallel = llm.llm_engine.vllm_config.parallel_config
        was = getattr(parallel, name)
        setattr(parallel, name, 2)
        facts[name] = error_of(lambda: adapt(llm))
        setattr(parallel, name, was)
    return facts


def async_llm(root: Path) -> dict[str, Any]:
    return asyncio.run(_async_llm(root))


async def _async_llm(root: Path) -> dict[str, Any]:
    """The adapter over a ``vllm.AsyncLLM``."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(root / "llama-0"), **ENGINE))
    engine = adapt(llm, wait_s=20.0)
    assert engine is not None
    numbers = iter(range(10_000))

    async def one(prompt: str) -> Any:
        params = SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True)
        try:
            async for output in llm.generate(prompt, params, f"request-{next(numbers)}"):
                last = output
        except TwinkleRayError as error:
            return [type(error).__name__, str(error)]
        return [last.outputs[0].finish_reason, len(last.outputs[0].token_ids)]

    async def client() -> Any:
        return await asyncio.gather(*map(one, models.PROMPTS))

    facts: dict[str, Any] = {
        "kind": engine.kind,
        "workers": engine.workers,
        "loop": engine.loop is asyncio.get_running_loop(),
        "describe": await engine.call("describe", timeout_s=20),
        "asleep": [await engine.asleep()],
        "encodes": encodes(llm.vllm_config),
        "undisturbed": await client(),
    }
    try:
        await engine.call("pieces", None, timeout_s=20)
    except TwinkleRayError as error:
        facts["typed error"] = [type(error).__name__, str(error)]
    for mode in ("wait", "abort", "keep"):
        task = asyncio.create_task(client())
        await asyncio.sleep(0.1)
        await engine.pause(mode, Deadline.after(20))
        newcomer = asyncio.create_task(client())
        await asyncio.sleep(0.3)
        early, later = task.done() and task.result(), newcomer.done()
        await engine.drop_caches()
        await engine.resume()
        facts[mode] = {"early": early or None, "newcomer": later or None, "late": [await task, await newcomer]}
    task = asyncio.create_task(client())
    await asyncio.sleep(0.05)
    try:
        await engine.pause("wait", Deadline.after(0.01))
    except TwinkleRayError as error:
        facts["deadline"] = [type(error).__name__, str(error)]
    facts["serves on"] = await task
    task = asyncio.create_task(one("running"))
    await asyncio.sleep(0.05)
    await engine.pause("keep", Deadline.after(20))
    waiting = asyncio.create_task(one("waiting"))
    await asyncio.sleep(0.05)
    await engine.refuse(ReplicaUnavailable("poisoned"))
    facts["refused"] = [await task, await waiting, await one("new")]
    await engine.pause("wait", Deadline.after(20))
    engine.wait_s = 0.2
    facts["impatient"] = await one("closed")
    await engine.drop_caches()
    await engine.resume()
    facts["healed"] = await client()
    await engine.sleep(1)
    facts["asleep"].append(await engine.asleep())
    await engine.wake_up(["weights"])
    await engine.pause("wait", Deadline.after(20))
    await engine.resume()
    facts["asleep"].append(await engine.asleep())
    await engine.wake_up(["kv_cache"])
    facts["asleep"].append(await engine.asleep())
    facts["awake"] = await client()
    engine.detach()
    facts["traces"] = [n for n in ("generate", "encode", "sleep", "wake_up") if n in vars(llm)]
    facts["detached"] = await client()
    llm.shutdown()
    return facts


PROBES = {
    "in_process": in_process,
    "odd_model": odd_model,
    "nested_model": nested_model,
    "odd_from_disk": odd_from_disk,
    "layerwise": layerwise,
    "tensor_parallel": tensor_parallel,
    "llm": llm_engine,
    "child": llm_engine,
    "async": async_llm,
}

if __name__ == "__main__":
    checkpoints, out, probe, *rest = sys.argv[1:]
    Path(out).write_text(json.dumps(PROBES[probe](Path(checkpoints), *rest)))
