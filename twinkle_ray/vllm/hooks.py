"""What this package uses of vLLM, by name, so that it can be asked of an installation before an engine is made."""

from __future__ import annotations

import importlib
from functools import reduce

HOOKS = (
    "vllm.config:set_current_vllm_config",
    "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    "vllm.entrypoints.llm:LLM.collective_rpc",
    "vllm.entrypoints.llm:LLM.generate",
    "vllm.entrypoints.llm:LLM.sleep",
    "vllm.entrypoints.llm:LLM.wake_up",
    "vllm.lora.peft_helper:PEFTHelper.from_dict",
    "vllm.lora.request:LoRARequest",
    "vllm.lora.utils:is_base_embedding_weights",
    "vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_reload",
    "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info",
    "vllm.model_executor.model_loader.reload.layerwise:initialize_layerwise_reload",
    "vllm.model_executor.model_loader.reload.meta:restore_layer_on_meta",
    "vllm.platforms:current_platform",
    "vllm.v1.engine:EngineCoreOutput",
    "vllm.v1.engine:FinishReason.ABORT",
    "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc",
    "vllm.v1.engine.async_llm:AsyncLLM.pause_generation",
    "vllm.v1.engine.async_llm:AsyncLLM.reset_prefix_cache",
    "vllm.v1.engine.async_llm:AsyncLLM.resume_generation",
    "vllm.v1.engine.async_llm:AsyncLLM.sleep",
    "vllm.v1.engine.async_llm:AsyncLLM.wake_up",
    "vllm.v1.engine.llm_engine:LLMEngine.abort_request",
    "vllm.v1.engine.llm_engine:LLMEngine.collective_rpc",
    "vllm.v1.engine.llm_engine:LLMEngine.reset_prefix_cache",
    "vllm.v1.engine.llm_engine:LLMEngine.sleep",
    "vllm.v1.engine.llm_engine:LLMEngine.wake_up",
)
"""``module:attribute`` of what no sync, proof or adapter works without."""


def lacking() -> tuple[str, ...]:
    """The hooks that the installed vLLM has not, in the order of :data:`HOOKS`.

    Imports vLLM, which takes seconds and, in its CPU build, replaces parts of torch in this process.
    """
    return tuple(hook for hook in HOOKS if not _there(hook))


def _there(hook: str) -> bool:
    module, _, path = hook.partition(":")
    try:
        reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return False
    return True
