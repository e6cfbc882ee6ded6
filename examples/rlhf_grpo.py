"""RLHF from start to end: one trainer, two live vLLM rollouts, and a weight sync after every optimizer step.

    ray job submit --working-dir . -- python examples/rlhf_grpo.py

A prompt such as ``digit 42>`` asks for one kind of character; the reward is the fraction of the 16 generated
characters that are of that kind. A random model earns 0.08, one that ignores the prompt a third, and forty steps of
GRPO lead to almost 1. The reward shown is that of the rollouts' own samples: without the sync (``--no-sync``) the
trainer goes on learning, and the reward stays where it was.

The model and its tokenizer are made on the spot (``tiny.py``). ``--device cuda`` gives every actor a GPU of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import random
import signal
import string
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import ray
import torch
from tiny import make_checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM

import twinkle_ray
from twinkle_ray import CheckpointEngineManager
from twinkle_ray.mixins import RolloutActorMixin, TrainActorMixin

KINDS = {"digit": string.digits, "lower": string.ascii_lowercase, "upper": string.ascii_uppercase}
PROMPTS_PER_STEP = 8
GROUP_SIZE = 16  # samples of one prompt; GRPO compares them with each other
NEW_TOKENS = 16
LEARNING_RATE = 3e-3
EDGE = 5  # learning is judged by the mean reward of the first and of the last five steps
# What the examples with LoRA adapt: behind a head that stays random a tiny model learns nothing.
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
START_TIMEOUT_S = 300.0  # importing vLLM and its first look at a new model take a while on a small machine
STEP_TIMEOUT_S = 120.0
ACTOR_ENV = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",  # compiling vLLM's sampler costs 12 s at first, and needs a C++ compiler
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two engines that each bind to the first core would share it
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the actor's own process
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

if __name__ != "__main__":  # imported by another example: actors get this file's code along, and need no path to it
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@contextlib.contextmanager
def unpacked(checkpoint: dict[str, bytes]) -> Iterator[str]:
    """Lay the files of a checkpoint into a folder for as long as the block lasts."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in checkpoint.items():
            Path(folder, name).write_bytes(content)
        yield folder


class Trainer(TrainActorMixin):
    """Holds the policy in ``self.model``, which is all that the mixin asks for."""

    def __init__(self, checkpoint: dict[str, bytes], device: str) -> None:
        with unpacked(checkpoint) as folder:
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def describe(self) -> str:
        """Return the name of the device."""
        device = self.model.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

    def step(self, samples: list[dict[str, Any]], advantages: list[float]) -> tuple[float, float]:
        """Take one policy-gradient step on samples of equal length.

        Returns:
            The loss, and how far the engines' log-probabilities of the sampled tokens were from ours on average:
            next to nothing as long as the rollouts hold the weights that we train.
        """
        tokens = torch.tensor([s["prompt_tokens"] + s["tokens"] for s in samples], device=self.model.device)
        sampled = torch.tensor([s["tokens"] for s in samples], device=self.model.device)
        theirs = torch.tensor([s["logprobs"] for s in samples], device=self.model.device)
        weight = torch.tensor(advantages, device=self.model.device).unsqueeze(1)

        # The logits at a position speak of the next one.
        logits = self.model(tokens[:, :-1]).logits[:, -NEW_TOKENS:]
        logprobs = logits.log_softmax(-1).gather(2, sampled.unsqueeze(2)).squeeze(2)
        loss = -(weight * logprobs).mean()

        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item(), (logprobs.detach() - theirs).abs().mean().item()


class Rollout(RolloutActorMixin):
    """Holds a live engine in ``self.llm``, which is all that the mixin asks for."""

    def __init__(
        self,
        checkpoint: dict[str, bytes],
        device: str,
        seed: int,
        lora: dict[str, Any] | None = None,
        adapters: int = 1,
    ) -> None:
        """``lora``: the configuration of the adapters that it is to serve, at most so many at once."""
        import vllm  # only here: its CPU build patches torch in every process that imports it

        with unpacked(checkpoint) as folder:
            self.llm = vllm.LLM(
                folder,
                dtype="float32" if device == "cpu" else "bfloat16",
                seed=seed,
                enforce_eager=True,
                max_model_len=64,
                max_num_seqs=PROMPTS_PER_STEP * GROUP_SIZE,
                kv_cache_memory_bytes=64 << 20,
                use_tqdm_on_load=False,
                **(self.lora_arguments(lora, max_loras=adapters) if lora else {}),
            )
        self.sampling = vllm.SamplingParams(
            n=GROUP_SIZE, temperature=1.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0
        )

    def describe(self) -> str:
        """Return vLLM's version."""
        import vllm

        return vllm.__version__

    def generate(self, prompts: list[str], adapter: str | None = None) -> list[dict[str, Any]]:
        """Return ``GROUP_SIZE`` samples of each prompt, in the order of the prompts; of the adapter of this name."""
        request = self.lora_request(adapter) if adapter else None
        return [
            {
                "prompt": output.prompt,
                "text": sample.text,
                "prompt_tokens": list(output.prompt_token_ids),
                "tokens": list(sample.token_ids),
                "logprobs": [at[token].logprob for at, token in zip(sample.logprobs, sample.token_ids, strict=True)],
            }
            for output in self.llm.generate(prompts, self.sampling, use_tqdm=False, lora_request=request)
            for sample in output.outputs
        ]


def make_prompts(rng: random.Random) -> list[str]:
    """Return prompts of one length: a kind of character, and a number that says nothing."""
    return [f"{rng.choice(list(KINDS))} {rng.randrange(100):02d}>" for _ in range(PROMPTS_PER_STEP)]


def reward(prompt: str, text: str) -> float:
    """Return the fraction of the generated characters that are of the kind that the prompt asks for."""
    wanted = KINDS[prompt.split()[0]]
    return sum(character in wanted for character in text) / NEW_TOKENS


def group_advantages(rewards: list[float]) -> list[float]:
    """Return every reward relative to its group's: minus the mean, over the standard deviation."""
    groups = torch.tensor(rewards).view(-1, GROUP_SIZE)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten().tolist()


def start_actors(args: argparse.Namespace) -> tuple[Any, list[Any]]:
    """Start the trainer and the rollouts, all from the same random weights, without waiting for them."""
    checkpoint = ray.put(make_checkpoint(args.seed))
    trainer = actor(Trainer, args.device).remote(checkpoint, args.device)
    seeds = (1000 * args.seed + index for index in range(args.rollouts))
    return trainer, [actor(Rollout, args.device).remote(checkpoint, args.device, seed) for seed in seeds]


def actor(kind: type, device: str) -> Any:
    """Return the actor class with what one of them needs."""
    options = {
        "num_cpus": 0.5,  # so that all fit on two cores
        "num_gpus": int(device == "cuda"),
        "runtime_env": {"env_vars": ACTOR_ENV},
    }
    return ray.remote(kind).options(**options)


def describe(trainer: Any, rollouts: list[Any]) -> dict[str, Any]:
    """Wait until all actors are up, and say what they run on."""
    try:
        device, *engines = ray.get([actor.describe.remote() for actor in (trainer, *rollouts)], timeout=START_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError as error:
        raise RuntimeError(
            f"not all {1 + len(rollouts)} actors were ready after {START_TIMEOUT_S:.0f} s; the cluster has "
            f"{ray.cluster_resources()}, of which {ray.available_resources()} are free"
        ) from error
    versions = {module.__name__: str(module.__version__) for module in (twinkle_ray, ray, torch)}
    return {
        "versions": versions | {"vllm": engines[0]},
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count(), "device": device},
    }


def train(
    args: argparse.Namespace, trainer: Any, rollouts: list[Any], manager: CheckpointEngineManager | None
) -> list[dict[str, Any]]:
    """Generate, reward, take a step, sync; again and again. Return the figures of each step."""
    rng = random.Random(args.seed)
    begin = time.perf_counter()
    figures = []
    for step in range(1, args.steps + 1):
        prompts = make_prompts(rng)

        start = time.perf_counter()
        shares = [rollout.generate.remote(prompts[i :: len(rollouts)]) for i, rollout in enumerate(rollouts)]
        samples = [sample for share in ray.get(shares, timeout=STEP_TIMEOUT_S) for sample in share]
        generate_s = time.perf_counter() - start
        rewards = [reward(sample["prompt"], sample["text"]) for sample in samples]

        start = time.perf_counter()
        loss, gap = ray.get(trainer.step.remote(samples, group_advantages(rewards)), timeout=STEP_TIMEOUT_S)
        train_s = time.perf_counter() - start

        report = manager.sync_weights() if manager else None
        figures.append(
            {
                "step": step,
                "reward": fmean(rewards),
                "loss": loss,
                "logprob_gap": gap,
                "generate_seconds": generate_s,
                "train_seconds": train_s,
                "sync_seconds": report.seconds if report else None,
                "sync_nbytes": report.nbytes if report else None,
                "version": report.version if report else None,
            }
        )
        sync = f"sync {1e3 * report.seconds:.1f} ms, version {report.version}" if report else "no sync"
        progress = tqdm.format_meter(
            step, args.steps, time.perf_counter() - begin, ncols=100, postfix=f"reward {fmean(rewards):.2f}, {sync}"
        )
        print(progress, flush=True)  # a line per step, not a bar that redraws itself: job logs are files
    return figures


def draw(figures: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw the reward, and the sync time if there is one, over the steps."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True})
    pyplot.rcParams.update({"axes.grid": True, "grid.alpha": 0.3, "font.size": 9})
    synced = [row for row in figures if row["sync_seconds"] is not None]
    panels = 2 if synced else 1
    figure, axes = pyplot.subplots(
        panels, sharex=True, squeeze=False, figsize=(7, 2 + 1.8 * panels), height_ratios=[5, 3][:panels]
    )
    top, bottom = axes[0, 0], axes[-1, 0]

    top.plot([row["step"] for row in figures], [row["reward"] for row in figures], "o-", color="tab:blue", markersize=3)
    for name, part, anchor in (("first", figures[:EDGE], "left"), ("last", figures[-EDGE:], "right")):
        mean = fmean(row["reward"] for row in part)
        begin, end = part[0]["step"] - 0.4, part[-1]["step"] + 0.4
        top.axvspan(begin, end, color="tab:blue", alpha=0.08, linewidth=0)
        at = begin if anchor == "left" else end
        top.text(at, 1.06, f"{name} {len(part)}: mean {mean:.2f}", ha=anchor, va="bottom", color="tab:blue")
    top.set(ylabel="mean reward of the samples", ylim=(0, 1.05))
    top.set_title(title, fontsize=10, loc="left", pad=20)

    if synced:
        bottom.bar([row["step"] for row in synced], [1e3 * row["sync_seconds"] for row in synced], color="tab:orange")
        bottom.set_ylabel("weight sync [ms]")
    bottom.set_xlabel("optimizer step")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    bottom.set_xlim(0.4, len(figures) + 0.6)
    figure.align_ylabels()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def run(args: argparse.Namespace) -> None:
    """Run the whole job, and leave figures and chart in ``args.out``."""
    begin = time.perf_counter()
    out = Path(args.out or tempfile.mkdtemp(prefix="twinkle_ray-rlhf-")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    ray.init(log_to_driver=True)
    actors: list[Any] = []
    try:
        trainer, rollouts = start_actors(args)
        actors = [trainer, *rollouts]
        about = describe(trainer, rollouts)
        print(f"trainer and {len(rollouts)} rollouts are up after {time.perf_counter() - begin:.1f} s", flush=True)
        with CheckpointEngineManager([trainer], rollouts) if args.sync else contextlib.nullcontext() as manager:
            if manager:
                print(manager.sync_weights())
                manager.verify()  # raises if any tensor differs
                print("verified: the rollouts hold the trainer's weights, bit for bit", flush=True)
            figures = train(args, trainer, rollouts, manager)
            if manager:
                manager.verify()
                print("verified again: the rollouts hold the trainer's weights, bit for bit", flush=True)
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.shutdown()

    first, last = (fmean(row["reward"] for row in part) for part in (figures[:EDGE], figures[-EDGE:]))
    summary = {"reward_first": first, "reward_last": last, "total_seconds": time.perf_counter() - begin}
    (out / "rlhf_grpo.json").write_text(
        json.dumps({"config": vars(args), **about, "summary": summary, "steps": figures}, indent=2) + "\n"
    )
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    how = "synced after every step" if args.sync else "never synced"
    draw(figures, f"GRPO with {args.rollouts} vLLM rollouts, {how}\n{versions}", out / "rlhf_grpo.png")
    print(f"reward {first:.2f} -> {last:.2f} (means of {EDGE} steps) in {summary['total_seconds']:.0f} s")
    print(f"figures: {out / 'rlhf_grpo.json'}\nchart:   {out / 'rlhf_grpo.png'}", flush=True)


def main() -> int:
    """Parse the command line, run, and turn a failure into one sentence and a non-zero code."""
    parser = argparse.ArgumentParser(description="GRPO on a verifiable task with twinkle_ray.")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and samples (default: %(default)s)")
    parser.add_argument("--rollouts", type=int, default=2, help="number of vLLM actors (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: one GPU for each actor")
    parser.add_argument("--no-sync", dest="sync", action="store_false", help="never send weights, for comparison")
    parser.add_argument("--out", metavar="DIR", help="where figures and chart go (default: a new temporary folder)")
    args = parser.parse_args()
    if not 1 <= args.rollouts <= PROMPTS_PER_STEP or args.steps < 1:
        parser.error(f"--steps must be at least 1, --rollouts between 1 and {PROMPTS_PER_STEP}")
    return guarded(functools.partial(run, args))


def guarded(body: Callable[[], None]) -> int:
    """Run the job; return its exit code. A failure is one sentence below the traceback."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `ray job stop` sends it; let `finally` run
    try:
        body()
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        traceback.print_exc()
        print(f"{Path(sys.argv[0]).stem} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def job(doc: str, body: Callable[[argparse.Namespace], dict[str, Any]], *, steps: int, **more: dict[str, Any]) -> int:
    """The command line of the other examples: parse it, run ``body``, write what it returns, end all actors.

    Args:
        doc: the example's docstring.
        body: the job; returns its figures.
        steps: by default.
        more: further options, each with the arguments of ``add_argument``.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and samples (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: one GPU for each actor")
    parser.add_argument("--out", metavar="DIR", help="where figures go (default: a new temporary folder)")
    for name, how in more.items():
        parser.add_argument(f"--{name}", **how)
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be at least 1")

    def whole() -> None:
        out = Path(args.out or tempfile.mkdtemp(prefix="twinkle_ray-rlhf-")).resolve()
        out.mkdir(parents=True, exist_ok=True)
        ray.init(log_to_driver=True)
        try:
            figures = body(args)
        finally:
            ray.shutdown()  # which ends the actors, too
        file = out / f"{Path(sys.argv[0]).stem}.json"
        file.write_text(json.dumps({"config": vars(args), **figures}, indent=2) + "\n")
        print(f"figures: {file}", flush=True)

    return guarded(whole)


if __name__ == "__main__":
    sys.exit(main())
