"""The KV formats by name. A format is one file of this room and one line here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvfold.codec import bf16, gaac

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from kvfold.codec.packed import Packed
    from kvfold.codec.windows import Windows


@dataclass(frozen=True, slots=True)
class Format:
    """What every format offers. Patterns are BF16, ``uint16 [kv_head, token, head_dim]``."""

    encode: Callable[[NDArray[np.uint16], Windows, int], Packed]  # patterns, windows, block_tokens
    decode: Callable[[Packed], NDArray[np.uint16]]
    mode_counts: Callable[[Packed], dict[str, int]]
    count_exceptions: Callable[[NDArray[np.uint16], Windows], int]
    channel_multiple: int  # head_dim must be a multiple of this
    table_entry_bytes: int  # per page, in the block table


FORMATS: dict[str, Format] = {
    "bf16": Format(
        bf16.encode, bf16.decode, bf16.mode_counts, bf16.count_exceptions, 1, bf16.TABLE_ENTRY_BYTES
    ),
    "gaac": Format(
        gaac.encode, gaac.decode, gaac.mode_counts, gaac.count_exceptions, gaac.GROUP, gaac.TABLE_ENTRY_BYTES
    ),
}
