"""A two-layer Llama and a byte-level tokenizer, made on the spot: the examples download nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging


def make_checkpoint(seed: int) -> dict[str, bytes]:
    """Return a Hugging Face checkpoint with random weights: file name -> content, 1.5 MB in all.

    It is handed to the actors as an object, so that they may run on any node of the cluster.
    """
    logging.disable_progress_bar()
    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, and four special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    vocab = {token: index for index, token in enumerate([*alphabet, *special])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
