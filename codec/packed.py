"""One array of K or V in a format: packed pages, their places, and the raw tail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvfold.codec.errors import CorruptDataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvfold.codec.windows import Windows

Axis = Literal["channel", "token"]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The packed form of patterns ``[kv_head, token, head_dim]``: BF16 (uint16) or FP8 (uint8).

    A page is ``block_tokens`` tokens of all heads. Tokens after the last full block are the tail: they stay
    raw until their block is full, and a full block is packed once.
    """

    shape: tuple[int, int, int]  # kv_heads, tokens, head_dim
    block_tokens: int
    pages: NDArray[np.uint8]  # the pages' bytes, one page after another
    page_starts: NDArray[np.int64]  # [pages + 1], bytes
    tail: NDArray[Any]  # [kv_heads, tokens % block_tokens, head_dim]
    windows: Windows | None = None
    axis: Axis = "channel"  # along which elements are grouped, where the format groups
    scale: float = 1.0  # what a stored FP8 value is multiplied by: one per layer, K or V

    @property
    def page_count(self) -> int:
        return self.shape[1] // self.block_tokens

    @property
    def page_elements(self) -> int:
        return self.shape[0] * self.block_tokens * self.shape[2]

    @property
    def page_bytes(self) -> NDArray[np.int64]:
        """Encoded bytes of each page, all metadata included."""
        return np.diff(self.page_starts)


def packed_from(
    patterns: NDArray[np.uint16],
    block_tokens: int,
    room: NDArray[np.uint8],
    page_starts: NDArray[np.int64],
    windows: Windows | None = None,
    axis: Axis = "channel",
) -> Packed:
    """The pages that an encoder wrote to the start of ``room``; tokens after the last full block stay raw."""
    kv_heads, tokens, head_dim = patterns.shape
    return Packed(
        shape=(kv_heads, tokens, head_dim),
        block_tokens=block_tokens,
        pages=room[: page_starts[-1]].copy(),
        page_starts=page_starts,
        tail=patterns[:, tokens // block_tokens * block_tokens :].copy(),
        windows=windows,
        axis=axis,
    )


def check_page_starts(packed: Packed, smallest_bytes: int, align_bytes: int) -> None:
    """Every page lies inside ``pages``, has at least ``smallest_bytes`` and a multiple of ``align_bytes``.

    A decoder that has called this may read the fixed parts of each page without looking. Raises
    CorruptDataError with the rule and the values.
    """
    starts, page_bytes = packed.page_starts, packed.page_bytes
    if len(starts) != packed.page_count + 1 or starts[0] != 0 or starts[-1] != len(packed.pages):
        raise CorruptDataError(
            f"page_starts must give {packed.page_count} pages in {len(packed.pages)} bytes, "
            f"got {len(starts) - 1} pages from {int(starts[0])} to {int(starts[-1])}"
        )
    if (bad := (page_bytes < smallest_bytes) | (page_bytes % align_bytes > 0)).any():
        raise CorruptDataError(
            f"a page must have at least {smallest_bytes} bytes and a multiple of {align_bytes}, "
            f"got {page_bytes[bad][:5].tolist()}"
        )


def split_blocks(
    patterns: NDArray[Any], block_tokens: int, dtype: type[np.integer] = np.uint16
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Full blocks ``[page, kv_head, block_token, head_dim]`` and the tail ``[kv_head, token, head_dim]``.

    Raises ValueError when the patterns are not ``dtype [kv_head, token, head_dim]`` or a size is below 1.
    """
    if patterns.dtype != dtype or patterns.ndim != 3:
        raise ValueError(
            f"patterns must be {np.dtype(dtype)} [kv_head, token, head_dim], "
            f"got {patterns.dtype} {list(patterns.shape)}"
        )
    kv_heads, tokens, head_dim = patterns.shape
    if kv_heads < 1 or head_dim < 1:
        raise ValueError(f"patterns must have at least one head and one channel, got {list(patterns.shape)}")
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
    full = tokens - tokens % block_tokens
    blocks = patterns[:, :full].reshape(kv_heads, full // block_tokens, block_tokens, head_dim)
    return blocks.transpose(1, 0, 2, 3), patterns[:, full:].copy()


def join_blocks(blocks: NDArray[Any], tail: NDArray[Any]) -> NDArray[Any]:
    """The inverse of ``split_blocks``."""
    pages, kv_heads, block_tokens, head_dim = blocks.shape
    full = blocks.transpose(1, 0, 2, 3).reshape(kv_heads, pages * block_tokens, head_dim)
    return np.concatenate([full, tail], axis=1)
