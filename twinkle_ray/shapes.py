"""Models by their list of shapes, for programs that measure: no weights are downloaded, none mean anything."""

from __future__ import annotations

from typing import Any

import torch

Shapes = dict[str, tuple[int, ...]]

_COMMON = {"max_position_embeddings": 4096, "hidden_act": "silu", "rms_norm_eps": 1e-6, "dtype": "bfloat16"}
MODELS: dict[str, dict[str, Any]] = {
    "0.6b": {  # Qwen3-0.6B
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7b": {  # Qwen2.5-7B
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "30b-a3b": {  # Qwen3-30B-A3B
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}


def config_of(model: str, scale: int) -> dict[str, Any]:
    """A Hugging Face configuration with narrower layers: widths are multiples of 32, heads share key-value heads."""
    config = {**_COMMON, **MODELS[model]}
    for key in ("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size"):
        if key in config:
            config[key] = max(32, config[key] // scale // 32 * 32)
    kv = max(1, config["num_key_value_heads"] // scale)
    config["num_key_value_heads"] = kv
    config["num_attention_heads"] = max(kv, config["num_attention_heads"] // scale // kv * kv)
    if "head_dim" not in config:
        dim = max(32, config["hidden_size"] // config["num_attention_heads"] // 32 * 32)
        config["hidden_size"] = dim * config["num_attention_heads"]
    return config


def shapes_of(config: dict[str, Any]) -> Shapes:
    """The tensors of such a model's checkpoint."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", hidden // heads)
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for name, rows in (("q", heads * dim), ("k", kv * dim), ("v", kv * dim)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, hidden)
            if config["model_type"] == "qwen2":
                shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, heads * dim)
        if config["model_type"] != "qwen2":
            shapes[f"{at}self_attn.q_norm.weight"] = shapes[f"{at}self_attn.k_norm.weight"] = (dim,)
        experts = [f"experts.{e}." for e in range(config.get("num_experts", 0))]
        inter = config["moe_intermediate_size"] if experts else config["intermediate_size"]
        if experts:
            shapes[f"{at}mlp.gate.weight"] = (config["num_experts"], hidden)
        for expert in experts or [""]:
            for part in ("gate", "up"):
                shapes[f"{at}mlp.{expert}{part}_proj.weight"] = (inter, hidden)
            shapes[f"{at}mlp.{expert}down_proj.weight"] = (hidden, inter)
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def lora(rank: int) -> Any:
    """The configuration of such an adapter."""
    import peft

    projections = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]
    return peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=projections, init_lora_weights=False)


class Shaped(torch.nn.Module):
    """Parameters of given shapes in bf16."""

    def __init__(self, shapes: Shapes, device: str) -> None:
        super().__init__()
        for name, shape in shapes.items():
            owner: torch.nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, torch.nn.Module())
                owner = owner._modules[part]  # type: ignore[assignment]
            value = torch.empty(shape, dtype=torch.bfloat16, device=device)
            owner.register_parameter(leaf, torch.nn.Parameter(value, requires_grad=False))
        self.fill(0)

    def adapt(self, rank: int) -> Any:
        """This model under a LoRA adapter of PEFT on every projection, in fp32 as PEFT makes it by default."""
        import peft

        for owner in list(self.modules()):
            for name, child in owner._modules.items():
                if name.endswith("_proj") and child is not None:
                    weight, bias = child._parameters["weight"], child._parameters.get("bias")
                    assert weight is not None
                    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
                    linear._parameters.update(child._parameters)
                    owner._modules[name] = linear
        return peft.get_peft_model(self, lora(rank))

    def fill(self, seed: int) -> None:
        """New contents, made on the device."""
        torch.manual_seed(seed)
        for parameter in self.parameters():
            parameter.normal_(0, 0.02)
