"""Pack raw BF16 blocks into `fixed3` main parts and lists on the device; the bytes are those of the codec.

One program per block and KV head. Pairs are computed in tiles, as many in each quarter of a group's sixteen
(`kvfold.codec.fixed3`). For kind k a quarter is one of the channels and a tile one token of each row of the list:
``[row, pair of channels]``; for kind v a tile is one pair of every group: ``[32 tokens, channel]``. Both ways a
quarter has 64 positions of each row.
"""

# Tuples change their length in code that only Triton runs.
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvfold.codec.fixed3 import head_main_bytes
from kvfold.codec.fixed3_heads import GROUP_ROWS, MOST_IN_GROUP
from kvfold.kernels.fixed3_lists import bit_counts, flags_of, store_list
from kvfold.kernels.fixed3_words import store_words_k, store_words_v
from kvfold.kernels.fixed4_pack import check_blocks, token_starts, warps_of

TOP_BITS = tl.constexpr(0x80008000)
EXPONENT_BITS = tl.constexpr(0x7F807F80)
MOST_LISTED = tl.constexpr(MOST_IN_GROUP)
LIST_GROUP = tl.constexpr(GROUP_ROWS)
LIST_UNIT_BYTES = 16  # lists start at multiples of this, and their sizes are
MOST_LIST_BYTES = LIST_UNIT_BYTES << 24  # of all lists of a side: an entry has 24 bits for a start
HEAD_DIMS = (64, 128)
# Of a K block: 2 ** (base - 64) must be a BF16 number. Sums of V stand as 2 ** (64 - base) of what they are, never
# larger; from block to block they are rescaled by 2 ** (base - next base), a float32 between any two of these.
BASES = {"k": (1, 191), "v": (65, 191)}


@triton.jit
def pair_tile(
    pairs_ptr,
    patterns_ptr,
    low_start,
    high_start,
    number: tl.constexpr,
    TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ALONG_TOKENS: tl.constexpr,
):
    """Both patterns of each pair of a tile in a word."""
    if ALONG_TOKENS:
        column = tl.arange(0, HEAD_DIM)[None, :] + number * HEAD_DIM
        low = tl.load(patterns_ptr + low_start[:, None] + column).to(tl.uint16, bitcast=True)
        high = tl.load(patterns_ptr + high_start[:, None] + column).to(tl.uint16, bitcast=True)
        return low.to(tl.uint32) | (high.to(tl.uint32) << 16)
    else:
        column = tl.arange(0, HEAD_DIM // 8)[None, :] + number // TILES * (HEAD_DIM // 8)
        token_start = low_start + number % TILES * HEAD_DIM
        return tl.load(pairs_ptr + token_start[:, None] // 2 + column).to(tl.uint32, bitcast=True)


@triton.jit
def _top_base(top):
    """Base of the window that ends at the largest exponent; this plus 0x80 is in the upper half."""
    return tl.maximum((top >> 16) - 0x80 - 0x380, 0x80)


@triton.jit
def _halves(low, high):
    return (low | (high << 16)).to(tl.uint32)


@triton.jit
def _join_4(parts):
    return tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))


@triton.jit
def _split_4(joined):
    """What `_join_4` joined."""
    even, odd = tl.split(joined)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _differs(exponents, exponent):
    """The top bit of each half whose exponent is not that one."""
    return ((exponents ^ exponent) + EXPONENT_BITS) & TOP_BITS


@triton.jit
def _lower_window(words, first: tl.constexpr, count: tl.constexpr, base):
    """How many halves of a column have the exponent below the window, or not its last, by row.

    The sum over rows is more than all halves if those below win.
    """
    found = tl.zeros_like(words[0])
    for number in tl.static_range(count):
        exponents = words[first + number] & EXPONENT_BITS
        found += _differs(exponents, base[None, :] + 0x03800380) >> 15
        found += (_differs(exponents, base[None, :] - 0x00800080) ^ TOP_BITS) >> 15
    return found


@triton.jit
def _lowered(base, found, HALF_TOKENS: tl.constexpr):
    """Bases, one less where that window takes more of its channel's elements, so many to each half."""
    low = tl.where(((found & 0xFFFF) > HALF_TOKENS) & ((base & 0xFFFF) > 0x80), 0x80, 0)
    high = tl.where(((found >> 16) > HALF_TOKENS) & ((base >> 16) > 0x80), 0x800000, 0)
    return base - (low | high).to(tl.uint32)


@triton.jit
def _bases(words, TILES: tl.constexpr, BLOCK_TOKENS: tl.constexpr, ALONG_TOKENS: tl.constexpr):
    """Of each quarter the bases of its pairs' halves, in the bits of a pattern."""
    # Exponents plus 0x80: the one that is not finite becomes the most negative.
    lows = ()
    highs = ()
    for quarter in tl.static_range(4):
        low = tl.full(words[0].shape, 0x800000, tl.int32)
        high = tl.full(words[0].shape, 0x800000, tl.int32)
        for tile in tl.static_range(TILES):
            raised = (words[quarter * TILES + tile] & EXPONENT_BITS) + 0x00800080
            low = tl.maximum(low, (raised << 16).to(tl.int32, bitcast=True))
            high = tl.maximum(high, raised.to(tl.int32, bitcast=True))
        lows = lows + (low,)  # noqa: RUF005
        highs = highs + (high,)  # noqa: RUF005
    if ALONG_TOKENS:
        top = tl.maximum(lows[0], highs[0])
        for quarter in tl.static_range(1, 4):
            top = tl.maximum(top, tl.maximum(lows[quarter], highs[quarter]))
        top = _top_base(tl.max(top, 0))
        base = _halves(top, top)
        found = tl.sum(_lower_window(words, 0, 16, base), 0)
        found = (found & 0xFFFF) + (found >> 16)
        base = _lowered(base, found | (found << 16), BLOCK_TOKENS)
        return (base, base, base, base)
    else:
        # Reduced over rows together: each reduction waits for all warps.
        tops = tl.join(_join_4(lows), _join_4(highs))
        lows, highs = tl.split(_top_base(tl.max(tops, 0)))
        tops = _split_4(_halves(lows, highs))
        found = ()
        for quarter in tl.static_range(4):
            found = found + (_lower_window(words, quarter * TILES, TILES, tops[quarter]),)  # noqa: RUF005
        found = _split_4(tl.sum(_join_4(found), 0))
        bases = ()
        for quarter in tl.static_range(4):
            bases = bases + (_lowered(tops[quarter], found[quarter], BLOCK_TOKENS),)  # noqa: RUF005
        return bases


@triton.jit
def _codes(word, base):
    """Codes of a pair in their places, and the top bit of each half that is an exception."""
    distance = (word | TOP_BITS) - base  # 0x8000 more than magnitude - base
    offset = distance & 0x7FFF7FFF
    out = ((distance ^ TOP_BITS) | (offset + 0x7C007C00)) & TOP_BITS
    is_out = out | (out - (out >> 15))
    kept = offset | (word & TOP_BITS)
    return kept ^ ((kept ^ ((word & 0x00FF00FF) << 2)) & is_out), out


@triton.jit
def _pack_kernel(
    pairs_ptr,  # int32 view of patterns [page, kv_heads, PAGE_TOKENS, HEAD_DIM]
    patterns_ptr,  # int16 view of the same
    pages_ptr,  # int32 [blocks, BLOCK_TOKENS / PAGE_TOKENS], the raw pages of each block
    words_ptr,  # uint32 view of main parts
    bytes_ptr,  # uint8 view of the same
    lists_ptr,  # int16 view of lists
    entries_ptr,  # int32 [page, kv_heads]
    places_ptr,  # int32 [blocks], which page each block becomes
    counts_ptr,  # int32 [blocks, kv_heads], exceptions found
    kv_heads,
    BLOCK_TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN_BYTES: tl.constexpr,
    LIST_BYTES: tl.constexpr,
    LOWEST_BASE: tl.constexpr,
    HIGHEST_BASE: tl.constexpr,
    LIST_TILE: tl.constexpr,  # a power of two that holds the entries of a list
    ALONG_TOKENS: tl.constexpr,
):
    block = tl.program_id(0)
    head = tl.program_id(1)
    ROW_TOKENS: tl.constexpr = 32 if ALONG_TOKENS else 256 // HEAD_DIM
    ROWS: tl.constexpr = BLOCK_TOKENS // ROW_TOKENS
    TILES: tl.constexpr = 4 if ALONG_TOKENS else ROW_TOKENS
    COLUMNS: tl.constexpr = HEAD_DIM if ALONG_TOKENS else HEAD_DIM // 8
    PLANE: tl.constexpr = BLOCK_TOKENS * HEAD_DIM // 16
    first_token = tl.arange(0, ROWS) * ROW_TOKENS
    block_pages_ptr = pages_ptr + block * (BLOCK_TOKENS // PAGE_TOKENS)
    low_start = token_starts(block_pages_ptr, first_token, head, kv_heads, PAGE_TOKENS, HEAD_DIM)
    high_start = low_start
    if ALONG_TOKENS:
        high_start = token_starts(block_pages_ptr, first_token + 16, head, kv_heads, PAGE_TOKENS, HEAD_DIM)
    words = ()
    for number in tl.static_range(4 * TILES):
        word = pair_tile(
            pairs_ptr, patterns_ptr, low_start, high_start, number, TILES, HEAD_DIM, ALONG_TOKENS
        )
        words = words + (word,)  # noqa: RUF005
    bases = _bases(words, TILES, BLOCK_TOKENS, ALONG_TOKENS)

    slot = tl.load(places_ptr + block).to(tl.int64) * kv_heads + head
    main_ptr = words_ptr + slot * (MAIN_BYTES // 4)
    base_ptr = bytes_ptr + slot * MAIN_BYTES + 22 * PLANE
    lowest = tl.full([COLUMNS], 255, tl.uint32)
    highest = tl.zeros([COLUMNS], tl.uint32)
    for quarter in tl.static_range(1 if ALONG_TOKENS else 4):
        low = (bases[quarter] >> 7) & 0xFF
        high = bases[quarter] >> 23
        lowest = tl.minimum(lowest, tl.minimum(low, high))
        highest = tl.maximum(highest, tl.maximum(low, high))
        if ALONG_TOKENS:
            tl.store(base_ptr + tl.arange(0, COLUMNS), low.to(tl.uint8))
        else:
            channel = tl.arange(0, 2 * COLUMNS) + quarter * (2 * COLUMNS)
            tl.store(base_ptr + channel, tl.interleave(low, high).to(tl.uint8))

    # Flags and ends of their words lie where words will be.
    flags_ptr = main_ptr
    ends_ptr = main_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + PLANE
    LIST_ROWS: tl.constexpr = COLUMNS if ALONG_TOKENS else ROWS
    QUARTER_WORDS: tl.constexpr = max(1, ROWS // 4) if ALONG_TOKENS else 2
    ROW_WORDS: tl.constexpr = 4 * QUARTER_WORDS
    row = tl.arange(0, LIST_ROWS)
    for quarter in tl.static_range(4):
        outs = ()
        for tile in tl.static_range(TILES):
            _, out = _codes(words[quarter * TILES + tile], bases[quarter][None, :])
            outs = outs + (out,)  # noqa: RUF005
        place = tl.arange(0, QUARTER_WORDS)[None, :] + quarter * QUARTER_WORDS
        tl.store(flags_ptr + row[:, None] * ROW_WORDS + place, flags_of(outs, TILES, ALONG_TOKENS))
    tl.debug_barrier()
    place = row[:, None] * ROW_WORDS + tl.arange(0, ROW_WORDS)[None, :]
    _, _, _, _, set_bits = bit_counts(tl.load(flags_ptr + place))
    set_bits = set_bits.to(tl.int32)
    row_counts = tl.sum(set_bits, 1)
    row_ends = tl.cumsum(row_counts, 0)
    tl.store(ends_ptr + place, tl.cumsum(set_bits, 1) + (row_ends - row_counts)[:, None])
    GROUP: tl.constexpr = min(LIST_ROWS, LIST_GROUP)
    ends = tl.cumsum(tl.reshape(row_counts, (LIST_ROWS // GROUP, GROUP)), 1)
    tl.store(base_ptr + HEAD_DIM + row, tl.reshape(ends, (LIST_ROWS,)).to(tl.uint8))
    if LIST_ROWS < HEAD_DIM:
        no_row = tl.arange(0, HEAD_DIM)
        tl.store(base_ptr + HEAD_DIM + no_row, tl.zeros([HEAD_DIM], tl.uint8), mask=no_row >= LIST_ROWS)
    count = tl.sum(row_counts, 0)
    fits = (count <= LIST_BYTES // 2) & (tl.max(tl.max(ends, 1), 0) <= MOST_LISTED)
    fits = fits & (tl.min(lowest, 0) >= LOWEST_BASE) & (tl.max(highest, 0) <= HIGHEST_BASE)
    units = (count + 7) // 8
    tl.debug_barrier()
    if fits:
        store_list(
            lists_ptr + slot * (LIST_BYTES // 2),
            count,
            flags_ptr,
            ends_ptr,
            patterns_ptr,
            block_pages_ptr,
            head,
            kv_heads,
            LIST_ROWS,
            ROW_WORDS,
            PAGE_TOKENS,
            HEAD_DIM,
            LIST_TILE,
            ALONG_TOKENS,
        )
    tl.debug_barrier()

    codes = ()
    for number in tl.static_range(4 * TILES):
        # Loaded again: to keep them takes more registers than there are.
        word = pair_tile(
            pairs_ptr, patterns_ptr, low_start, high_start, number, TILES, HEAD_DIM, ALONG_TOKENS
        )
        code, _ = _codes(word, bases[number // TILES][None, :])
        codes = codes + (code,)  # noqa: RUF005
    if ALONG_TOKENS:
        store_words_v(main_ptr, codes, PLANE)
    else:
        for pair in tl.static_range(TILES // 2):
            store_words_k(main_ptr, codes, pair, TILES, PLANE)
    units = tl.where(fits, units, 0).to(tl.int64)
    tl.store(entries_ptr + slot, (slot * (LIST_BYTES // 16) << 8 | units).to(tl.int32))
    tl.store(
        counts_ptr + block * kv_heads + head, tl.where(fits, count, tl.maximum(count, LIST_BYTES // 2 + 1))
    )


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """K or V of packed pages: main parts, lists in slots of one size, and where attention finds these.

    An entry is ``start << 8 | length`` of a list, in units of 16 bytes.
    """

    mains: torch.Tensor  # uint8 [page, kv_head, head_main_bytes]
    lists: torch.Tensor  # uint8 [page, kv_head, list_bytes]
    entries: torch.Tensor  # int32 [page, kv_head], read as unsigned


def empty_slots(
    pages: int, kv_heads: int, block_tokens: int, head_dim: int, list_bytes: int, device: torch.device
) -> Slots:
    """Room for so many pages."""
    main = head_main_bytes(block_tokens, head_dim)
    return Slots(
        torch.empty((pages, kv_heads, main), dtype=torch.uint8, device=device),
        torch.empty((pages, kv_heads, list_bytes), dtype=torch.uint8, device=device),
        torch.zeros((pages, kv_heads), dtype=torch.int32, device=device),
    )


def pack(
    raw: torch.Tensor,
    raw_pages: torch.Tensor,
    slots: Slots,
    places: torch.Tensor,
    kind: str,
    block_tokens: int,
) -> torch.Tensor:
    """Pack blocks of raw pages into ``slots``; returns the exceptions found, int32 ``[block, kv_head]``.

    ``raw`` is ``bfloat16 [page, kv_head, page_token, head_dim]``, ``raw_pages`` int32 ``[block, page of it]``,
    ``places`` int32 ``[block]`` says which of the slots to fill; kind is ``k`` or ``v``. Nothing is written behind
    a list. A block with more exceptions in any head than ``list_bytes // 2`` must stay raw: its slots then hold no
    complete list. For a head that the codec leaves raw, with more than 255 exceptions in 32 rows, or whose bases
    attention cannot take (`BASES`), at least one more than that is returned. Raises ValueError for shapes, types
    or sizes that do not fit.
    """
    arguments = check_pages(raw, raw_pages, slots, places, kind, block_tokens)
    lowest, highest = BASES[kind]
    # V fits half the registers of each thread, and twice the warps wait less; K would spill.
    halves = 2 if kind == "v" else 1
    counts = torch.empty((len(places), raw.shape[1]), dtype=torch.int32, device=raw.device)
    if len(places):
        _pack_kernel[(len(places), raw.shape[1])](
            raw.view(torch.int32),
            raw.view(torch.int16),
            raw_pages,
            slots.mains.view(torch.uint32),
            slots.mains,
            slots.lists.view(torch.int16),
            slots.entries,
            places,
            counts,
            raw.shape[1],
            **arguments,
            LOWEST_BASE=lowest,
            HIGHEST_BASE=highest,
            num_warps=halves * warps_of(block_tokens, raw.shape[3]),
            maxnreg=128 // halves,  # two programs on a multiprocessor
        )
    return counts


def check_pages(
    raw: torch.Tensor,
    raw_pages: torch.Tensor,
    slots: Slots,
    places: torch.Tensor,
    kind: str,
    block_tokens: int,
) -> dict[str, int | bool]:
    """The constants that the kernels are compiled for; ValueError for shapes, types or sizes that do not fit."""
    packed = {
        "mains": (slots.mains, torch.uint8, 3),
        "lists": (slots.lists, torch.uint8, 3),
        "entries": (slots.entries, torch.int32, 2),
    }
    check_blocks(raw, raw_pages, places, kind, block_tokens, HEAD_DIMS, packed)
    _, kv_heads, page_tokens, head_dim = raw.shape
    main, list_bytes, pages = head_main_bytes(block_tokens, head_dim), slots.lists.shape[2], len(slots.mains)
    for name, tensor, expected in (
        ("mains", slots.mains, (pages, kv_heads, main)),
        ("lists", slots.lists, (pages, kv_heads, list_bytes)),
        ("entries", slots.entries, (pages, kv_heads)),
    ):
        if tensor.shape != expected:
            raise ValueError(f"{name} must be {list(expected)}, got {list(tensor.shape)}")
    if list_bytes % LIST_UNIT_BYTES or not 0 < list_bytes < 256 * LIST_UNIT_BYTES:
        raise ValueError(f"a list must have a multiple of 16 bytes up to 4,080, got {list_bytes}")
    if slots.lists.numel() > MOST_LIST_BYTES:
        raise ValueError(f"lists must have at most {MOST_LIST_BYTES} bytes in all, got {slots.lists.numel()}")
    return {
        "BLOCK_TOKENS": block_tokens,
        "PAGE_TOKENS": page_tokens,
        "HEAD_DIM": head_dim,
        "MAIN_BYTES": main,
        "LIST_BYTES": list_bytes,
        "LIST_TILE": triton.next_power_of_2(list_bytes // 2),
        "ALONG_TOKENS": kind == "v",
    }
