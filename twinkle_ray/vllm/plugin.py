"""vLLM's entry point into this package: ``vllm.general_plugins`` in our package metadata.

vLLM calls :func:`register` in each of its processes, before engine arguments are made and before a worker is. It does
nothing unless ``TWINKLE_RAY_ROLLOUT=1``, which a rollout actor sets before the user's code builds an engine; children
inherit it.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

ENABLED = "TWINKLE_RAY_ROLLOUT"
"""Environment variable that makes :func:`register` act, with the value ``1``."""

EXTENSION = "twinkle_ray.vllm.worker.WorkerExtension"

_MARK = "_twinkle_ray_original"
_NZ = "VLLM_ASCEND_ENABLE_NZ"


def register() -> None:
    """Mend the CPU build, have vllm-ascend keep its weights as a checkpoint has them, and make engines carry our worker
    extension. May be called any number of times."""
    if os.environ.get(ENABLED) != "1":
        return
    from twinkle_ray.vllm import cpu

    cpu.keep_linears_plain()
    platform = type(importlib.import_module("vllm.platforms").current_platform)
    ascend = platform.__module__.partition(".")[0] == "vllm_ascend"
    _fill_in(importlib.import_module("vllm.engine.arg_utils").EngineArgs, plain=ascend)


def _fill_in(engine_args: Any, *, plain: bool) -> None:
    """Let ``create_engine_config`` name our extension where the user named none. What he has set stays.

    Args:
        plain: and vllm-ascend's plain layout; otherwise it turns linear weights into FRACTAL_NZ once they are loaded,
            into which nothing can be received. Its documentation has two names for that setting, an environment
            variable and, since its PR 9064, ``additional_config``'s ``weight_nz_mode``.
    """
    original = engine_args.create_engine_config
    if hasattr(original, _MARK):
        return

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.worker_extension_cls:
            self.worker_extension_cls = EXTENSION
        more = self.additional_config or {}
        asked = "weight_nz_mode" in more or (more.get("rl_config") or {}).get("enabled")
        if plain and not asked and os.environ.get(_NZ, "0") == "0":
            os.environ[_NZ] = "0"  # the engine's other processes inherit it
            self.additional_config = {**more, "weight_nz_mode": 0}
        return original(self, *args, **kwargs)

    setattr(create_engine_config, _MARK, original)
    engine_args.create_engine_config = create_engine_config
