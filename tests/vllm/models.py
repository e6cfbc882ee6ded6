"""Tiny random checkpoints with a byte-level tokenizer, and what Hugging Face generates with them.

Runs in processes of its own (``python models.py``): pytest's process imports neither transformers nor vLLM.
"""

from __future__ import annotations

from pathlib import Path

import torch

KINDS = ("llama", "qwen3", "qwen3_moe")
SEEDS = (0, 1, 2, 3)
VOCAB = 512
PROMPTS = ["hello there", "the quick brown fox", "12345", "weights travel"]
NEW_TOKENS = 12


def make(path: Path, kind: str, seed: int, dtype: torch.dtype = torch.float32, **other: int) -> Path:
    """Write one checkpoint: ``llama`` (untied), ``qwen2`` (with biases), ``qwen3`` (tied) or ``qwen3_moe``.

    Args:
        other: entries of the configuration, such as ``hidden_size``.
    """
    import transformers

    path.mkdir(parents=True, exist_ok=True)
    special = _tokenizer(path)
    common = dict(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=kind == "qwen3",
        initializer_range=0.08,
        **special,
    )
    if kind == "qwen3_moe":
        common |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    kinds = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "qwen3_moe": transformers.Qwen3MoeConfig,
    }
    config = kinds[kind](**{**common, **other})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        # Norms of exactly one, and biases of zero, would hide that they are loaded.
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif name.endswith(".bias"):
                parameter.copy_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path


ODD = {
    "turned": "model.layers.0.mlp.down_proj.weight",
    "coarse": "model.layers.1.self_attn.o_proj.coarse",
    "fine": "model.layers.1.self_attn.o_proj.fine",
    "short": "model.layers.1.mlp.down_proj.weight",
}
"""Tensors of a checkpoint for ``OddLlamaForCausalLM`` (see ``zoo.py``) that are not as the engine holds them."""
SHORT_BY = 6


def make_odd(path: Path, seed: int) -> list[list[int]]:
    """Write a checkpoint for ``OddLlamaForCausalLM``: a plain Llama with norms of 1 and biases of 0, of whose matrices
    one is transposed, one is the sum of two tensors and one lacks its last columns. What Hugging Face generates with
    the plain one."""
    import safetensors.torch
    import transformers

    plain = path.with_name(path.name + "-plain")
    make(plain, "llama", seed)
    config = transformers.AutoConfig.from_pretrained(plain, attention_bias=True)
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.fill_("norm" in name)
        model.model.layers[1].mlp.down_proj.weight[:, -SHORT_BY:] = 0
    model.save_pretrained(plain)

    path.mkdir()
    _tokenizer(path)
    config.architectures = ["OddLlamaForCausalLM"]
    config.save_pretrained(path)
    held = tensors(plain)
    held[ODD["turned"]] = held[ODD["turned"]].t().contiguous()
    held[ODD["short"]] = held[ODD["short"]][:, :-SHORT_BY].contiguous()
    whole = held.pop("model.layers.1.self_attn.o_proj.weight")
    coarse = whole.bfloat16().float()
    held |= {ODD["coarse"]: coarse, ODD["fine"]: whole - coarse}
    assert torch.equal(coarse + held[ODD["fine"]], whole), "the sum is not exact"
    safetensors.torch.save_file(held, path / "model.safetensors", metadata={"format": "pt"})
    return greedy(plain)


def _tokenizer(path: Path) -> dict[str, int]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for token in ("<s>", "</s>", "<pad>", *(f"<extra{i}>" for i in range(VOCAB - len(vocab) - 3))):
        vocab[token] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(path)
    return {"bos_token_id": vocab["<s>"], "eos_token_id": vocab["</s>"], "pad_token_id": vocab["<pad>"]}


def greedy(path: Path) -> list[list[int]]:
    """The new tokens of each prompt by ``transformers``' own ``generate``."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    result = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**ids, do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
        result.append(out[0, ids["input_ids"].shape[1] :].tolist())
    return result


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, as its file has them."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


if __name__ == "__main__":
    import json
    import sys

    root = Path(sys.argv[1])
    made = {k: {s: greedy(make(root / f"{k}-{s}", k, s)) for s in SEEDS} for k in KINDS}
    made["odd"] = {s: make_odd(root / f"odd-{s}", s) for s in SEEDS}
    (root / "expected.json").write_text(json.dumps(made))
