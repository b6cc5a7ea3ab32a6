"""Pack raw BF16 blocks into `fixed3` main parts and lists on the device; the bytes are those of the codec.

One program per block and KV head. Pairs (`kvfold.codec.fixed3`) are computed in tiles, both halves of a word at
once. For kind k a tile has one token of each row of the list: ``[row, pair of channels]``; for kind v one pair of
every group: ``[32 tokens, channel]``.
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
from kvfold.kernels.fixed3_lists import bit_count, place_of_flag, store_flags_k, store_flags_v, store_list
from kvfold.kernels.fixed3_words import store_words_k, store_words_v
from kvfold.kernels.fixed4_pack import check_blocks, token_starts, warps_of

TOP_BITS = tl.constexpr(0x80008000)
MOST_LISTED = tl.constexpr(MOST_IN_GROUP)
LIST_GROUP = tl.constexpr(GROUP_ROWS)
LIST_UNIT_BYTES = 16  # lists start at multiples of this, and their sizes are
MOST_LIST_BYTES = LIST_UNIT_BYTES << 24  # of all lists of a side: an entry has 24 bits for a start
HEAD_DIMS = (64, 128)
# Of a K block: 2 ** (base - 64) must be a BF16 number. Sums of V stand as 2 ** (64 - base) of what they are, never
# larger; from block to block they are rescaled by 2 ** (base - next base), a float32 between any two of these.
BASES = {"k": (1, 191), "v": (65, 191)}


@triton.jit
def _tile(
    pairs_ptr, low_start, high_start, number: tl.constexpr, HEAD_DIM: tl.constexpr, ALONG_TOKENS: tl.constexpr
):
    """Both patterns of each pair of a tile in a word."""
    column = tl.arange(0, HEAD_DIM // 2)[None, :] + number * (HEAD_DIM // 2)
    low = tl.load(pairs_ptr + low_start[:, None] // 2 + column).to(tl.uint32, bitcast=True)
    if ALONG_TOKENS:
        high = tl.load(pairs_ptr + high_start[:, None] // 2 + column).to(tl.uint32, bitcast=True)
        return tl.interleave((low & 0xFFFF) | (high << 16), (low >> 16) | (high & 0xFFFF0000))
    else:
        return low


@triton.jit
def _upper_base(top):
    """In the bits of a pattern, from what `_upper_bases` finds the largest."""
    return (tl.maximum((top >> 24).to(tl.int32) - 8, 1) << 7).to(tl.uint32)


@triton.jit
def _upper_bases(words, ALONG_TOKENS: tl.constexpr):
    """Of each column, for both halves, bases of the windows that end at the largest exponents."""
    # Top bytes are exponents plus one: the one that is not finite becomes the smallest.
    low = (words[0] << 17) + 0x01000000
    high = (words[0] << 1) + 0x01000000
    for number in tl.static_range(1, len(words)):
        low = tl.maximum(low, (words[number] << 17) + 0x01000000)
        high = tl.maximum(high, (words[number] << 1) + 0x01000000)
    if ALONG_TOKENS:
        low = _upper_base(tl.max(tl.maximum(low, high), 0))
        return low | (low << 16)
    else:
        # Reduced over rows together: each reduction waits for all warps.
        low, high = tl.split(_upper_base(tl.max(tl.join(low, high), 0)))
        return low | (high << 16)


@triton.jit
def _outside(word, base):
    """The top bit of each half that the window from ``base`` on leaves out, and of those that one below does."""
    # 0x8000 more than magnitude - base: no half borrows from the other.
    distance = (word | TOP_BITS) - base
    out = ((distance ^ 0xFFFFFFFF) | (distance - 0x04000400)) & TOP_BITS
    lower_out = (((distance + 0x00800080) ^ 0xFFFFFFFF) | (distance - 0x03800380)) & TOP_BITS
    return out, lower_out


@triton.jit
def _shifted(word, bits: tl.constexpr):
    """``word >> bits``; as a shift, compilers would mask the word behind it, one instruction more."""
    return word if bits == 0 else tl.umulhi(word, tl.full([1, 1], 1 << (32 - bits), tl.uint32))


@triton.jit
def _flags(words, base, first: tl.constexpr, count: tl.constexpr, ALONG_TOKENS: tl.constexpr):
    """A bit for each half in so many tiles that is outside its window, and of the lower windows."""
    flags = tl.zeros_like(words[0])
    lower_flags = tl.zeros_like(words[0])
    for number in tl.static_range(count):
        out, lower_out = _outside(words[first + number], base[None, :])
        flags += _shifted(out, 15 - place_of_flag(number, ALONG_TOKENS))
        lower_flags += _shifted(lower_out, 15 - place_of_flag(number, ALONG_TOKENS))
    return flags, lower_flags


@triton.jit
def _takes_lower(flags, lower_flags, base, ALONG_TOKENS: tl.constexpr):
    """Ones in each half of a column whose lower window takes more elements."""
    if ALONG_TOKENS:
        gain = tl.sum(bit_count(flags[0]) - bit_count(lower_flags[0]), 0)
        return tl.where(gain > 0, 0xFFFFFFFF, 0).to(tl.uint32)  # a block with the smallest base stays raw
    else:
        # In each byte what a token of the rows' pairs and a half count, up to 128.
        out = flags[0]
        lower_out = lower_flags[0]
        for pair in tl.static_range(1, len(flags)):
            out += flags[pair]
            lower_out += lower_flags[pair]
        out, lower_out = tl.split(tl.sum(tl.join(out, lower_out), 0))
        out = (out & 0x00FF00FF) + ((out >> 8) & 0x00FF00FF)
        lower_out = (lower_out & 0x00FF00FF) + ((lower_out >> 8) & 0x00FF00FF)
        low = ((out & 0xFFFF) > (lower_out & 0xFFFF)) & ((base & 0xFFFF) > 0x80)
        high = ((out >> 16) > (lower_out >> 16)) & ((base >> 16) > 0x80)
        return (tl.where(low, 0xFFFF, 0) | tl.where(high, 0xFFFF0000, 0)).to(tl.uint32)


@triton.jit
def _codes(word, base, flags, place: tl.constexpr):
    """Codes of a pair in their places: a word that has bits 9 to 2 of both, and one that has the rest."""
    is_out = ((flags >> place) & 0x00010001) * 0xFFFF
    distance = (word | TOP_BITS) - base
    return distance ^ ((distance ^ (word << 2)) & is_out), word & (is_out ^ 0xFFFFFFFF)


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
    TILES: tl.constexpr = 16 if ALONG_TOKENS else ROW_TOKENS
    PARTS: tl.constexpr = 1 if ALONG_TOKENS else TILES // 2  # whose words are computed on their own
    PLANE: tl.constexpr = BLOCK_TOKENS * HEAD_DIM // 16
    first_token = tl.arange(0, ROWS) * ROW_TOKENS
    block_pages_ptr = pages_ptr + block * (BLOCK_TOKENS // PAGE_TOKENS)
    low_start = token_starts(block_pages_ptr, first_token, head, kv_heads, PAGE_TOKENS, HEAD_DIM)
    high_start = low_start
    if ALONG_TOKENS:
        high_start = token_starts(block_pages_ptr, first_token + 16, head, kv_heads, PAGE_TOKENS, HEAD_DIM)
    words = ()
    for number in tl.static_range(TILES):
        words = words + (_tile(pairs_ptr, low_start, high_start, number, HEAD_DIM, ALONG_TOKENS),)  # noqa: RUF005
    base = _upper_bases(words, ALONG_TOKENS)
    upper_flags = ()
    lower_flags = ()
    for part in tl.static_range(PARTS):
        upper, lower = _flags(words, base, part * (TILES // PARTS), TILES // PARTS, ALONG_TOKENS)
        upper_flags = upper_flags + (upper,)  # noqa: RUF005
        lower_flags = lower_flags + (lower,)  # noqa: RUF005
    is_lower = _takes_lower(upper_flags, lower_flags, base, ALONG_TOKENS)
    base -= is_lower & 0x00800080
    flags = ()
    for part in tl.static_range(PARTS):
        upper = upper_flags[part]
        flags = flags + (upper ^ ((upper ^ lower_flags[part]) & is_lower[None, :]),)  # noqa: RUF005

    slot = tl.load(places_ptr + block).to(tl.int64) * kv_heads + head
    main_ptr = words_ptr + slot * (MAIN_BYTES // 4)
    base_ptr = bytes_ptr + slot * MAIN_BYTES + 22 * PLANE
    low_base = (base >> 7) & 0xFF
    high_base = base >> 23
    channel = tl.arange(0, HEAD_DIM)
    if ALONG_TOKENS:
        tl.store(base_ptr + channel, low_base.to(tl.uint8))
    else:
        tl.store(base_ptr + channel, tl.interleave(low_base, high_base).to(tl.uint8))

    # Flags and ends of their words lie where words will be.
    flags_ptr = main_ptr
    ends_ptr = main_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + PLANE
    LIST_ROWS: tl.constexpr = HEAD_DIM if ALONG_TOKENS else ROWS
    ROW_WORDS: tl.constexpr = ROWS if ALONG_TOKENS else 8
    if ALONG_TOKENS:
        store_flags_v(flags_ptr, flags[0])
    else:
        store_flags_k(flags_ptr, flags, HEAD_DIM)
    tl.debug_barrier()
    row = tl.arange(0, LIST_ROWS)
    place = row[:, None] * ROW_WORDS + tl.arange(0, ROW_WORDS)[None, :]
    counts = bit_count(tl.load(flags_ptr + place))
    word_ends = tl.cumsum(tl.reshape(counts, (LIST_ROWS * ROW_WORDS,)), 0)
    word_ends = tl.reshape(word_ends, (LIST_ROWS, ROW_WORDS))
    tl.store(ends_ptr + place, word_ends)
    row_ends = tl.max(word_ends, 1)
    GROUP: tl.constexpr = min(LIST_ROWS, LIST_GROUP)
    starts = tl.reshape(tl.min(word_ends - counts, 1), (LIST_ROWS // GROUP, GROUP))
    ends = tl.reshape(row_ends, (LIST_ROWS // GROUP, GROUP)) - tl.min(starts, 1)[:, None]
    ends = tl.reshape(ends, (LIST_ROWS,))
    tl.store(base_ptr + HEAD_DIM + row, ends.to(tl.uint8))
    if LIST_ROWS < HEAD_DIM:
        tl.store(base_ptr + HEAD_DIM + channel, tl.zeros([HEAD_DIM], tl.uint8), mask=channel >= LIST_ROWS)
    # What must stay raw counts as more than fit.
    TOO_MANY: tl.constexpr = LIST_BYTES // 2 + 1
    is_far = (tl.minimum(low_base, high_base) < LOWEST_BASE) | (
        tl.maximum(low_base, high_base) > HIGHEST_BASE
    )
    count = tl.max(tl.maximum(row_ends, tl.where(ends > MOST_LISTED, TOO_MANY, 0)), 0)
    count = tl.maximum(count, tl.max(tl.where(is_far, TOO_MANY, 0), 0))
    tl.debug_barrier()
    if count < TOO_MANY:
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

    for part in tl.static_range(PARTS):
        bytes_ = ()
        rests = ()
        for number in tl.static_range(TILES // PARTS):
            # Loaded again: to keep them takes more registers than there are.
            word = _tile(pairs_ptr, low_start, high_start, part * 2 + number, HEAD_DIM, ALONG_TOKENS)
            byte, rest = _codes(word, base[None, :], flags[part], place_of_flag(number, ALONG_TOKENS))
            bytes_ = bytes_ + (byte,)  # noqa: RUF005
            rests = rests + (rest,)  # noqa: RUF005
        if ALONG_TOKENS:
            store_words_v(main_ptr, bytes_, rests, PLANE)
        else:
            store_words_k(main_ptr, bytes_, rests, part, PARTS, PLANE)
    units = tl.where(count < TOO_MANY, (count + 7) // 8, 0).to(tl.int64)
    tl.store(entries_ptr + slot, (slot * (LIST_BYTES // 16) << 8 | units).to(tl.int32))
    tl.store(counts_ptr + block * kv_heads + head, count)


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
            num_warps=warps_of(block_tokens, raw.shape[3]),
            maxnreg=128,  # two programs on a multiprocessor
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
