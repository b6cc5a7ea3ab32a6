"""What the pages of all packed formats have in common: alignment, places, and what may be packed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvfold.codec.windows import Windows

PAGE_ALIGN_BYTES = 16  # lets a kernel use wide loads
# One 8-byte entry per page in the block table: the page's place, and whether it is packed or raw.
TABLE_ENTRY_BYTES = 8


def check_patterns(patterns: NDArray[np.uint16], block_tokens: int, channel_multiple: int) -> None:
    """Raises ValueError unless the patterns are ``uint16 [kv_head, token, head_dim]`` that can be packed."""
    if patterns.dtype != np.uint16 or patterns.ndim != 3:
        raise ValueError(
            f"patterns must be uint16 [kv_head, token, head_dim], got {patterns.dtype} {list(patterns.shape)}"
        )
    kv_heads, tokens, head_dim = patterns.shape
    check_sizes((kv_heads, tokens, head_dim), block_tokens, channel_multiple)


def check_sizes(shape: tuple[int, int, int], block_tokens: int, channel_multiple: int) -> None:
    """Raises ValueError unless a format can have packed ``[kv_head, token, head_dim]`` in such blocks."""
    if shape[0] < 1 or shape[2] < 1:
        raise ValueError(f"patterns must have at least one head and one channel, got {list(shape)}")
    if shape[2] % channel_multiple:
        raise ValueError(f"head_dim must be a multiple of {channel_multiple}, got {shape[2]}")
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")


def check_windows(windows: Windows | None, shape: tuple[int, int, int]) -> Windows:
    """The windows, which must be of these heads and channels; ValueError otherwise."""
    if windows is None:
        raise ValueError("windows are needed to code exponents, got None")
    expected = (shape[0], shape[2])
    if windows.narrow_base.shape != expected:
        raise ValueError(f"windows must have shape {list(expected)}, got {list(windows.narrow_base.shape)}")
    return windows


def aligned(size_bytes: int) -> int:
    """The next multiple of a page's alignment."""
    return size_bytes + -size_bytes % PAGE_ALIGN_BYTES


def page_places(page_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """``page_starts`` of aligned pages one after another; ValueError for a page of 4 GiB or more."""
    if page_bytes.max(initial=0) > 0xFFFFFFFF:
        raise ValueError(f"a page must be smaller than 4 GiB, got {int(page_bytes.max())} bytes")
    whole = page_bytes + -page_bytes % PAGE_ALIGN_BYTES
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(whole)])
