"""The format `bf16`: patterns as they are, little-endian, ``[kv_head, block_token, head_dim]`` per page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvfold.codec.errors import CorruptDataError
from kvfold.codec.packed import Packed, join_blocks, split_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvfold.codec.windows import Windows

# A pool of equal raw pages is what every saving is measured against, so its own table is not counted.
TABLE_ENTRY_BYTES = 0


def encode(patterns: NDArray[np.uint16], windows: Windows | None, block_tokens: int) -> Packed:
    """Cut patterns ``uint16 [kv_head, token, head_dim]`` into raw pages; windows are not used."""
    blocks, tail = split_blocks(patterns, block_tokens)
    page_bytes = 2 * patterns.shape[0] * block_tokens * patterns.shape[2]
    return Packed(
        shape=patterns.shape,
        block_tokens=block_tokens,
        pages=np.frombuffer(blocks.astype("<u2").tobytes(), np.uint8),
        page_starts=np.arange(len(blocks) + 1, dtype=np.int64) * page_bytes,
        tail=tail,
    )


def decode(packed: Packed) -> NDArray[np.uint16]:
    """Patterns ``uint16 [kv_head, token, head_dim]``; CorruptDataError when bytes and pages do not match."""
    expected_bytes = 2 * packed.page_count * packed.page_elements
    if len(packed.pages) != expected_bytes:
        raise CorruptDataError(f"pages must hold {expected_bytes} bytes, got {len(packed.pages)}")
    kv_heads, _, head_dim = packed.shape
    blocks = packed.pages.view("<u2").astype(np.uint16)
    return join_blocks(blocks.reshape(-1, kv_heads, packed.block_tokens, head_dim), packed.tail)


def mode_counts(packed: Packed) -> dict[str, int]:
    """Raw pages have no modes."""
    return {}


def count_exceptions(patterns: NDArray[np.uint16], packed: Packed) -> int:
    """Nothing is an exception where nothing is coded."""
    return 0
