"""What our vLLM plugin sets in an engine's arguments, beside stand-ins for vLLM's modules."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from twinkle_ray.vllm import plugin

NZ = "VLLM_ASCEND_ENABLE_NZ"


def arguments(monkeypatch: pytest.MonkeyPatch, package: str, **given: Any) -> Any:
    """An engine's arguments, as vLLM's own method finds them."""

    class EngineArgs(SimpleNamespace):
        worker_extension_cls = ""
        additional_config: Any = {}  # noqa: RUF012  # as vLLM's is where nothing was given

        def create_engine_config(self) -> Any:
            return self.worker_extension_cls, self.additional_config, os.environ.get(NZ)

    platform = type("Platform", (), {"__module__": f"{package}.platform", "is_cpu": lambda self: False})()
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", SimpleNamespace(EngineArgs=EngineArgs))
    monkeypatch.setenv(plugin.ENABLED, "1")
    monkeypatch.setitem(os.environ, NZ, given.pop("variable", ""))
    if not os.environ[NZ]:
        monkeypatch.delenv(NZ)
    plugin.register()
    made = EngineArgs(**given).create_engine_config()
    assert made == EngineArgs(**given).create_engine_config()  # of a second engine in this process
    assert EngineArgs.additional_config == {}  # other engines' too
    return made


def test_an_engine_on_npus_keeps_its_weights_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"refresh": True}
    made = arguments(monkeypatch, "vllm_ascend", additional_config=config)
    assert made == (plugin.EXTENSION, {"refresh": True, "weight_nz_mode": 0}, "0")
    assert config == {"refresh": True}
    assert arguments(monkeypatch, "vllm_ascend", additional_config=None) == (
        plugin.EXTENSION,
        {"weight_nz_mode": 0},
        "0",
    )


@pytest.mark.parametrize("config", [{"weight_nz_mode": 2}, {"rl_config": {"enabled": True}}])
def test_what_the_user_has_set_for_npus_stays(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]) -> None:
    assert arguments(monkeypatch, "vllm_ascend", additional_config=config) == (plugin.EXTENSION, config, None)


def test_a_variable_of_the_users_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arguments(monkeypatch, "vllm_ascend", variable="1") == (plugin.EXTENSION, {}, "1")


def test_engines_elsewhere_are_not_told_of_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arguments(monkeypatch, "vllm", worker_extension_cls="mine") == ("mine", {}, None)
