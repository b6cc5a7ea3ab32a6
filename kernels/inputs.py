"""Cases as data, and seeded K, V and queries for them: one generator for tests, fuzz and bench."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvfold.codec import fixed4, fp8, gaac
from kvfold.codec.pages import aligned
from kvfold.codec.windows import calibrate
from kvfold.kernels.fixed4_pack import pack, slot_bytes
from kvfold.kernels.gaac_attend import GaacKv
from kvfold.kernels.pages import BlockTable, PagedKv, block_table, inside_window

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfold.codec.fixed4 import Kind
    from kvfold.codec.fp8 import Fp8
    from kvfold.codec.windows import Windows

POISON = 0xA5
FP8_DTYPES = {fp8.E4M3.name: torch.float8_e4m3fn, fp8.E5M2.name: torch.float8_e5m2}


@dataclass(frozen=True, slots=True)
class Case:
    """One decode step of one layer. ``raw_share`` is the share of full blocks that are left raw, at random."""

    lengths: tuple[int, ...]  # tokens of each sequence; 0 is a slot of the batch that nobody uses
    kv_heads: int
    group: int  # query heads per KV head
    head_dim: int
    block_tokens: int
    raw_page_tokens: int
    raw_share: float = 0.0
    window: int | None = None
    seed: int = 0
    shared_blocks: int = 0  # full blocks at the start that a sequence shares with the first one

    def __str__(self) -> str:
        return (
            f"{'+'.join(map(str, self.lengths))}-h{self.kv_heads}x{self.group}-d{self.head_dim}"
            f"-b{self.block_tokens}-p{self.raw_page_tokens}-r{self.raw_share}-w{self.window}"
            f"-c{self.shared_blocks}-s{self.seed}"
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


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """A case before anything is packed: its queries, raw pages, and which of them each block has."""

    case: Case
    q: torch.Tensor  # bfloat16 [batch, q_heads, head_dim]
    raw_k: torch.Tensor  # bfloat16 [page, kv_heads, page_token, head_dim]
    raw_v: torch.Tensor
    pages: list[list[int]]  # of each sequence
    block_pages: list[list[int]]  # of each distinct block
    places: list[list[int]]  # of each sequence, the number of each of its full blocks
    stays_raw: list[bool]  # of each distinct block

    def listed(self) -> torch.Tensor:
        """The raw pages of each block, int32 ``[block, page of it]``."""
        per_block = self.case.block_tokens // self.case.raw_page_tokens
        listed = torch.tensor(self.block_pages, dtype=torch.int32, device=self.q.device)
        return listed.reshape(len(self.block_pages), per_block)

    def patterns(self) -> tuple[np.ndarray, np.ndarray]:
        """K and V of all blocks, ``uint16 [kv_head, token, head_dim]``, block after block."""
        pages = self.listed().long().flatten()
        return patterns_of(self.raw_k[pages]), patterns_of(self.raw_v[pages])


def patterns_of(pages: torch.Tensor) -> np.ndarray:
    """Pages ``bfloat16 [page, kv_head, page_token, head_dim]`` as ``uint16 [kv_head, token, head_dim]``."""
    tokens = pages.transpose(0, 1).reshape(pages.shape[1], -1, pages.shape[3]).contiguous()
    return tokens.view(torch.int16).cpu().numpy().view(np.uint16)


def draw(case: Case, device: str) -> Drawn:
    """Queries and raw pages. What no token fills, and a page before and after the pools, are no numbers."""
    generator = torch.Generator(device).manual_seed(case.seed)
    q = queries(len(case.lengths), case.kv_heads * case.group, case.head_dim, generator)
    per_block = case.block_tokens // case.raw_page_tokens
    full_blocks = [length // case.block_tokens for length in case.lengths]
    shared = [min(case.shared_blocks, full_blocks[0], count) for count in full_blocks]
    page_counts = [-(-length // case.raw_page_tokens) for length in case.lengths]
    own = [
        count - n * per_block if b else count
        for b, (count, n) in enumerate(zip(page_counts, shared, strict=True))
    ]
    shape = (sum(own), case.kv_heads, case.raw_page_tokens, case.head_dim)
    pools = []
    for fill in (keys, values):
        pool = torch.full((shape[0] + 2, *shape[1:]), float("nan"), dtype=torch.bfloat16, device=device)
        pool[1:-1] = fill(shape, generator)
        pools.append(pool[1:-1])
    order = torch.randperm(shape[0], generator=generator, device=device).tolist()
    pages: list[list[int]] = []
    places: list[list[int]] = []
    block_pages: list[list[int]] = []
    for b, length in enumerate(case.lengths):
        kept = shared[b] if b else 0
        pages.append(pages[0][: kept * per_block] if b else [])
        pages[b] = pages[b] + [order.pop() for _ in range(own[b])]
        first = len(block_pages)
        block_pages += [pages[b][i * per_block : (i + 1) * per_block] for i in range(kept, full_blocks[b])]
        places.append((places[0][:kept] if b else []) + list(range(first, len(block_pages))))
        if length % case.raw_page_tokens:
            for pool in pools:
                pool[pages[b][-1], :, length % case.raw_page_tokens :] = float("nan")
    stays_raw = torch.rand(len(block_pages), generator=generator, device=device).lt(case.raw_share).tolist()
    return Drawn(case, q, pools[0], pools[1], pages, block_pages, places, stays_raw)


def tables(drawn: Drawn, full: list[bool]) -> tuple[BlockTable, BlockTable]:
    """The case's table, and that of the same tokens in the same order as raw pages only.

    ``full`` blocks are raw in both, and so are those that stay raw. What pads the rows is no page.
    """
    case = drawn.case
    per_block = case.block_tokens // case.raw_page_tokens
    packed: list[list[int]] = [[] for _ in case.lengths]
    packed_starts: list[list[int]] = [[] for _ in case.lengths]
    raw: list[list[int]] = [[] for _ in case.lengths]
    raw_starts: list[list[int]] = [[] for _ in case.lengths]
    for b, pages in enumerate(drawn.pages):
        for i, place in enumerate(drawn.places[b]):
            if drawn.stays_raw[place] or full[place]:
                raw[b] += drawn.block_pages[place]
                raw_starts[b] += [i * case.block_tokens + n * case.raw_page_tokens for n in range(per_block)]
            else:
                packed[b].append(place)
                packed_starts[b].append(i * case.block_tokens)
        tail = range(len(drawn.places[b]) * per_block, len(pages))
        raw[b] += [pages[i] for i in tail]
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
        str(drawn.q.device),
    )
    return _without_padding(table, case), _without_padding(_only_raw(table, drawn), case)


def _only_raw(table: BlockTable, drawn: Drawn) -> BlockTable:
    """The table with the raw pages of each packed block in its place.

    Raises ValueError where a window starts inside a raw page behind packed ones: no single skip says that.
    """
    case = drawn.case
    pages, tokens, skips = [], [], []
    for b in range(table.batch):
        count, raw_tokens = int(table.packed_counts[b]), int(table.raw_tokens[b])
        raw_skip = int(table.raw_skips[b])
        if count and raw_skip:
            raise ValueError(f"sequence {b}: the window starts in a raw page behind {count} packed pages")
        places = table.packed_pages[b, :count].tolist()
        kept = table.raw_pages[b, : -(-raw_tokens // case.raw_page_tokens)].tolist()
        pages.append([page for place in places for page in drawn.block_pages[place]] + kept)
        tokens.append(count * case.block_tokens + raw_tokens)
        skips.append(int(table.packed_skips[b]) if count else raw_skip)
    device = table.raw_skips.device
    only = block_table([[] for _ in tokens], pages, tokens, str(device))
    return replace(only, raw_skips=torch.tensor(skips, dtype=torch.int32, device=device))


def _without_padding(table: BlockTable, case: Case) -> BlockTable:
    """The table with -1 where no page is listed."""
    for pages, counts in (
        (table.packed_pages, table.packed_counts),
        (table.raw_pages, (table.raw_tokens + case.raw_page_tokens - 1) // case.raw_page_tokens),
    ):
        column = torch.arange(pages.shape[1], device=pages.device)
        pages[column[None, :] >= counts[:, None]] = -1
    return table


def make(case: Case, device: str) -> tuple[torch.Tensor, PagedKv, PagedKv]:
    """Queries, the case's pages in `fixed4`, and the same tokens in the same order as raw pages only."""
    drawn = draw(case, device)
    kv, raw, _ = pack_fixed4(drawn)
    return drawn.q, kv, raw


def pack_fixed4(drawn: Drawn, packer: Callable[..., torch.Tensor] = pack) -> tuple[PagedKv, PagedKv, int]:
    """The pages in `fixed4`, the same tokens as raw pages only, and how many exceptions the packed ones list.

    Blocks whose exceptions do not fit their list are raw in both. ``packer`` may be `encode_fixed4`.
    """
    case, listed = drawn.case, drawn.listed()
    device = drawn.q.device
    shape = (len(listed) + 2, case.kv_heads, slot_bytes(case.block_tokens, case.head_dim))
    packed_k, packed_v = (torch.full(shape, POISON, dtype=torch.uint8, device=device)[1:-1] for _ in "kv")
    places = torch.arange(len(listed), dtype=torch.int32, device=device)
    counts_k = packer(drawn.raw_k, listed, packed_k, places, "k", case.block_tokens)
    counts_v = packer(drawn.raw_v, listed, packed_v, places, "v", case.block_tokens)
    most = torch.maximum(counts_k, counts_v)
    full = most.amax(1).gt(fixed4.exception_capacity(case.head_dim)).tolist() if len(listed) else []
    table, only_raw = tables(drawn, full)
    used = [table.packed_pages[b, : int(table.packed_counts[b])] for b in range(table.batch)]
    exceptions = int((counts_k + counts_v)[torch.cat(used).long()].sum())
    kv = PagedKv(packed_k, packed_v, drawn.raw_k, drawn.raw_v, table, case.block_tokens)
    return kv, kv.with_table(only_raw), exceptions


def encode_fixed4(
    raw: torch.Tensor,
    raw_pages: torch.Tensor,
    records: torch.Tensor,
    places: torch.Tensor,
    kind: Kind,
    block_tokens: int,
) -> torch.Tensor:
    """`kvfold.kernels.fixed4_pack.pack` by the codec, on the CPU; no drawn value is too large for attention."""
    _, kv_heads, _, head_dim = raw.shape
    capacity = fixed4.exception_capacity(head_dim)
    counts = np.full((len(places), kv_heads), capacity + 1, np.int32)
    if len(places):
        slots = np.full((len(places), *records.shape[1:]), POISON, np.uint8)
        packed = fixed4.encode(patterns_of(raw[raw_pages.long().flatten()]), None, block_tokens, kind)
        size = fixed4.head_record_bytes(block_tokens, head_dim)
        count_start = block_tokens * head_dim * 3 // 2 + 4 * capacity + head_dim
        for block in np.flatnonzero(np.diff(packed.page_starts) == kv_heads * size):  # others are raw
            start = packed.page_starts[block]
            slots[block, :, :size] = packed.pages[start : start + kv_heads * size].reshape(kv_heads, size)
            slots[block, :, size:] = 0
            counts[block] = slots[block, :, count_start : count_start + 4].view("<u4")[:, 0]
        records[places.long()] = torch.from_numpy(slots).to(records.device)
    return torch.from_numpy(counts).to(records.device)


def pack_gaac(drawn: Drawn) -> tuple[GaacKv, GaacKv]:
    """The pages in `gaac`, encoded by the codec, and the same tokens as raw pages only."""
    case = drawn.case
    device = str(drawn.q.device)
    table, only_raw = tables(drawn, [False] * len(drawn.block_pages))
    k, v = drawn.patterns()
    packed_k, windows_k = gaac_slots(k, case.block_tokens, device)
    packed_v, windows_v = gaac_slots(v, case.block_tokens, device)
    kv = GaacKv(packed_k, packed_v, drawn.raw_k, drawn.raw_v, table, case.block_tokens, windows_k, windows_v)
    return kv, replace(kv, table=only_raw)


def gaac_slots(
    patterns: np.ndarray, block_tokens: int, device: str, windows: Windows | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of ``uint16 [kv_head, token, head_dim]`` in `gaac`, and the windows ``uint8 [2, kv_head, head_dim]``.

    Slots ``uint8 [page, slot_bytes]`` are as large as the largest page, with one of poison before and after them.
    Without windows, those of these tokens.
    """
    kv_heads, _, head_dim = patterns.shape
    if windows is None:
        no_values = patterns.shape[1] == 0  # then any window will do
        windows = calibrate([np.zeros((kv_heads, 1, head_dim), np.uint16) if no_values else patterns])
    packed = gaac.encode(patterns, windows, block_tokens)
    slot = aligned(int(packed.page_bytes.max(initial=16)))
    slots = np.full((packed.page_count + 2, slot), POISON, np.uint8)
    for page, (start, end) in enumerate(zip(packed.page_starts[:-1], packed.page_starts[1:], strict=True)):
        slots[page + 1, : end - start] = packed.pages[start:end]
    bases = np.stack([windows.narrow_base, windows.wide_base])
    return torch.from_numpy(slots).to(device)[1:-1], torch.from_numpy(bases).to(device)


def raw_pages(drawn: Drawn) -> PagedKv:
    """All tokens as raw pages, in the order of their positions."""
    table, _ = tables(drawn, [True] * len(drawn.block_pages))
    nothing = torch.empty((0, drawn.case.kv_heads, 0), dtype=torch.uint8, device=drawn.q.device)
    return PagedKv(nothing, nothing, drawn.raw_k, drawn.raw_v, table, drawn.case.block_tokens)


def cast_drawn(drawn: Drawn, kind: Fp8) -> tuple[PagedKv, tuple[float, float]]:
    """All tokens as FP8 pages, cast by the codec's table, and the scales of K and V."""
    kv = raw_pages(drawn)
    pools, scales = [], []
    for pool in (drawn.raw_k, drawn.raw_v):
        scales.append(fp8.amax_scale(pool.view(torch.int16).cpu().numpy().view(np.uint16), kind))
        pools.append(cast(pool, kind, scales[-1]))
    by_channel = pools[1].transpose(2, 3).contiguous()
    return replace(kv, raw_k=pools[0], raw_v=by_channel), (scales[0], scales[1])


def cast(values: torch.Tensor, kind: Fp8, scale: float) -> torch.Tensor:
    """BF16 values in FP8, of the same shape: the codec's cast."""
    table = torch.from_numpy(fp8.cast_table(kind, scale)).to(values.device)
    return table[values.view(torch.int16).int() & 0xFFFF].view(FP8_DTYPES[kind.name])


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
