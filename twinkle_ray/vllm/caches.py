"""Dropping vLLM's prefix cache in the time that the cached blocks take, not in that of all blocks.

``BlockPool.reset_prefix_cache`` takes the hash off every block there is: 0.1 ms per 1,000 of them, so 4 to 7 ms where
most of a GPU is cache, during which a small model's sync only waits. A block without a hash has nothing to lose, and
those with one are in the pool's own table. So vLLM's method is run as it is on a pool that shows it no others.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

_MARK = "_twinkle_ray_original"
_POOL = "vllm.v1.core.block_pool"


def shorten_resets() -> None:
    """Let block pools of this process reset only what is cached. Nothing without vLLM's pools, or with others than are
    known here. May be called any number of times."""
    pool = getattr(sys.modules.get(_POOL), "BlockPool", None)
    original = getattr(pool, "reset_prefix_cache", None)
    if pool is None or original is None or hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        blocks, cached = self.blocks, _cached(self)
        if cached is None:
            return original(self, *args, **kwargs)
        self.blocks = cached
        try:
            return original(self, *args, **kwargs)
        finally:
            self.blocks = blocks

    setattr(reset_prefix_cache, _MARK, original)
    pool.reset_prefix_cache = reset_prefix_cache


def _cached(pool: Any) -> list[Any] | None:
    """The blocks that carry a hash; ``None`` if the pool keeps them in a way that is not known here."""
    if getattr(pool, "_reuse_watchers", None):  # it looks for these by their place in the list
        return None
    table = getattr(getattr(pool, "cached_block_hash_to_block", None), "_cache", None)
    if not isinstance(table, dict):
        return None
    kind = type(pool.blocks[0])
    found: list[Any] = []
    for held in table.values():
        if type(held) is kind:
            found.append(held)
        elif isinstance(held, dict):
            found.extend(held.values())
        else:
            return None
    return found
