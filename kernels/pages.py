"""K and V of one layer in pages, and which pages each sequence of a batch has.

A sequence is a list of packed pages and a list of raw pages. Attention does not depend on the order of tokens, so
the two lists need no order between them: packed blocks come first, then blocks that stayed raw and the raw tail.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


# Rows of one width class: a kernel is compiled once for all widths that are multiples of 16.
ROW_MULTIPLE = 16


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Pages by sequence; all int32. Rows are padded with 0 past their count.

    The skips are tokens at the start of the first listed page that a sliding window has passed.
    """

    packed_pages: torch.Tensor  # [batch, most packed pages]
    packed_counts: torch.Tensor  # [batch]
    raw_pages: torch.Tensor  # [batch, most raw pages]
    raw_tokens: torch.Tensor  # [batch], tokens in raw pages; only the last page is part full
    packed_skips: torch.Tensor  # [batch]
    raw_skips: torch.Tensor  # [batch]

    @property
    def batch(self) -> int:
        return self.packed_counts.numel()


@dataclass(frozen=True, slots=True, eq=False)
class PagedKv:
    """The pools of one layer and the table into them.

    Packed pages are slots of one format, ``uint8 [page, kv_head, slot_bytes]``; raw pages are
    ``bfloat16 [page, kv_head, page_token, head_dim]``.
    """

    packed_k: torch.Tensor
    packed_v: torch.Tensor
    raw_k: torch.Tensor
    raw_v: torch.Tensor
    table: BlockTable
    block_tokens: int  # tokens of a packed page

    @property
    def batch(self) -> int:
        return self.table.batch

    @property
    def kv_heads(self) -> int:
        return self.raw_k.shape[1]

    @property
    def raw_page_tokens(self) -> int:
        return self.raw_k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.raw_k.shape[3]

    def with_table(self, table: BlockTable) -> PagedKv:
        return replace(self, table=table)


def block_table(
    packed: Sequence[Sequence[int]], raw: Sequence[Sequence[int]], raw_tokens: Sequence[int], device: str
) -> BlockTable:
    """A table from page numbers by sequence. Raises ValueError when the lists are not of one batch."""
    if not len(packed) == len(raw) == len(raw_tokens):
        raise ValueError(
            f"packed, raw and raw_tokens must have one entry per sequence, "
            f"got {len(packed)}, {len(raw)}, {len(raw_tokens)}"
        )

    def row(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    def padded(lists: Sequence[Sequence[int]]) -> torch.Tensor:
        longest = max(len(pages) for pages in lists)
        width = max(1, -(-longest // ROW_MULTIPLE)) * ROW_MULTIPLE
        return torch.stack([row([*pages, *[0] * (width - len(pages))]) for pages in lists])

    zeros = torch.zeros(len(packed), dtype=torch.int32, device=device)
    return BlockTable(
        packed_pages=padded(packed),
        packed_counts=row([len(pages) for pages in packed]),
        raw_pages=padded(raw),
        raw_tokens=row(raw_tokens),
        packed_skips=zeros,
        raw_skips=zeros.clone(),
    )


def inside_window(
    packed: Sequence[Sequence[int]],
    packed_starts: Sequence[Sequence[int]],
    raw: Sequence[Sequence[int]],
    raw_starts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    window: int,
    block_tokens: int,
    raw_page_tokens: int,
    device: str,
) -> BlockTable:
    """The table of the last ``window`` tokens of each sequence; the starts are token positions of the pages.

    Pages that lie wholly before the window are left out, so that no kernel reads them; of the one page that
    straddles its start, the tokens before it are skipped. Both lists must ascend.
    """
    kept_packed, kept_raw, tokens, packed_skips, raw_skips = [], [], [], [], []
    for b, length in enumerate(lengths):
        first = max(0, length - window)
        inside = [i for i, start in enumerate(packed_starts[b]) if start + block_tokens > first]
        kept_packed.append([packed[b][i] for i in inside])
        packed_skips.append(max(0, first - packed_starts[b][inside[0]]) if inside else 0)
        inside = [i for i, start in enumerate(raw_starts[b]) if start + raw_page_tokens > first]
        kept_raw.append([raw[b][i] for i in inside])
        raw_skips.append(max(0, first - raw_starts[b][inside[0]]) if inside else 0)
        last = min(raw_page_tokens, length - raw_starts[b][inside[-1]]) if inside else 0
        tokens.append((len(inside) - 1) * raw_page_tokens + last if inside else 0)
    table = block_table(kept_packed, kept_raw, tokens, device)
    return replace(
        table,
        packed_skips=torch.tensor(packed_skips, dtype=torch.int32, device=device),
        raw_skips=torch.tensor(raw_skips, dtype=torch.int32, device=device),
    )
