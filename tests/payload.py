"""The tensor list that every transport must carry bit for bit, and its digests by hashlib."""

from __future__ import annotations

import hashlib

import torch

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def payload(bucket_size: int, seed: int = 0, tiny: int = 5000) -> list[tuple[str, torch.Tensor]]:
    """``(name, tensor)`` pairs: every dtype, odd shapes and strides, one tensor of 3.5 buckets (at most 64 MiB)."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        width = torch.empty(0, dtype=dtype).element_size()
        count = 1
        for n in shape:
            count *= n
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count * width,), generator=generator)
        return raw.to(torch.uint8).view(dtype).reshape(shape)

    pairs = [(f"dtype.{str(dtype)[6:]}", noise(7, 5, dtype=dtype)) for dtype in DTYPES]
    pairs += [
        ("scalar", noise(dtype=torch.float32)),
        ("empty", torch.empty(0, 4)),
        ("transposed", noise(6, 9).t()),
        ("expanded", noise(1, 8).expand(5, 8)),
        ("odd.bf16", noise(3, dtype=torch.bfloat16)),
        ("after.odd.fp32", noise(5)),
        ("large", noise(min(int(3.5 * bucket_size), 64 << 20), dtype=torch.uint8)),
        ("empty.last", torch.empty(3, 0, dtype=torch.bfloat16)),
    ]
    pairs += [(f"tiny.{i}", noise(1 + i % 3, dtype=DTYPES[i % 3])) for i in range(tiny)]
    return pairs


def facts(name: str, tensor: torch.Tensor) -> tuple[str, str, tuple[int, ...], str]:
    """Name, dtype, shape and SHA-256 of the row-major bytes."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)
    return name, str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(raw.numpy().tobytes()).hexdigest()
