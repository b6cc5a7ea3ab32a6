"""The pages that attention is timed on: filled once for the largest point, every point is a table into them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kvfold.codec.fp8 import E4M3, E5M2
from kvfold.kernels import inputs
from kvfold.kernels.fused import FUSED
from kvfold.kernels.pages import PagedKv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfold.codec.fp8 import Fp8
    from kvfold.kernels.fused import Fused
    from kvfold.kernels.pages import BlockTable

KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128  # as in Qwen3-8B and Llama-3.1-8B
PAGE_TOKENS = 64
FP8_PAGE_TOKENS = 128  # a page has as many bytes as BF16's
BLOCK_TOKENS = 256
TOKEN_BYTES = 4 * KV_HEADS * HEAD_DIM  # K and V of one token, BF16


class Pool:
    """Pages for the largest point, filled once; every point is a table into them."""

    def __init__(self, tokens: int, device: str, formats: Sequence[str] = ("fixed4",)) -> None:
        generator = torch.Generator(device).manual_seed(0)
        pages = tokens // PAGE_TOKENS
        shape = (pages, KV_HEADS, PAGE_TOKENS, HEAD_DIM)
        self.raw_k = torch.empty(shape, dtype=torch.bfloat16, device=device)
        self.raw_v = torch.empty_like(self.raw_k)
        for start in range(0, pages, 2048):
            part = (min(2048, pages - start), *shape[1:])
            self.raw_k[start : start + 2048] = inputs.keys(part, generator)
            self.raw_v[start : start + 2048] = inputs.values(part, generator)
        self.blocks = tokens // BLOCK_TOKENS
        self.listed = torch.arange(pages, dtype=torch.int32, device=device).view(self.blocks, -1)
        self.places = torch.arange(self.blocks, dtype=torch.int32, device=device)
        self.packed = {
            fused.name: fused.fill(self.raw_k, self.raw_v, self.listed, BLOCK_TOKENS)
            for fused in FUSED
            if fused.name in formats
        }
        self.cast = {kind.name: self._cast(kind) for kind in (E4M3, E5M2) if kind.name in formats}

    def _cast(self, kind: Fp8) -> tuple[torch.Tensor, torch.Tensor, float, float]:
        """K and V in FP8 with their scales, in pages of as many bytes as those of BF16."""
        sides: list[torch.Tensor] = []
        scales: list[float] = []
        per_page = FP8_PAGE_TOKENS // PAGE_TOKENS
        for pool in (self.raw_k, self.raw_v):
            parts = pool.split(2048)
            scales.append(max(part.abs().max().item() for part in parts) / kind.largest_value)
            filled = []
            for part in parts:
                bits = inputs.cast(part, kind, scales[-1]).view(torch.uint8)
                bits = bits.view(-1, per_page, KV_HEADS, PAGE_TOKENS, HEAD_DIM).transpose(1, 2)
                bits = bits.reshape(-1, KV_HEADS, FP8_PAGE_TOKENS, HEAD_DIM)
                filled.append(bits.transpose(2, 3).contiguous() if sides else bits)
            sides.append(torch.cat(filled).view(inputs.FP8_DTYPES[kind.name]))
        return sides[0], sides[1], scales[0], scales[1]

    def table(self, batch: int, context_tokens: int) -> BlockTable:
        """Sequences of equal length, blocks in shuffled order; a pool that is too small is used over again."""
        table = inputs.uniform_table(batch, context_tokens // BLOCK_TOKENS, str(self.places.device))
        return replace(table, packed_pages=table.packed_pages % self.blocks)

    def raw(self, batch: int, context_tokens: int, page_tokens: int = PAGE_TOKENS) -> PagedKv:
        """The tokens of that table as raw pages."""
        table = self.table(batch, context_tokens)
        per_block = BLOCK_TOKENS // page_tokens
        pages = table.packed_pages[:, :, None] * per_block + torch.arange(
            per_block, dtype=torch.int32, device=self.places.device
        )
        zeros = torch.zeros_like(table.packed_counts)
        table = replace(
            table,
            packed_counts=zeros,
            raw_pages=pages.view(batch, -1).contiguous(),
            raw_tokens=zeros + context_tokens,
        )
        nothing = torch.empty((0, KV_HEADS, 0), dtype=torch.uint8, device=self.places.device)
        return PagedKv(nothing, nothing, self.raw_k, self.raw_v, table, BLOCK_TOKENS)

    def fused(self, fused: Fused, batch: int, context_tokens: int) -> Any:
        """The tokens of that table as packed pages: what the format's kernel takes."""
        table = self.table(batch, context_tokens)
        return fused.pages(self.packed[fused.name][0], self.raw(batch, context_tokens), table)

    def block_bytes(self, fused: Fused) -> int:
        """Bytes of K and V of one packed block, all heads: the mean, where lists differ in length."""
        return self.packed[fused.name][1]
