"""Attention of one decode step, written to be read: what every kernel of this room is compared with.

One new token per sequence attends over all of its KV. With G = q_heads / kv_heads, query head h reads KV head
h // G (grouped-query attention).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvfold.codec import fixed4
from kvfold.codec.formats import FORMATS
from kvfold.codec.packed import Packed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfold.codec.fixed4 import Kind
    from kvfold.kernels.pages import PagedKv


def attend(
    q: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    scale: float,
    window: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """``softmax(q k^T * scale) v`` per sequence, in ``dtype``: ``[batch, q_heads, head_dim]``.

    q is ``[batch, q_heads, head_dim]``, keys and values per sequence ``[kv_head, token, head_dim]``; with a window
    only the last that many tokens count. Raises ValueError when shapes do not fit.
    """
    batch, q_heads, head_dim = q.shape
    if len(keys) != batch or len(values) != batch:
        raise ValueError(f"one K and one V per sequence ({batch}) are needed, got {len(keys)}, {len(values)}")
    out = []
    for b in range(batch):
        k, v = keys[b].to(dtype), values[b].to(dtype)
        kv_heads = k.shape[0]
        if k.shape != v.shape or k.shape[2] != head_dim or q_heads % kv_heads:
            raise ValueError(
                f"sequence {b}: K and V must be [kv_head, token, {head_dim}] with kv_heads "
                f"that divide {q_heads}, got {list(k.shape)} and {list(v.shape)}"
            )
        if window is not None:
            k, v = k[:, -window:], v[:, -window:]
        heads = q[b].to(dtype).view(kv_heads, -1, head_dim)  # [kv_head, group, head_dim]
        weights = torch.softmax(heads @ k.transpose(1, 2) * scale, dim=-1)
        out.append((weights @ v).reshape(q_heads, head_dim))
    return torch.stack(out)


def attend_packed(
    q: torch.Tensor,
    keys: Sequence[Packed],
    values: Sequence[Packed],
    name: str,
    scale: float,
    window: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The same over K and V in the format ``name``, decoded by the codec."""
    decoded = [[_values(FORMATS[name].decode(packed)) for packed in side] for side in (keys, values)]
    return attend(q.cpu(), decoded[0], decoded[1], scale, window, dtype)


def raw_tokens(kv: PagedKv, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the raw pages of one sequence, ``[kv_head, token, head_dim]``; skipped tokens are left out."""
    table = kv.table
    tokens = int(table.raw_tokens[sequence])
    pages = table.raw_pages[sequence, : -(-tokens // kv.raw_page_tokens)].long()
    first = int(table.raw_skips[sequence])
    k, v = (
        pool[pages].transpose(0, 1).reshape(kv.kv_heads, -1, kv.head_dim)[:, first:tokens]
        for pool in (kv.raw_k, kv.raw_v)
    )
    return k, v


def dense(kv: PagedKv, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one sequence as ``bfloat16 [kv_head, token, head_dim]``, its `fixed4` pages decoded by the codec.

    Tokens are in the order of the table, those of packed pages first; skipped tokens are left out.
    """
    table = kv.table
    packed = table.packed_pages[sequence, : int(table.packed_counts[sequence])].long()
    sides = []
    kinds: tuple[Kind, ...] = ("k", "v")
    for kind, records, raw in zip(kinds, (kv.packed_k, kv.packed_v), raw_tokens(kv, sequence), strict=True):
        blocks = decode_records(records[packed], kind, kv.block_tokens, kv.head_dim)
        sides.append(torch.cat([blocks[:, int(table.packed_skips[sequence]) :], raw.cpu()], dim=1))
    return sides[0], sides[1]


def decode_records(records: torch.Tensor, kind: Kind, block_tokens: int, head_dim: int) -> torch.Tensor:
    """`fixed4` slots ``uint8 [page, kv_head, slot_bytes]`` decoded to ``bfloat16 [kv_head, token, head_dim]``."""
    pages, kv_heads, _ = records.shape
    record_bytes = fixed4.head_record_bytes(block_tokens, head_dim)
    packed = Packed(
        shape=(kv_heads, pages * block_tokens, head_dim),
        block_tokens=block_tokens,
        pages=records[..., :record_bytes].cpu().numpy().reshape(-1),
        page_starts=np.arange(pages + 1, dtype=np.int64) * kv_heads * record_bytes,
        tail=np.empty((kv_heads, 0, head_dim), np.uint16),
        axis=fixed4.AXIS_OF[kind],
    )
    return _values(fixed4.decode(packed))


def _values(patterns: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16)
