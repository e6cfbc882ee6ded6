"""Actors for ``test_sync.py``: trainers that hold Hugging Face models, rollouts that hold live vLLM engines.

Both libraries are imported in the actors only. Tokens of one request come back as an :class:`Answer`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.actors import at_launch, no_power
from twinkle_ray.mixins import RolloutActorMixin, TrainActorMixin

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 32 << 20,
}
BLOCK = 128
"""Tokens of one block of the prefix cache in vLLM's CPU build."""


def environment(*, child: bool) -> dict[str, Any]:
    """``runtime_env`` of a rollout whose engine core runs in the actor, or in a child process."""
    return {
        "env_vars": {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if child else "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled here, and its import takes 12 seconds
        }
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one request. ``cached``: tokens of its prompt found in the prefix cache; ``ended``: wall clock;
    ``version``: of the weights, as the output carries it."""

    tokens: list[int]
    reason: str | None
    cached: int
    ended: float
    version: int | None = None


def answer(output: Any) -> Answer:
    completion = output.outputs[0]
    return Answer(
        tokens=list(completion.token_ids),
        reason=completion.finish_reason,
        cached=output.num_cached_tokens or 0,
        ended=time.time(),
        version=getattr(output, "weights_version", None),
    )


def params(new_tokens: int) -> Any:
    from vllm import SamplingParams

    # As in Hugging Face's generate, the token that would end it is barred (ignore_eos would let it come).
    return SamplingParams(temperature=0, max_tokens=new_tokens, min_tokens=new_tokens)


def written(processor: Any) -> list[int]:
    """How many tokens each running request of an engine has so far."""
    return [state.detokenizer.num_output_tokens() for state in list(processor.request_states.values())]


class Trainer(TrainActorMixin):
    """Holds a Hugging Face model in ``self.model``."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model: Any = None
        self.sends = 0

    def load(self, checkpoint: Path) -> None:
        """Take over a checkpoint's weights, in place where the architecture stays."""
        import transformers

        loaded = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        if type(loaded) is type(self.model):
            self.model.load_state_dict(loaded.state_dict())
        else:
            self.model = loaded
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)

    def greedy(self, prompts: list[str], new_tokens: int, begun: list[list[int]] | None = None) -> list[list[int]]:
        """``transformers``' own ``generate`` with the present weights: so many tokens, the ``begun`` ones included."""
        found = []
        for prompt, first in zip(prompts, begun or [[]] * len(prompts), strict=True):
            ids = torch.tensor([self.tokenizer(prompt)["input_ids"] + first])
            count = new_tokens - len(first)
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count
            )
            found.append(first + out[0, ids.shape[1] :].tolist())
        return found

    def send_checkpoint_weights(self, *args: Any, **kwargs: Any) -> Any:
        answer = super().send_checkpoint_weights(*args, **kwargs)
        self.sends += 1
        return answer

    def counts(self) -> dict[str, int]:
        """Bytes that its group on this device has moved, by how."""
        training = next(value for value in vars(self).values() if type(value).__name__ == "Training")
        found = training.endpoint.group.counts
        return {name: getattr(found, name) for name in type(found).__slots__}

    def fail_at_launch(self, number: int) -> None:
        at_launch(number, no_power)

    def sent(self) -> int:
        """How often weights were sent, to the last byte."""
        return self.sends

    def join(self, rank: int, port: int) -> None:
        """Make this process's default group, of two trainers."""
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    def total(self) -> float:
        """The sum of rank + 1 over that group."""
        import torch.distributed as dist

        value = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(value)
        return value.item()


class ShardedTrainer(Trainer):
    """One of two ranks that shard a Hugging Face model with FSDP2."""

    def load(self, checkpoint: Path) -> None:
        import transformers
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        self.model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


class AdaptedTrainer(Trainer):
    """Holds a Hugging Face model under LoRA adapters of PEFT."""

    def adapt(self, checkpoint: Path, **adapters: dict[str, Any]) -> None:
        """Make it anew, with these adapters by name. The first one is active, and all of them do something."""
        import peft

        self.model = None
        self.load(checkpoint)
        for name, config in adapters.items():
            if isinstance(self.model, peft.PeftModel):
                self.model.add_adapter(name, peft.LoraConfig(**config))
            else:
                self.model = peft.get_peft_model(self.model, peft.LoraConfig(**config), adapter_name=name)
        self.model.eval()
        self.move(1, *adapters)

    def move(self, seed: int, *names: str) -> None:
        """Give adapters other values."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for key, value in self.model.named_parameters():
                if any(f".{name}." in f"{key}." for name in names):
                    if "lora_A" in key or "lora_embedding_A" in key:
                        value.copy_(torch.randn_like(value) / value.shape[0] ** 0.5)
                    elif "lora_B" in key or "lora_embedding_B" in key:
                        value.copy_(0.08 * torch.randn_like(value))

    def greedy_of(self, adapter: str | None, prompts: list[str], new_tokens: int) -> list[list[int]]:
        """What PEFT's own forward pass generates with an adapter; ``None``: with the frozen base."""
        if adapter is None:
            with self.model.disable_adapter():
                return self.greedy(prompts, new_tokens)
        active = self.model.active_adapter
        self.model.set_adapter(adapter)
        found = self.greedy(prompts, new_tokens)
        self.model.set_adapter(active)
        return found

    def save(self, folder: Path, adapter: str) -> None:
        self.model.save_pretrained(folder, selected_adapters=[adapter])

    def change_base(self) -> None:
        """A step on the weights that no adapter touches."""
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                if "norm" in name:
                    value.mul_(1.5)


class OddTrainer(Trainer):
    """Sends the model's state dict by a function of its own, in which something may be wrong.

    Attributes:
        raise_at: while sending, raise before the tensor of this number.
        changes: replaces tensors by name; ``None`` drops one, a new name adds one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_faults()

    def set_faults(self, raise_at: int | None = None, changes: dict[str, torch.Tensor | None] | None = None) -> None:
        self.raise_at = raise_at
        self.changes = changes or {}

    def send_checkpoint_weights(self, *args: Any, **kwargs: Any) -> Any:
        self.walks = 0
        try:
            return super().send_checkpoint_weights(*args, **kwargs)
        finally:
            self.walks = -1_000_000

    walks = -1_000_000

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        # The first walk of a send compares the manifest, the second one sends.
        self.walks += 1
        sending = self.walks == 2
        tensors = {**self.model.state_dict(), **self.changes}
        for index, (name, tensor) in enumerate(tensors.items()):
            if sending and index == self.raise_at:
                time.sleep(0.5)  # what went before it is not only on its way, but loaded
                raise KeyError(f"tensor {index} is not there")
            if tensor is not None:
                yield name, tensor


class Rollout(RolloutActorMixin):
    """Holds a ``vllm.LLM``."""

    def __init__(self, checkpoint: Path | None = None, **engine: Any) -> None:
        self.llm: Any = None
        if checkpoint is not None:
            self.make(checkpoint, **engine)

    def make(self, checkpoint: Path, **engine: Any) -> None:
        """Make the engine, anew if there is one."""
        from vllm import LLM

        self.llm = LLM(model=str(checkpoint), **ENGINE, **engine)

    def pid(self) -> int:
        return os.getpid()

    def generate(self, prompts: list[str], new_tokens: int, adapter: str | None = None) -> list[Answer]:
        how = {} if adapter is None else {"lora_request": self.lora_request(adapter)}
        return [answer(o) for o in self.llm.generate(prompts, params(new_tokens), use_tqdm=False, **how)]

    def loras(self) -> int:
        """How many adapters vLLM itself says it has."""
        return len(self.llm.llm_engine.list_loras())

    def fail_to_register(self) -> None:
        """Once, within vLLM, in this process."""
        from vllm.lora.model_manager import LoRAModelManager

        usual = LoRAModelManager.activate_adapter

        def failing(*args: Any, **kwargs: Any) -> Any:
            LoRAModelManager.activate_adapter = usual
            raise RuntimeError("no more memory")

        LoRAModelManager.activate_adapter = failing

    def written(self) -> list[int]:
        return written(self.llm.llm_engine.output_processor)

    def hashed(self) -> tuple[int, int]:
        """Blocks of the KV cache that carry a prefix's hash, and all of them, of an engine core in this process."""
        blocks = self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.blocks
        return sum(block.block_hash is not None for block in blocks), len(blocks)

    def fail_in_last_worker(self) -> None:
        """:meth:`fail_to_register` in the last one of several workers, which are processes of their own."""

        def fail(worker: Any) -> None:
            from vllm.lora.model_manager import LoRAModelManager

            usual = LoRAModelManager.activate_adapter

            def failing(*args: Any, **kwargs: Any) -> Any:
                LoRAModelManager.activate_adapter = usual
                raise RuntimeError("no more memory")

            if worker.rank == 1:
                LoRAModelManager.activate_adapter = failing

        self.llm.llm_engine.collective_rpc(fail)

    def fall_asleep(self, level: int = 1) -> None:
        self.llm.sleep(level=level)

    def get_up(self) -> None:
        self.llm.wake_up()


class AsyncRollout(RolloutActorMixin):
    """Holds a ``vllm.AsyncLLM``; its coroutines make it an async actor."""

    def __init__(self, checkpoint: Path, **engine: Any) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.numbers = itertools.count()
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(checkpoint), **ENGINE, **engine))

    async def loras(self) -> int:
        return len(await self.llm.list_loras())

    async def generate(self, prompts: list[str], new_tokens: int, adapter: str | None = None) -> list[Answer]:
        how = {} if adapter is None else {"lora_request": self.lora_request(adapter)}

        async def one(prompt: str) -> Answer:
            name = f"request-{next(self.numbers)}"
            async for output in self.llm.generate(prompt, params(new_tokens), name, **how):
                last = output
            return answer(last)

        return list(await asyncio.gather(*map(one, prompts)))

    async def written(self) -> list[int]:
        return written(self.llm.output_processor)

    async def fall_asleep(self, level: int = 1) -> None:
        await self.llm.sleep(level=level)

    async def get_up(self) -> None:
        await self.llm.wake_up()
