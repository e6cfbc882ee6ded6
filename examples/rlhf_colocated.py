"""Trainer and vLLM on one device, which they use in turn: generate, sleep, train, sync, wake.

    ray job submit --working-dir . -- python examples/rlhf_colocated.py

While the trainer takes a step the engine sleeps: its weights are in host memory and its KV cache is gone. Then
``sync_and_wake`` wakes the weights, overwrites them with the trainer's, and gives the KV cache its memory back last,
after the trainer's model has left the device if ``--offload`` asks for that. vLLM's CPU build has no sleep mode:
without a GPU the engine stays awake (``sleep_level=0``), and all else is the same.

The reward is the share of digits among the generated characters; the trainer learns the best of each prompt's samples
by heart. The model and its tokenizer are made on the spot (``tiny.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import ray
import torch
from tiny import make_checkpoint
from transformers import AutoModelForCausalLM

from twinkle_ray import CheckpointEngineManager, Placement
from twinkle_ray.mixins import RolloutActorMixin, TrainActorMixin

PROMPTS = [f"say {number}:" for number in range(10, 18)]
SAMPLES = 16  # of each prompt, of which the best QUARTER are learned
QUARTER = SAMPLES // 4
NEW_TOKENS = 16
START_TIMEOUT_S = 300.0
STEP_TIMEOUT_S = 120.0
ACTOR_ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the actor's own process
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@contextlib.contextmanager
def unpacked(checkpoint: dict[str, bytes]) -> Iterator[str]:
    """Lay the files of a checkpoint into a folder for as long as the block lasts."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in checkpoint.items():
            Path(folder, name).write_bytes(content)
        yield folder


@ray.remote
class Trainer(TrainActorMixin):
    """Holds the policy in ``self.model``. The mixin moves it off the device and back; the optimizer's state, which is
    ours, stays where it is."""

    def __init__(self, checkpoint: dict[str, bytes], device: str) -> None:
        with unpacked(checkpoint) as folder:
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.0)

    def step(self, samples: list[list[int]]) -> float:
        """Learn token sequences of one length; the loss before that."""
        tokens = torch.tensor(samples, device=self.model.device)
        logits = self.model(tokens[:, :-1]).logits[:, -NEW_TOKENS:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, -NEW_TOKENS:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def device_memory(self) -> int:
        """Bytes of the device that are used, by whomever."""
        if self.model.device.type != "cuda" and not torch.cuda.is_available():
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free


@ray.remote
class Rollout(RolloutActorMixin):
    """Holds a live engine in ``self.llm``, made to sleep where vLLM can."""

    def __init__(self, checkpoint: dict[str, bytes], device: str, seed: int) -> None:
        import vllm  # only here: its CPU build patches torch in every process that imports it

        sleeps = {"enable_sleep_mode": True, "gpu_memory_utilization": 0.3} if device == "cuda" else {}
        with unpacked(checkpoint) as folder:
            self.llm = vllm.LLM(
                folder,
                dtype="float32",
                seed=seed,
                enforce_eager=True,
                max_model_len=64,
                max_num_seqs=len(PROMPTS) * SAMPLES,
                kv_cache_memory_bytes=64 << 20,
                use_tqdm_on_load=False,
                **sleeps,
            )
        self.sampling = vllm.SamplingParams(n=SAMPLES, temperature=1.0, max_tokens=NEW_TOKENS, ignore_eos=True)

    def generate(self) -> list[list[tuple[float, list[int]]]]:
        """By prompt, its samples: reward and tokens, those of the prompt included."""
        return [
            [(reward(sample.text), [*output.prompt_token_ids, *sample.token_ids]) for sample in output.outputs]
            for output in self.llm.generate(PROMPTS, self.sampling, use_tqdm=False)
        ]


def reward(text: str) -> float:
    """Return the share of digits."""
    return sum(character in "0123456789" for character in text) / NEW_TOKENS


def train(args: argparse.Namespace, place: Placement, figures: list[dict[str, Any]]) -> None:
    """Run the job on the first device of a placement."""
    checkpoint = ray.put(make_checkpoint(args.seed))
    environment = {"runtime_env": {"env_vars": ACTOR_ENV}}
    # The engine first: vLLM measures what is free when it starts.
    rollout = Rollout.options(**place.rollout(0), **environment).remote(checkpoint, args.device, args.seed)
    ray.get(rollout.checkpoint_status.remote(), timeout=START_TIMEOUT_S)
    trainer = Trainer.options(**place.trainer(0), **environment).remote(checkpoint, args.device)
    sleeps = ray.get(rollout.checkpoint_status.remote(), timeout=STEP_TIMEOUT_S).sleep_mode
    if not sleeps:
        print("this engine has no sleep mode: it stays awake while the trainer works", flush=True)
    with CheckpointEngineManager([trainer], [rollout], is_colocated=True, sleep_level=int(sleeps)) as manager:
        print(manager.sync_and_wake())
        for step in range(1, args.steps + 1):
            samples = ray.get(rollout.generate.remote(), timeout=STEP_TIMEOUT_S)
            best = [tokens for group in samples for _, tokens in sorted(group, reverse=True)[:QUARTER]]
            manager.sleep_rollout()
            if args.offload:
                manager.reload_trainers()
            loss = ray.get(trainer.step.remote(best), timeout=STEP_TIMEOUT_S)
            memory = ray.get(trainer.device_memory.remote(), timeout=STEP_TIMEOUT_S)
            report = manager.sync_and_wake(offload=args.offload)
            row = {
                "step": step,
                "reward": fmean(value for group in samples for value, _ in group),
                "loss": loss,
                "version": report.version,
                "sync_seconds": report.seconds,
                "memory_while_training": memory,
            }
            figures.append(row)
            print(json.dumps(row), flush=True)
        manager.verify()
        print("verified: the rollout holds the trainer's weights, bit for bit", flush=True)


def run(args: argparse.Namespace) -> None:
    """Run the whole job, and leave the figures in ``args.out``."""
    out = Path(args.out or tempfile.mkdtemp(prefix="twinkle_ray-colocated-")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    ray.init(log_to_driver=True)
    figures: list[dict[str, Any]] = []
    try:
        # Its end is the end of all actors that are in it.
        with Placement(1, resource="GPU" if args.device == "cuda" else None, cpus=1.0) as place:
            train(args, place, figures)
    finally:
        ray.shutdown()
    (out / "rlhf_colocated.json").write_text(json.dumps({"config": vars(args), "steps": figures}, indent=2) + "\n")
    print(f"reward {figures[0]['reward']:.2f} -> {figures[-1]['reward']:.2f}\nfigures: {out / 'rlhf_colocated.json'}")


def main() -> int:
    """Parse the command line, run, and turn a failure into one sentence and a non-zero code."""
    parser = argparse.ArgumentParser(description="Trainer and vLLM on one device, with twinkle_ray.")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and samples (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: one GPU for both actors")
    parser.add_argument("--offload", action="store_true", help="move the trainer's model to the CPU while vLLM works")
    parser.add_argument("--out", metavar="DIR", help="where the figures go (default: a new temporary folder)")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `ray job stop` sends it; let `finally` run
    try:
        run(args)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        traceback.print_exc()
        print(f"rlhf_colocated failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
