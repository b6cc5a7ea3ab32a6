"""Pack raw BF16 blocks into `fixed4` slots on the device; the bytes are those of the codec.

One program per block and KV head. The layout is that of `kvfold.codec.fixed4`; token t of a block is unit t // 8,
place t % 8, and the eight tiles of a block are the tokens of one place each: ``[U, HEAD_DIM]``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvfold.codec.fixed4 import exception_capacity, head_record_bytes

BYTE_BITS = tl.constexpr(0x07F807F8)
NIBBLE_BITS = tl.constexpr(0x80078007)
LINE_BYTES = 128  # a copy of a row that starts inside a cache line takes one more request than it need
TOP_BITS = tl.constexpr(0x80008000)
# Of a K block: a query below 2 ** 31 times 2 ** (base - 64) stays finite in BF16 (`kvfold.kernels.fixed4_gluon`).
MOST_K_BASE = tl.constexpr(160)
# Of a V block: sums are rescaled by 2 ** (base - next base), a float32 from any base up to this one to any other.
MOST_V_BASE = tl.constexpr(127)
# Sorts last: no entry is larger.
UNUSED = tl.constexpr(0xFFFFFFFF)


@triton.jit
def rotate(word, bits: tl.constexpr):
    """A uint32 rotated to the left."""
    return word if bits % 32 == 0 else (word << (bits % 32)) | (word >> (32 - bits % 32))


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def token_starts(pages_ptr, token, head, kv_heads, PAGE_TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Where tokens of a block start in the pool of raw pages, of which the block has those at ``pages_ptr``."""
    page = tl.load(pages_ptr + token // PAGE_TOKENS).to(tl.int64)
    return ((page * kv_heads + head) * PAGE_TOKENS + token % PAGE_TOKENS) * HEAD_DIM


@triton.jit
def word_offsets(ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, ALONG_TOKENS: tl.constexpr):
    """Offsets of plane 0 in a slot, the two words of a pair side by side; rows are channels where ALONG_TOKENS."""
    if ALONG_TOKENS:
        # [plane][channel][two words of each row]
        return tl.arange(0, HEAD_DIM)[:, None] * (2 * ROWS) + tl.arange(0, 2 * ROWS)[None, :]
    else:
        # [unit][plane][two words of each pair of channels]
        return tl.arange(0, ROWS)[:, None] * (3 * HEAD_DIM) + tl.arange(0, HEAD_DIM)[None, :]


@triton.jit
def pair_words(pairs_ptr, patterns_ptr, place, row_start, ROW_TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Both patterns of each pair in a word: a token's neighbours (ROW_TOKENS 8), or tokens 8 apart (16)."""
    if ROW_TOKENS == 8:
        column = tl.arange(0, HEAD_DIM // 2)
        both = tl.load(pairs_ptr + (row_start + place * HEAD_DIM)[:, None] // 2 + column[None, :])
        return both.to(tl.uint32, bitcast=True)
    else:
        column = tl.arange(0, HEAD_DIM)
        tile_ptr = patterns_ptr + (row_start + place * HEAD_DIM)[:, None] + column[None, :]
        low = tl.load(tile_ptr).to(tl.uint16, bitcast=True).to(tl.uint32)
        high = tl.load(tile_ptr + 8 * HEAD_DIM).to(tl.uint16, bitcast=True).to(tl.uint32)
        return low | (high << 16)


@triton.jit
def _codes(word, base):
    """12-bit codes of a pair in their places, and the top bit of each half that is an exception.

    ``base`` has the bases of both halves in the bits of a pattern. Both halves are computed at once: no step
    carries from one into the other.
    """
    distance = (word | TOP_BITS) - base  # 0x8000 more than magnitude - base
    is_above = distance & TOP_BITS
    offset = distance & (is_above - (is_above >> 15))  # 0 where the magnitude is below the base
    is_nonzero = (word & 0x7FFF7FFF) + 0x7FFF7FFF  # in the top bits, as the next two
    is_coded = offset + 0x7F807F80  # at least 0x80
    is_far = offset + 0x78007800  # at least 0x800
    out = ((is_nonzero & (is_coded ^ TOP_BITS)) | is_far) & TOP_BITS
    kept = (out | (out - (out >> 15))) ^ 0xFFFFFFFF
    code = (offset | (word & TOP_BITS)) & kept
    return code, out


@triton.jit
def _list(
    list_ptr,
    count_ptr,
    word,
    out,
    token,
    column,
    HIGH_TOKENS: tl.constexpr,
    HIGH_CHANNELS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Append the exceptions of both halves of pairs in any order; entries past the end are counted only."""
    low_out = (out & 0x8000) != 0
    high_out = (out >> 31) != 0
    added = low_out.to(tl.int32) + high_out.to(tl.int32)
    free = tl.atomic_add(count_ptr + (token + column) * 0, added, mask=added > 0, sem="relaxed")
    low_entry = (token << 24 | column << 16).to(tl.uint32) | (word & 0xFFFF)
    tl.store(list_ptr + free, low_entry, mask=low_out & (free < CAPACITY))
    free += low_out.to(tl.int32)
    high_entry = (token + HIGH_TOKENS << 24 | column + HIGH_CHANNELS << 16).to(tl.uint32) | (word >> 16)
    tl.store(list_ptr + free, high_entry, mask=high_out & (free < CAPACITY))


@triton.jit
def _pack_kernel(
    pairs_ptr,  # int32 view of patterns [page, kv_heads, PAGE_TOKENS, HEAD_DIM]
    patterns_ptr,  # int16 view of the same
    pages_ptr,  # int32 [blocks, BLOCK_TOKENS / PAGE_TOKENS], the raw pages of each block
    words_ptr,  # uint32 view of the records
    bytes_ptr,  # uint8 view of the records
    records_ptr,  # int32 [blocks], where each block's records go
    counts_ptr,  # int32 [blocks, kv_heads], exceptions found
    kv_heads,
    BLOCK_TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CAPACITY: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    ALONG_TOKENS: tl.constexpr,
):
    block = tl.program_id(0)
    head = tl.program_id(1)
    # A row of pairs is one unit of 8 tokens, or two of them whose tokens are paired.
    ROW_TOKENS: tl.constexpr = 16 if ALONG_TOKENS else 8
    ROWS: tl.constexpr = BLOCK_TOKENS // ROW_TOKENS
    COLUMNS: tl.constexpr = HEAD_DIM if ALONG_TOKENS else HEAD_DIM // 2
    first_token = tl.arange(0, ROWS) * ROW_TOKENS
    block_pages_ptr = pages_ptr + block * (BLOCK_TOKENS // PAGE_TOKENS)
    row_start = token_starts(block_pages_ptr, first_token, head, kv_heads, PAGE_TOKENS, HEAD_DIM)

    # Exponents plus 0x80 in the upper half of a word: the one that is not finite becomes the most negative.
    top_low = tl.full([ROWS, COLUMNS], 0x800000, tl.int32)
    top_high = top_low
    words = ()
    for place in tl.static_range(8):
        word = pair_words(pairs_ptr, patterns_ptr, place, row_start, ROW_TOKENS, HEAD_DIM)
        words = words + (word,)  # type: ignore[assignment]  # noqa: RUF005
        raised = (word & 0x7F807F80) + 0x00800080
        top_low = tl.maximum(top_low, (raised << 16).to(tl.int32, bitcast=True))
        top_high = tl.maximum(top_high, raised.to(tl.int32, bitcast=True))
    if ALONG_TOKENS:
        top_low = tl.maximum(top_low, top_high)
        top_high = top_low
    # Of each column, in the bits of a pattern: the largest of 15 exponents is the largest there is.
    base_low = tl.maximum((tl.max(top_low, 0) >> 16) - 0x80 - 0x780, 0)
    base_high = tl.maximum((tl.max(top_high, 0) >> 16) - 0x80 - 0x780, 0)
    base = (base_low | (base_high << 16)).to(tl.uint32)[None, :]

    slot_start = (tl.load(records_ptr + block) * kv_heads + head).to(tl.int64) * SLOT_BYTES
    list_start: tl.constexpr = BLOCK_TOKENS * HEAD_DIM * 3 // 2
    base_start: tl.constexpr = list_start + 4 * CAPACITY
    count_start: tl.constexpr = base_start + HEAD_DIM
    plane: tl.constexpr = HEAD_DIM * 2 * ROWS if ALONG_TOKENS else HEAD_DIM
    word_ptr = words_ptr + slot_start // 4 + word_offsets(ROWS, HEAD_DIM, ALONG_TOKENS)
    places_out = tl.zeros([ROWS, COLUMNS], tl.int32)  # a bit for each place that has an exception
    for place in tl.static_range(8):
        code, out = _codes(words[place], base)
        places_out |= tl.where(out != 0, 1 << place, 0)
        nibble = rotate(code & NIBBLE_BITS, 4 * (place % 4))
        if place % 4 == 0:
            nibbles = nibble
        else:
            nibbles |= nibble
        if place % 2 == 0:
            byte_word = code & BYTE_BITS
        else:
            byte_word |= rotate(code & BYTE_BITS, 24)
        if place % 4 == 1:
            first_word = byte_word
        if place % 4 == 3:
            tl.store(word_ptr + place // 4 * plane, _side_by_side(first_word, byte_word, ALONG_TOKENS))
        if place == 3:
            first_nibbles = nibbles
    tl.store(word_ptr + 2 * plane, _side_by_side(first_nibbles, nibbles, ALONG_TOKENS))

    list_ptr = words_ptr + (slot_start + list_start) // 4
    slot = tl.arange(0, CAPACITY)
    count_ptr = counts_ptr + block * kv_heads + head
    count = 0
    entries = tl.zeros([CAPACITY], tl.uint32)
    places_out = tl.reduce(tl.reduce(places_out, 0, _either), 0, _either)
    if places_out != 0:
        tl.store(count_ptr, 0)
        tl.store(list_ptr + slot, tl.full([CAPACITY], UNUSED, tl.uint32))
        tl.debug_barrier()  # an empty list before the first entry
        column = tl.arange(0, COLUMNS)[None, :]
        for at in range(8):
            if (places_out >> at) & 1:
                listed = pair_words(pairs_ptr, patterns_ptr, at, row_start, ROW_TOKENS, HEAD_DIM)
                _, listed_out = _codes(listed, base)
                # The other half of a pair is 8 tokens, or one channel, further.
                _list(
                    list_ptr,
                    count_ptr,
                    listed,
                    listed_out,
                    first_token[:, None] + at,
                    column if ALONG_TOKENS else 2 * column,
                    8 if ALONG_TOKENS else 0,
                    0 if ALONG_TOKENS else 1,
                    CAPACITY,
                )
        tl.debug_barrier()  # all entries before they are read
        # A list that overflowed belongs to no page: the block stays raw.
        count = tl.load(count_ptr, volatile=True)
        entries = tl.sort(tl.load(list_ptr + slot, volatile=True))
        entries = tl.where(slot < count, entries, 0)
        tl.debug_barrier()  # read by all before the count may be raised
    tl.store(list_ptr + slot, entries)
    top = tl.maximum(tl.max(base_low, 0), tl.max(base_high, 0)) >> 7
    stays_raw = top > (MOST_V_BASE if ALONG_TOKENS else MOST_K_BASE)
    tl.store(count_ptr, tl.where(stays_raw, tl.maximum(count, CAPACITY + 1), count))
    base_ptr = bytes_ptr + slot_start + base_start + tl.arange(0, COLUMNS) * (HEAD_DIM // COLUMNS)
    tl.store(base_ptr, (base_low >> 7).to(tl.uint8))
    if not ALONG_TOKENS:
        tl.store(base_ptr + 1, (base_high >> 7).to(tl.uint8))
    tail = tl.arange(0, 32)
    tl.store(
        words_ptr + (slot_start + count_start) // 4 + tail,
        tl.where(tail == 0, count, 0).to(tl.uint32),
        mask=tail < (SLOT_BYTES - count_start) // 4,
    )


@triton.jit
def _side_by_side(first, second, ALONG_TOKENS: tl.constexpr):
    """Two words of each pair next to one another, channels as rows where tokens are paired."""
    if ALONG_TOKENS:
        first = tl.trans(first)
        second = tl.trans(second)
    return tl.interleave(first, second)


def slot_bytes(block_tokens: int, head_dim: int) -> int:
    """Bytes of one head of a packed page in a pool: its record, zeros up to whole cache lines."""
    used = head_record_bytes(block_tokens, head_dim)
    return used + -used % LINE_BYTES


def pack(
    raw: torch.Tensor,
    raw_pages: torch.Tensor,
    records: torch.Tensor,
    places: torch.Tensor,
    kind: str,
    block_tokens: int,
) -> torch.Tensor:
    """Pack blocks of raw pages into ``records``; returns the exceptions found, int32 ``[block, kv_head]``.

    ``raw`` is ``bfloat16 [page, kv_head, page_token, head_dim]``, ``raw_pages`` int32 ``[block, page of it]``,
    ``records`` is ``uint8 [page, kv_head, slot_bytes]``, ``places`` int32 ``[block]`` says which of them to fill;
    kind is ``k`` or ``v``. A block with more exceptions in any head than `exception_capacity` must stay raw:
    its records then hold no complete list. A block with a base above 160 in K (values of 2 ** 49 and more) or
    above 127 in V (2 ** 16) must stay raw too, since attention cannot scale a query or a sum by it: one exception
    more than fit is returned for it. Raises ValueError for shapes, types or sizes that do not fit.
    """
    arguments = check_pages(raw, raw_pages, records, places, kind, block_tokens)
    counts = torch.empty((len(places), raw.shape[1]), dtype=torch.int32, device=raw.device)
    if len(places):
        _pack_kernel[(len(places), raw.shape[1])](
            raw.view(torch.int32),
            raw.view(torch.int16),
            raw_pages,
            records.view(torch.uint32),
            records,
            places,
            counts,
            raw.shape[1],
            **arguments,
            num_warps=warps_of(block_tokens, raw.shape[3]),
            maxnreg=128,  # two programs on a multiprocessor are worth more than the few spills
        )
    return counts


def warps_of(block_tokens: int, head_dim: int) -> int:
    """Warps that hold a block of one head in 64 registers of each thread."""
    return max(1, min(16, block_tokens * head_dim // 4096))


def check_pages(
    raw: torch.Tensor,
    raw_pages: torch.Tensor,
    records: torch.Tensor,
    places: torch.Tensor,
    kind: str,
    block_tokens: int,
) -> dict[str, int | bool]:
    """The constants that the kernels are compiled for; ValueError for shapes, types or sizes that do not fit."""
    packed = {"records": (records, torch.uint8, 3)}
    check_blocks(raw, raw_pages, places, kind, block_tokens, (64, 128, 256), packed)
    _, kv_heads, page_tokens, head_dim = raw.shape
    slot = slot_bytes(block_tokens, head_dim)
    if records.shape[1:] != (kv_heads, slot):
        raise ValueError(f"records must be [page, {kv_heads}, {slot}], got {list(records.shape)}")
    return {
        "BLOCK_TOKENS": block_tokens,
        "PAGE_TOKENS": page_tokens,
        "HEAD_DIM": head_dim,
        "CAPACITY": exception_capacity(head_dim),
        "SLOT_BYTES": slot,
        "ALONG_TOKENS": kind == "v",
    }


def check_blocks(
    raw: torch.Tensor,
    raw_pages: torch.Tensor,
    places: torch.Tensor,
    kind: str,
    block_tokens: int,
    head_dims: tuple[int, ...],
    packed: dict[str, tuple[torch.Tensor, torch.dtype, int]],
) -> None:
    """Refuse what no packer takes; what is packed comes by name, with its type and its number of axes."""
    for name, tensor, dtype, axes in (
        ("raw", raw, torch.bfloat16, 4),
        ("raw_pages", raw_pages, torch.int32, 2),
        ("places", places, torch.int32, 1),
        *((name, *expected) for name, expected in packed.items()),
    ):
        if tensor.dtype != dtype or tensor.dim() != axes or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {dtype} of {axes} axes, got {tensor.dtype} {list(tensor.shape)}"
            )
        if tensor.device != raw.device:
            raise ValueError(f"{name} must be on the device of raw, {raw.device}, got {tensor.device}")
    if kind not in ("k", "v"):
        raise ValueError(f"kind must be 'k' or 'v', got {kind!r}")
    _, _, page_tokens, head_dim = raw.shape
    if head_dim not in head_dims or block_tokens not in (64, 128, 256):
        raise ValueError(
            f"head_dim must be {' or '.join(map(str, head_dims))} and block_tokens 64, 128 or 256, "
            f"got {head_dim} and {block_tokens}"
        )
    check_page_tokens(page_tokens, block_tokens)
    if raw_pages.shape != (len(places), block_tokens // page_tokens):
        raise ValueError(
            f"raw_pages must be {[len(places), block_tokens // page_tokens]}, got {list(raw_pages.shape)}"
        )


def check_page_tokens(page_tokens: int, block_tokens: int) -> None:
    """Refuse raw pages that kernels cannot take."""
    if page_tokens % 16 or block_tokens % page_tokens:
        raise ValueError(
            f"a raw page must hold a multiple of 16 tokens that divides block_tokens ({block_tokens}), "
            f"got {page_tokens}"
        )
