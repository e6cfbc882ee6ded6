"""An engine that lacks what a sync needs gets one sentence."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from twinkle_ray.errors import UnsupportedActor
from twinkle_ray.vllm.engine import adapt

HOOKS = ("collective_rpc", "sleep", "wake_up", "reset_prefix_cache")


def engine_with(hooks: tuple[str, ...]) -> SimpleNamespace:
    return SimpleNamespace(**dict.fromkeys(hooks, lambda *_: None))


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Modules that look like an old vLLM's."""
    for name in ("vllm", "vllm.entrypoints.llm", "vllm.v1.engine.async_llm"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm"].__version__ = "0.6.0"  # type: ignore[attr-defined]
    return sys.modules["vllm.entrypoints.llm"]


@pytest.mark.parametrize("lacking", ["engine_core", *HOOKS])
def test_the_first_thing_that_is_not_there_is_named_with_the_least_version(old: ModuleType, lacking: str) -> None:
    class LLM:
        def __init__(self) -> None:
            self.llm_engine = engine_with(tuple(h for h in ("engine_core", *HOOKS) if h != lacking))

    old.LLM = LLM  # type: ignore[attr-defined]
    with pytest.raises(
        UnsupportedActor, match=rf"vLLM \(0\.6\.0\) is too old .* has no {lacking}; install vllm>=0\.25"
    ):
        adapt(LLM())


def test_an_asynchronous_one_too(old: ModuleType) -> None:
    class AsyncLLM:
        collective_rpc = sleep = wake_up = reset_prefix_cache = None

    sys.modules["vllm.v1.engine.async_llm"].AsyncLLM = AsyncLLM  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedActor, match="AsyncLLM has no pause_generation"):
        adapt(AsyncLLM())
