"""What an encoder has made of images is dropped where there can be any, and nobody is asked where there cannot."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from twinkle_ray.vllm.engine import AsyncEngine, LLMEngine

TEXT = {"runner_type": "generate", "is_multimodal_model": False, "is_encoder_decoder": False}


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        (TEXT, ["prefix"]),
        ({**TEXT, "is_multimodal_model": True}, ["prefix", "encoder"]),
        ({**TEXT, "is_encoder_decoder": True}, ["prefix", "encoder"]),
        ({**TEXT, "runner_type": "pooling"}, ["prefix", "encoder"]),
        ({"runner_type": "generate"}, ["prefix", "encoder"]),  # another vLLM, which does not say
    ],
)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_encoders_cache_is_reset_unless_there_is_none(kind: str, model: dict[str, Any], asked: list[str]) -> None:
    heard: list[str] = []

    def reset(what: str) -> Any:
        async def later() -> bool:
            heard.append(what)
            return True

        return later if kind == "async" else lambda: heard.append(what) or True

    vllm = SimpleNamespace(reset_prefix_cache=reset("prefix"), reset_encoder_cache=reset("encoder"))
    made: Any = SimpleNamespace(
        _vllm_config=SimpleNamespace(model_config=SimpleNamespace(**model)),
        _engine=vllm,
        _llm=vllm,
        _ask=lambda what, timeout_s, call: call(),
        door=SimpleNamespace(used=True, idle=True),
    )
    asyncio.run((AsyncEngine if kind == "async" else LLMEngine).drop_caches(made))
    assert heard == asked
