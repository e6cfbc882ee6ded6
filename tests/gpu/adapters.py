"""LoRA adapters against the names and the arithmetic of a vLLM on a GPU: one GPU is enough, run by hand.

    python tests/gpu/adapters.py                 # needs a GPU, Ray, vLLM, peft
    python tests/gpu/adapters.py --device cpu    # the same steps on a CPU

A trainer on the CPU holds a small model under PEFT; the rollout is a live vLLM with LoRA, on the GPU if there is one.
An untied Llama, a tied Qwen3, and a Llama whose head is trained whole (``modules_to_save``). Prints one JSON line per
step, and exits non-zero on a failure. The oracles:

- an adapter alone: tokens are those that this engine gives for the directory which PEFT's ``save_pretrained`` wrote,
  by vLLM's own loader. The scale is a power of two, so that both round alike;
- merged, and the plain base: what is read back from the engine has, tensor by tensor, the SHA-256 of what PEFT's own
  merge of a float32 copy makes, rounded once, or of the checkpoint.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.gpu.common import PROMPTS, EngineRollout, attempt, cluster, get, killed, make, say, verdict
from tests.vllm import models
from twinkle_ray import CheckpointEngineManager
from twinkle_ray.mixins import TrainActorMixin

CONFIG: dict[str, Any] = {
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
MODELS = {"llama": ("llama", False), "qwen3": ("qwen3", False), "head": ("llama", True)}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 64}


def hashes(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(value.contiguous().view(torch.uint8).reshape(-1).numpy().tobytes()).hexdigest()
        for name, value in tensors.items()
    }


class AdaptedTrainer(TrainActorMixin):
    def start(self, folder: str, head: bool) -> None:
        import peft
        import transformers

        base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        more = {"modules_to_save": ["lm_head"]} if head else {}
        self.model = peft.get_peft_model(base, peft.LoraConfig(**CONFIG, **more))
        self.step(0)

    def step(self, seed: int) -> None:
        """Other values for all that is trained."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                if "lora_A" in name:
                    value.copy_(torch.randn_like(value) / value.shape[0] ** 0.5)
                elif "lora_B" in name or "modules_to_save" in name:
                    value.copy_(0.05 * torch.randn_like(value))

    def save(self, folder: str) -> None:
        self.model.save_pretrained(folder)

    def merged(self) -> dict[str, str]:
        """By PEFT, in float32, of a copy."""
        import copy

        whole = copy.deepcopy(self.model).float().merge_and_unload()
        return hashes({name: value.to(torch.bfloat16) for name, value in whole.state_dict().items()})

    def frozen(self, folder: str) -> dict[str, str]:
        """Of the checkpoint's file."""
        return hashes(models.tensors(Path(folder)))


class Rollout(EngineRollout):
    def write(self, folder: str, kind: str) -> None:
        models.make(Path(folder), kind, 0, torch.bfloat16, **SIZES)

    def tokens(self, number: int = 0, folder: str = "") -> list[list[int]]:
        """With whatever serves by default, or with an adapter of a directory, by vLLM itself."""
        import vllm
        from vllm.lora.request import LoRARequest

        sampling = vllm.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        own = LoRARequest(f"directory {number}", number, folder) if number else None
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False, lora_request=own)
        return [list(output.outputs[0].token_ids) for output in outputs]


def check(options: argparse.Namespace, kind: str, head: bool, root: Path) -> None:
    folder = str(root / f"{kind}-{head}")
    trainer = make(AdaptedTrainer, options, gpus=0)
    rollout = make(Rollout, options, options.device, gpus=0.5)
    with killed(trainer, rollout):
        get(rollout.write.remote(folder, kind), 120)
        arguments = Rollout.lora_arguments(CONFIG, CONFIG)
        version = get(rollout.start.remote(folder, **arguments), 240)
        get(trainer.start.remote(folder, head), 120)
        frozen = get(trainer.frozen.remote(folder))
        asked = 0
        with CheckpointEngineManager([trainer], [rollout], timeout_s=60) as manager:
            # With a head that is trained whole the adapter alone would not be all of it, and is refused.
            for step, letter in enumerate("T" if head else "FFTF"):
                get(trainer.step.remote(step + 1))
                report = manager.sync_weights(letter == "T")
                held = get(rollout.weights_digest.remote(), 120)
                if letter == "T":
                    assert held == {name: get(trainer.merged.remote())[name] for name in held}
                    same_as_directory = None
                else:
                    assert held == {name: frozen[name] for name in held}
                    adapter = str(root / f"{kind}-{head}-{step}")
                    get(trainer.save.remote(adapter))
                    asked += 1
                    same_as_directory = get(rollout.tokens.remote()) == get(rollout.tokens.remote(asked, adapter))
                    assert same_as_directory
                say(
                    "adapters",
                    model=kind,
                    head=head,
                    vllm=version,
                    sync=letter,
                    mode=report.mode,
                    tensors=report.tensors,
                    base=report.base,
                    read_back_equal=len(held),
                    tokens_as_from_directory=same_as_directory,
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    with cluster(options), tempfile.TemporaryDirectory() as root:
        for kind, head in (MODELS[name] for name in options.only):
            attempt("adapters", functools.partial(check, options, kind, head, Path(root)), 300, model=kind, head=head)
    return verdict()


if __name__ == "__main__":
    sys.exit(main())
