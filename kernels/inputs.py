"""Cases as data, and seeded K, V and queries for them: one generator for tests, fuzz and bench."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvfold.codec.fixed4 import exception_capacity
from kvfold.kernels.fixed4_pack import pack, slot_bytes
from kvfold.kernels.pages import BlockTable, PagedKv, block_table, inside_window


@dataclass(frozen=True, slots=True)
class Case:
    """One decode step of one layer. ``raw_share`` is the share of full blocks that are left raw, at random."""

    lengths: tuple[int, ...]  # tokens of each sequence
    kv_heads: int
    group: int  # query heads per KV head
    head_dim: int
    block_tokens: int
    raw_page_tokens: int
    raw_share: float = 0.0
    window: int | None = None
    seed: int = 0

    def __str__(self) -> str:
        return (
            f"{'+'.join(map(str, self.lengths))}-h{self.kv_heads}x{self.group}-d{self.head_dim}"
            f"-b{self.block_tokens}-p{self.raw_page_tokens}-r{self.raw_share}-w{self.window}-s{self.seed}"
        )


def keys(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """K as real models have it, bfloat16 of ``shape`` (last axis head_dim), on the generator's device.

    A normal value with its own scale per channel (log-normal, sigma 0.8) has the exponent entropy that was
    measured on K (2.3 to 2.5 bits per head-channel); about 6 per 10,000 elements are exact zeros, from the rotary
    embedding's cancellation in BF16, which also leaves few values just above zero.
    """
    device = generator.device
    scale = torch.exp(0.8 * torch.randn(shape[-1], generator=generator, device=device))
    x = torch.randn(shape, generator=generator, device=device)
    chance = torch.rand(shape, generator=generator, device=device)
    x.masked_fill_((x.abs() < 3e-4) & (chance < 0.85), 0.0)
    x.masked_fill_(chance > 1 - 3e-4, 0.0)
    return (x * scale).to(torch.bfloat16)


def values(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """V as real models have it: normal with a scale per channel (log-normal, sigma 0.5), no exact zeros."""
    device = generator.device
    scale = 0.3 * torch.exp(0.5 * torch.randn(shape[-1], generator=generator, device=device))
    return (torch.randn(shape, generator=generator, device=device) * scale).to(torch.bfloat16)


def queries(batch: int, heads: int, head_dim: int, generator: torch.Generator) -> torch.Tensor:
    """Queries, bfloat16 ``[batch, heads, head_dim]``; the scale keeps the softmax neither flat nor one-hot."""
    q = torch.randn((batch, heads, head_dim), generator=generator, device=generator.device)
    return (0.5 * q).to(torch.bfloat16)


def make(case: Case, device: str) -> tuple[torch.Tensor, PagedKv, PagedKv]:
    """Queries, the case's pages, and the same tokens in the same order as raw pages only.

    Blocks whose exceptions do not fit their list are raw in both.
    """
    generator = torch.Generator(device).manual_seed(case.seed)
    q = queries(len(case.lengths), case.kv_heads * case.group, case.head_dim, generator)
    per_block = case.block_tokens // case.raw_page_tokens
    page_counts = [-(-length // case.raw_page_tokens) for length in case.lengths]
    shape = (sum(page_counts), case.kv_heads, case.raw_page_tokens, case.head_dim)
    raw_k, raw_v = keys(shape, generator), values(shape, generator)
    order = torch.randperm(shape[0], generator=generator, device=device).tolist()
    pages = [[order.pop() for _ in range(count)] for count in page_counts]

    blocks = [(b, i) for b, length in enumerate(case.lengths) for i in range(length // case.block_tokens)]
    stays_raw = torch.rand(len(blocks), generator=generator, device=device).lt(case.raw_share).tolist()
    block_pages = [pages[b][i * per_block : (i + 1) * per_block] for b, i in blocks]
    slot = slot_bytes(case.block_tokens, case.head_dim)
    packed_k = torch.full((len(blocks), case.kv_heads, slot), 0xA5, dtype=torch.uint8, device=device)
    packed_v = packed_k.clone()
    listed = torch.tensor(block_pages, dtype=torch.int32, device=device).reshape(len(blocks), per_block)
    places = torch.arange(len(blocks), dtype=torch.int32, device=device)
    counts_k = pack(raw_k, listed, packed_k, places, "k", case.block_tokens)
    counts_v = pack(raw_v, listed, packed_v, places, "v", case.block_tokens)
    full = (
        torch.maximum(counts_k, counts_v).amax(1).gt(exception_capacity(case.head_dim)).tolist()
        if blocks
        else []
    )

    packed: list[list[int]] = [[] for _ in case.lengths]
    packed_starts: list[list[int]] = [[] for _ in case.lengths]
    raw: list[list[int]] = [[] for _ in case.lengths]
    raw_starts: list[list[int]] = [[] for _ in case.lengths]
    for place, (b, i) in enumerate(blocks):
        start = i * case.block_tokens
        if stays_raw[place] or full[place]:
            raw[b] += block_pages[place]
            raw_starts[b] += [start + n * case.raw_page_tokens for n in range(per_block)]
        else:
            packed[b].append(place)
            packed_starts[b].append(start)
    for b, length in enumerate(case.lengths):
        tail = range(length // case.block_tokens * per_block, page_counts[b])
        raw[b] += [pages[b][i] for i in tail]
        raw_starts[b] += [i * case.raw_page_tokens for i in tail]
    table = inside_window(
        packed,
        packed_starts,
        raw,
        raw_starts,
        list(case.lengths),
        max(case.lengths) if case.window is None else case.window,
        case.block_tokens,
        case.raw_page_tokens,
        device,
    )
    kv = PagedKv(packed_k, packed_v, raw_k, raw_v, table, case.block_tokens)
    return q, kv, kv.with_table(_only_raw(kv, block_pages))


def _only_raw(kv: PagedKv, block_pages: list[list[int]]) -> BlockTable:
    """The table with the raw pages of each packed block in its place.

    Raises ValueError where a window starts inside a raw page behind packed ones: no single skip says that.
    """
    pages, tokens, skips = [], [], []
    for b in range(kv.batch):
        count, raw_tokens = int(kv.table.packed_counts[b]), int(kv.table.raw_tokens[b])
        raw_skip = int(kv.table.raw_skips[b])
        if count and raw_skip:
            raise ValueError(f"sequence {b}: the window starts in a raw page behind {count} packed pages")
        places = kv.table.packed_pages[b, :count].tolist()
        kept = kv.table.raw_pages[b, : -(-raw_tokens // kv.raw_page_tokens)].tolist()
        pages.append([page for place in places for page in block_pages[place]] + kept)
        tokens.append(count * kv.block_tokens + raw_tokens)
        skips.append(int(kv.table.packed_skips[b]) if count else raw_skip)
    device = kv.table.raw_skips.device
    table = block_table([[] for _ in tokens], pages, tokens, str(device))
    return replace(table, raw_skips=torch.tensor(skips, dtype=torch.int32, device=device))


def uniform_table(batch: int, blocks: int, device: str) -> BlockTable:
    """Sequences of equally many packed pages in shuffled order, without raw ones."""
    generator = torch.Generator(device).manual_seed(0)
    order = torch.randperm(batch * blocks, generator=generator, device=device).to(torch.int32)
    zeros = torch.zeros(batch, dtype=torch.int32, device=device)
    return BlockTable(
        packed_pages=order.reshape(batch, blocks),
        packed_counts=zeros + blocks,
        raw_pages=torch.zeros((batch, 1), dtype=torch.int32, device=device),
        raw_tokens=zeros,
        packed_skips=zeros,
        raw_skips=zeros,
    )
