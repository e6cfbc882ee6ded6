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


def register() -> None:
    """Mend the CPU build and make engines carry our worker extension. May be called any number of times."""
    if os.environ.get(ENABLED) != "1":
        return
    from twinkle_ray.vllm import cpu

    cpu.keep_linears_plain()
    _fill_in_extension(importlib.import_module("vllm.engine.arg_utils").EngineArgs)


def _fill_in_extension(engine_args: Any) -> None:
    """Let ``create_engine_config`` name our extension where the user named none. A class that he named stays."""
    original = engine_args.create_engine_config
    if hasattr(original, _MARK):
        return

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.worker_extension_cls:
            self.worker_extension_cls = EXTENSION
        return original(self, *args, **kwargs)

    setattr(create_engine_config, _MARK, original)
    engine_args.create_engine_config = create_engine_config
