"""Runs of real vLLM with LoRA adapters, as JSON: ``python adapter_probes.py CHECKPOINTS ADAPTERS OUT NAME``.

``python adapter_probes.py CHECKPOINTS ADAPTERS`` makes the adapters: directories as peft writes them, and
``expected.json``, what peft's own forward generates with each.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import models

from twinkle_ray.errors import TwinkleRayError
from twinkle_ray.types import Deadline
from twinkle_ray.vllm.adapters import Adapters, adapters_of, lora_arguments, read
from twinkle_ray.vllm.engine import adapt
from twinkle_ray.vllm.worker import WorkerExtension

LONG = "weights travel far " * 10
"""More than one block (128 tokens) of the prefix cache."""
PROMPTS = [*models.PROMPTS, LONG]
UPDATES = 5
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LAYER = "base_model.model.model.layers.0.self_attn"


def adapter_configs() -> dict[str, dict[str, Any]]:
    common = {"r": 4, "lora_alpha": 8, "target_modules": LINEAR}
    return {
        **{f"a{k}": common for k in range(1, UPDATES + 1)},
        "b1": {"r": 8, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]},
        "b2": {"r": 8, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]},
        "c": {"r": 2, "lora_alpha": 6, "target_modules": ["o_proj", "up_proj"]},
        "rslora": {**common, "use_rslora": True},
        "patterns": {
            **common,
            "rank_pattern": {"layers.1.self_attn.q_proj": 2, "down_proj": 8},
            "alpha_pattern": {"v_proj": 40, "layers.0.mlp.up_proj": 1},
        },
        "embeddings": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
        "dora": {**common, "use_dora": True},
        "pissa": {**common, "init_lora_weights": "pissa"},
        "large": {**common, "r": 16},
    }


def make_adapters(root: Path, out: Path) -> None:
    import peft
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "llama-0")
    expected: dict[str, Any] = {}
    for seed, (name, config) in enumerate({"base": None, **adapter_configs()}.items()):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(root / "llama-0", dtype=torch.float32).eval()
        if config is not None:
            model = peft.get_peft_model(model, peft.LoraConfig(**config)).eval()
            torch.manual_seed(seed)
            # Later ones of a family have the larger B.
            growth = 0.02 * (int(name[1]) if name[1:].isdigit() else 2)
            with torch.no_grad():
                for parameter, value in model.named_parameters():
                    if "lora_A" in parameter or "lora_embedding_A" in parameter:
                        value.copy_(torch.randn_like(value) / math.sqrt(value.shape[0]))
                    elif "lora_B" in parameter or "lora_embedding_B" in parameter:
                        value.copy_(growth * torch.randn_like(value))
            model.save_pretrained(out / name, save_embedding_layers=False)
        expected[name] = []
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt")
            made = model.generate(
                **ids, do_sample=False, max_new_tokens=models.NEW_TOKENS, min_new_tokens=models.NEW_TOKENS
            )
            expected[name].append(made[0, ids["input_ids"].shape[1] :].tolist())
    (out / "expected.json").write_text(json.dumps(expected))


class Extension(WorkerExtension):
    """A worker's side of the tests: what a sync does once it has received the tensors."""

    def put(self, name: str, version: int, path: str, number: int, anew: bool = False) -> Any:
        """``anew``: not in the memory of the version before it, though it has the same shapes."""
        config, tensors = read(path)
        alike = json.dumps([config, [[n, list(t.shape), str(t.dtype)] for n, t in tensors.items()]], sort_keys=True)
        digest = None if anew else hashlib.sha256(alike.encode()).hexdigest()
        store = adapters_of(self)
        return self._outcome(lambda: store.register(name, version, config, tensors, number=number, digest=digest))

    def memory(self, name: str) -> list[int]:
        """Which object vLLM serves an adapter from, and in which slot."""
        manager = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
        number = adapters_of(self).entries()["held"][name][1]
        return [id(manager.list_adapters()[number]), list(manager.lora_index_to_id).index(number)]

    def put_broken(self, where: str, name: str, path: str, number: int) -> Any:
        """:meth:`put` with vLLM failing in the middle."""
        manager = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
        layers = list(manager.modules.values())
        holder = {"slots": layers[len(layers) // 2], "add": manager, "activate": manager}[where]
        method = {"slots": "set_lora", "add": "add_adapter", "activate": "activate_adapter"}[where]

        def fail(*args: Any, **kwargs: Any) -> None:
            del vars(holder)[method]
            raise RuntimeError("no more memory")

        vars(holder)[method] = fail
        return self.put(name, 99, path, number, anew=where == "slots")

    def refuse(self, path: str, change: str) -> Any:
        """The error for an adapter with something wrong, and whether what vLLM holds was left as it is."""
        config, tensors = read(path)
        WRONG[change](config, tensors)
        before = self.seen()
        return [self._outcome(lambda: adapters_of(self).register("a", 99, config, tensors)), before == self.seen()]

    def seen(self) -> Any:
        """vLLM's own list of adapters, and a sum over all slots."""
        manager = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
        slots = [t for m in manager.modules.values() for t in (*m.lora_a_stacked, *m.lora_b_stacked)]
        return [sorted(manager.list_adapters()), sum(float(t.double().abs().sum()) for t in slots)]

    def drop_all(self) -> None:
        self.model_runner.lora_manager.remove_all_adapters()  # type: ignore[attr-defined]

    def _outcome(self, action: Callable[[], Any]) -> Any:
        try:
            action()
        except TwinkleRayError as error:
            return [type(error).__name__, str(error)]
        return None


def _prefix(config: Any, tensors: Any) -> None:
    for name in [n for n in tensors if ".layers.1." in n]:
        tensors[name.replace("model.model.", "model.other.")] = tensors.pop(name)


WRONG: dict[str, Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]] = {
    "prefix": _prefix,
    "no B": lambda config, tensors: tensors.pop(f"{LAYER}.q_proj.lora_B.weight"),
    "no A": lambda config, tensors: tensors.pop(f"{LAYER}.k_proj.lora_A.weight"),
    "rows": lambda config, tensors: tensors.update({f"{LAYER}.k_proj.lora_B.weight": torch.zeros(128, 4)}),
    "columns": lambda config, tensors: tensors.update({f"{LAYER}.o_proj.lora_A.weight": torch.zeros(4, 64)}),
    "another rank": lambda config, tensors: config.update(r=8),
    "flat": lambda config, tensors: tensors.update({f"{LAYER}.o_proj.lora_A.weight": torch.zeros(4)}),
    "fused": lambda config, tensors: tensors.update({f"{LAYER}.qkv_proj.lora_A.weight": torch.zeros(4, 128)}),
    "base tensor": lambda config, tensors: tensors.update({"base_model.model.lm_head.weight": torch.zeros(512, 128)}),
    "empty": lambda config, tensors: tensors.clear(),
    "bias": lambda config, tensors: config.update(bias="lora_only"),
    "saved": lambda config, tensors: config.update(modules_to_save=["lm_head"]),
    "kind": lambda config, tensors: config.update(peft_type="IA3"),
}


class Rollout:
    """One engine, in whichever process model, and its adapters."""

    def __init__(self, root: Path, adapters: Path, **more: Any) -> None:
        self.adapters = adapters
        self.expected = json.loads((adapters / "expected.json").read_text())
        self.arguments = {
            "model": str(root / "llama-0"),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 32,
            "kv_cache_memory_bytes": 64 << 20,
            "worker_extension_cls": "adapter_probes.Extension",
            "enable_lora": True,
            "max_lora_rank": 8,
            "max_loras": 3,
            "max_cpu_loras": 4,
            **more,
        }

    def start(self) -> Rollout:
        from vllm import LLM

        self.llm = LLM(**self.arguments)
        self.engine: Any = adapt(self.llm)
        return self

    def rpc(self, method: str, *args: Any) -> Any:
        answers = self.llm.collective_rpc(method, args=args)
        assert all(a == answers[0] for a in answers), answers
        return answers[0]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        now(self.engine.pause("wait", Deadline.after(20)))
        yield
        now(self.engine.learn_adapters(timeout_s=20))
        now(self.engine.resume())

    def put(self, name: str, version: int, adapter: str) -> Any:
        with self.paused():
            return self.rpc("put", name, version, str(self.adapters / adapter), self.engine.next_adapter_number())

    def generate(self, *requests: Any, prompts: list[str] = PROMPTS) -> dict[str, Any]:
        """All prompts, with each of these adapters (``None``: none is named) in one batch; which of the expected
        answers they are, and how many tokens came from the prefix cache."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=models.NEW_TOKENS, min_tokens=models.NEW_TOKENS)
        each = requests or (None,)
        outputs = self.llm.generate(
            [p for _ in each for p in prompts], params, lora_request=[r for r in each for _ in prompts], use_tqdm=False
        )
        made = [list(o.outputs[0].token_ids) for o in outputs]
        groups = [made[i : i + len(prompts)] for i in range(0, len(made), len(prompts))]
        return {"are": [self.named(g) for g in groups], "cached": sum(o.num_cached_tokens or 0 for o in outputs)}

    def named(self, tokens: list[list[int]]) -> str | None:
        return next((name for name, made in self.expected.items() if made == tokens), None)


def now(coroutine: Any) -> Any:
    """Advance a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it suspended")


def error_of(action: Callable[[], Any]) -> list[str]:
    try:
        action()
    except TwinkleRayError as error:
        return [type(error).__name__, str(error)]
    return []


def flow(root: Path, adapters: Path) -> dict[str, Any]:
    """An ``LLM``, in this process or with a child: five updates, then several names side by side."""
    rollout = Rollout(root, adapters).start()
    engine, put, generate = rollout.engine, rollout.put, rollout.generate
    facts: dict[str, Any] = {
        "kind": engine.kind,
        "lora_facts": engine.lora_facts(),
        "distinct": len({str(t) for t in rollout.expected.values()}),
        "base": generate(),
        "base again": generate(),
        "updates": [],
        "unknown default": error_of(lambda: engine.set_default_adapter("a")),
    }
    for k in range(1, UPDATES + 1):
        put("a", k, f"a{k}")
        if k == 1:
            engine.set_default_adapter("a")
            first = engine.lora_request("a")
        facts["updates"].append(
            {
                "first": generate(),
                "second": generate(),
                "held": now(engine.learn_adapters(timeout_s=20)),
                "ids": rollout.rpc("seen")[0],
                "memory": rollout.rpc("memory", "a"),
            }
        )
    facts["older request"] = generate(first)
    engine.set_default_adapter(None)
    facts["no default"] = generate()

    put("b", 7, "b1")
    now(engine.attach_adapter("c", str(adapters / "c"), timeout_s=20))
    a, b, c = (engine.lora_request(name) for name in "abc")
    facts["side by side"] = generate(a, None, b, c)
    put("b", 8, "b2")
    facts["after b"] = generate(a, None, b, c)
    facts["held"] = now(engine.learn_adapters(timeout_s=20))
    facts["restarted"] = put("a", 1, "a1"), generate(a)  # an older version, by its number, with blocks in the cache
    put("a", 5, "a5")

    from vllm.lora.request import LoRARequest

    own = [LoRARequest(name, i, str(adapters / name)) for i, name in enumerate(("rslora", "b1"), start=1)]
    facts["own"] = [generate(own[0], None), generate(own[1]), generate(own[0]), generate(a, b, c)]
    facts["own id"] = error_of(lambda: generate(LoRARequest("mine", 1 << 30, str(adapters / "c"))))
    facts["attached nothing"] = error_of(
        lambda: now(engine.attach_adapter("d", str(adapters / "nowhere"), timeout_s=20))
    )
    put("d", 1, "c")
    facts["no room"] = put("e", 1, "c")
    facts["no room for own"] = error_of(lambda: generate(own[0]))
    facts["removed"] = [now(engine.remove_adapter(name, timeout_s=20)) for name in ("d", "d")]
    facts["after no room"] = generate(a, b, c)

    facts["broken"] = {}
    for where in ("slots", "add", "activate"):
        outcomes = []
        for name in ("b", "e"):
            with rollout.paused():
                number = engine.next_adapter_number()
                outcomes.append(rollout.rpc("put_broken", where, name, str(adapters / "b1"), number))
        held = now(engine.learn_adapters(timeout_s=20))
        facts["broken"][where] = {"outcomes": outcomes, "held": held, "are": generate(a, b, c)["are"]}
    facts["wrong"] = {change: rollout.rpc("refuse", str(adapters / "a1"), change) for change in WRONG}
    for name in ("dora", "large"):
        with rollout.paused():
            number = engine.next_adapter_number()
            facts["wrong"][name] = [rollout.rpc("put", "a", 99, str(adapters / name), number), True]
    facts["wrong"]["pissa"] = [
        error_of(lambda: now(engine.attach_adapter("p", str(adapters / "pissa"), timeout_s=20))),
        True,
    ]
    facts["after wrong"] = generate(a, b, c)
    facts["kinds"] = {}
    for name in ("rslora", "patterns", "embeddings"):
        outcome = put("k", 1, name)
        facts["kinds"][name] = [outcome, generate(engine.lora_request("k"))["are"] if outcome is None else None]
    now(engine.remove_adapter("k", timeout_s=20))

    with rollout.paused():
        rollout.rpc("drop_all")
        facts["dropped"] = now(engine.learn_adapters(timeout_s=20))
        facts["restored"] = now(engine.call("adapters.restore", timeout_s=20))
    facts["after restore"] = generate(a, b, c, None)
    engine.set_default_adapter("b")
    facts["removed default"] = [now(engine.remove_adapter("b", timeout_s=20)), generate(), generate(a, c)]
    facts["gone"] = error_of(lambda: generate(b))
    now(engine.remove_adapter("a", timeout_s=20))
    facts["left"] = [now(engine.learn_adapters(timeout_s=20)), len(rollout.rpc("seen")[0])]
    facts["modules"] = now(engine.call("adapters.modules", timeout_s=20))[0]
    engine.detach()
    facts["detached"] = generate()
    return facts


def async_llm(root: Path, adapters: Path) -> dict[str, Any]:
    return asyncio.run(_async_llm(Rollout(root, adapters)))


async def _async_llm(rollout: Rollout) -> dict[str, Any]:
    """An ``AsyncLLM``: the default follows updates, and a request can name another."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**rollout.arguments))
    engine: Any = adapt(llm)
    numbers = iter(range(10_000))

    async def one(prompt: str, request: Any) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=models.NEW_TOKENS, min_tokens=models.NEW_TOKENS)
        async for output in llm.generate(prompt, params, f"request-{next(numbers)}", lora_request=request):
            last = output
        return list(last.outputs[0].token_ids)

    async def generate(request: Any = None) -> str | None:
        return rollout.named(list(await asyncio.gather(*(one(p, request) for p in PROMPTS))))

    async def put(name: str, version: int, adapter: str) -> Any:
        await engine.pause("wait", Deadline.after(20))
        args = (name, version, str(rollout.adapters / adapter), engine.next_adapter_number())
        outcome = await llm.collective_rpc("put", args=args)
        await engine.learn_adapters(timeout_s=20)
        await engine.resume()
        return outcome[0]

    facts: dict[str, Any] = {"kind": engine.kind, "base": await generate(), "updates": []}
    for k in range(1, UPDATES + 1):
        await put("a", k, f"a{k}")
        engine.set_default_adapter("a")
        facts["updates"].append([await generate(), await generate()])
    await engine.attach_adapter("c", str(rollout.adapters / "c"), timeout_s=20)
    facts["named"] = [await generate(engine.lora_request("c")), await generate()]
    try:
        await engine.attach_adapter("d", str(rollout.adapters / "nowhere"), timeout_s=20)
    except TwinkleRayError as error:
        facts["error"] = [type(error).__name__, str(error)]
    engine.set_default_adapter(None)
    facts["no default"] = await generate()
    engine.set_default_adapter("a")
    facts["removed"] = [await engine.remove_adapter("a", timeout_s=20), await generate()]
    facts["held"] = await engine.learn_adapters(timeout_s=20)
    llm.shutdown()
    return facts


def tensor_parallel(root: Path, adapters: Path) -> dict[str, Any]:
    """Two workers, each of which gets whole tensors."""
    rollout = Rollout(root, adapters, tensor_parallel_size=2).start()
    engine = rollout.engine
    facts: dict[str, Any] = {"workers": engine.workers, "base": rollout.generate()["are"], "updates": []}
    for k in range(1, UPDATES + 1):
        rollout.put("a", k, f"a{k}")
        engine.set_default_adapter("a")
        facts["updates"].append(rollout.generate()["are"])
    now(engine.attach_adapter("e", str(adapters / "embeddings"), timeout_s=20))
    facts["side by side"] = rollout.generate(engine.lora_request("e"), None)["are"]
    engine.set_default_adapter(None)
    facts["beside the base"] = rollout.generate(engine.lora_request("e"), None)["are"]
    engine.set_default_adapter("a")
    facts["wrong"] = {change: rollout.rpc("refuse", str(adapters / "a1"), change)[0] for change in WRONG}
    number = engine.next_adapter_number()
    broken = rollout.llm.collective_rpc("put_on_first", args=("a", str(adapters / "b1"), number))
    facts["one of two"] = [broken, error_of(lambda: now(engine.learn_adapters(timeout_s=20)))]
    facts["unusable"] = error_of(rollout.generate)
    rollout.put("a", 1, "a1")
    facts["healed"] = rollout.generate()["are"]
    return facts


def put_on_first(self: Any, name: str, path: str, number: int) -> Any:
    """A sync that reaches only one of two workers."""
    return self.put(name, 99, path, number) if self.rank == 0 else "lost"


Extension.put_on_first = put_on_first  # type: ignore[attr-defined]


def without_lora(root: Path, adapters: Path) -> dict[str, Any]:
    """An engine whose LoRA is off."""
    rollout = Rollout(root, adapters)
    keys = ("enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras")
    rollout.arguments = {k: v for k, v in rollout.arguments.items() if k not in keys}
    rollout.start()
    return {
        "lora_facts": rollout.engine.lora_facts(),
        "put": rollout.rpc("put", "a", 1, str(adapters / "a1"), (1 << 30) + 1),
        "attach": error_of(lambda: now(rollout.engine.attach_adapter("a", str(adapters / "a1"), timeout_s=20))),
        "held": now(rollout.engine.learn_adapters(timeout_s=20)),
        "removed": now(rollout.engine.remove_adapter("a", timeout_s=20)),
        "base": rollout.generate()["are"],
        "arguments": {
            name: lora_arguments(read(str(adapters / name))[0]) for name in ("a1", "b1", "large", "patterns")
        },
        "several": lora_arguments(*(read(str(adapters / name))[0] for name in ("a1", "large")), max_loras=1),
        "stranger": error_of(lambda: Adapters(SimpleNamespace(model_runner=SimpleNamespace())).check({}, {})),
    }


PROBES = {
    "llm": flow,
    "child": flow,
    "async": async_llm,
    "tensor_parallel": tensor_parallel,
    "without_lora": without_lora,
}

if __name__ == "__main__":
    # The class that vLLM makes of it by name in this process must be the one that is in __main__.
    sys.modules["adapter_probes"] = sys.modules["__main__"]
    checkpoints, adapters, *rest = sys.argv[1:]
    if not rest:
        make_adapters(Path(checkpoints), Path(adapters))
    else:
        out, name = rest
        Path(out).write_text(json.dumps(PROBES[name](Path(checkpoints), Path(adapters))))
