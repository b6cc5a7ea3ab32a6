"""Steps of attention over `fixed4` pages, and raw blocks among packed ones (Gluon)."""

# Tuples change their length in code that only Triton runs.
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

# Triton 3.6 calls it thread_barrier.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

WEIGHT_SCALE = gl.constexpr(2.0**60)
MASKED = gl.constexpr(-1e38)
QUERY_BIAS = gl.constexpr(64)
QUERY_UNSCALE = gl.constexpr(2.0**64)
TINY_QUERY_UNSCALE = gl.constexpr(2.0**-64)


@gluon.jit
def copy_k(words, nibbles, tail, record_ptr, offsets):
    """Start copies of a record of K; the offsets are those of its byte words, its nibble words and the rest."""
    async_copy.async_copy_global_to_shared(words, record_ptr + offsets[0])
    async_copy.async_copy_global_to_shared(nibbles, record_ptr + offsets[1])
    async_copy.async_copy_global_to_shared(tail, record_ptr + offsets[2])


@gluon.jit
def copy_v(words, tail, record_ptr, offsets):
    """The same of V, whose planes are alike: the offsets of one and of the rest."""
    for plane in gl.static_range(3):
        from_ptr = record_ptr + (offsets[0] + plane * words.shape[1] * words.shape[2])
        async_copy.async_copy_global_to_shared(words.index(plane), from_ptr)
    async_copy.async_copy_global_to_shared(tail, record_ptr + offsets[1])


@gluon.jit
def true_tile(code, base, count, words, first_entry, row, column, ROWS_ARE_TOKENS: gl.constexpr):
    """BF16 values of a tile from its codes, its bases and the block's list of ``count`` exceptions.

    ``words`` are shared, one a row; row and column are the tokens and the channels of the tile.
    """
    bits = code.to(gl.uint16, bitcast=True)
    bits = bits + gl.where((bits & 0x780) != 0, base.to(gl.uint16) << 7, 0)
    for e in range(count):
        entry = gl.max(words.index(first_entry + e).load(row.type.layout), 0)
        token = (entry >> 24).to(gl.int32)
        channel = ((entry >> 16) & 255).to(gl.int32)
        if ROWS_ARE_TOKENS:
            here = (row == token)[:, None] & (column == channel)[None, :]
        else:
            here = (row == channel)[:, None] & (column == token)[None, :]
        bits = gl.where(here, (entry & 0xFFFF).to(gl.uint16), bits)
    return bits.to(gl.bfloat16, bitcast=True)


@gluon.jit
def weigh(scores, top, total, scale, weights, weight_lines):
    """One step of the online softmax; weights go to shared memory, for tiles of V and as lines of one token."""
    highest = gl.maximum(gl.maximum(scores[0], scores[1]), gl.maximum(scores[2], scores[3]))
    new_top = gl.maximum(top, gl.max(highest, 0) * scale)
    decay = gl.exp2(top - new_top)
    total = total * decay[None, :]
    for place in gl.static_range(4):
        weight = gl.exp2(scores[place] * scale - new_top[None, :])
        total = total + weight
        stored = (weight * WEIGHT_SCALE).to(gl.bfloat16)
        weights.index(place).store(stored)
        weight_lines.index(place).store(stored)
    return new_top, total, decay


@gluon.jit
def add_listed_keys(scores, count, words, first_entry, query_line, row):
    """Four tiles of scores with the exceptions of a K block; row is that of a tile: token row * 4 + place."""
    s0, s1, s2, s3 = scores
    heads: gl.constexpr = gl.SliceLayout(0, s0.type.layout)
    for e in range(count):
        entry = gl.max(words.index(first_entry + e).load(row.type.layout), 0)
        token = (entry >> 24).to(gl.int32)
        line = query_line.index(((entry >> 16) & 255).to(gl.int32)).load(heads).to(gl.float32)
        scaled = (entry << 16).to(gl.float32, bitcast=True) * TINY_QUERY_UNSCALE
        extra = gl.where(row == token // 4, scaled, 0.0)[:, None] * line[None, :]
        s0 += gl.where(token % 4 == 0, extra, 0.0)
        s1 += gl.where(token % 4 == 1, extra, 0.0)
        s2 += gl.where(token % 4 == 2, extra, 0.0)
        s3 += gl.where(token % 4 == 3, extra, 0.0)
    return s0, s1, s2, s3


@gluon.jit
def add_listed_values(listed, count, words, first_entry, weight_line, channel, ROWS_OF_PLACE: gl.constexpr):
    """The weighted sum of exceptions with those of a V block. Four at a time, unused entries are zero: their loads
    do not wait for one another."""
    heads: gl.constexpr = gl.SliceLayout(0, listed.type.layout)
    for e in range(0, count, 4):
        for step in gl.static_range(4):
            entry = gl.max(words.index(first_entry + e + step).load(channel.type.layout), 0)
            token = (entry >> 24).to(gl.int32)
            line = weight_line.index(token % 4 * ROWS_OF_PLACE + token // 4).load(heads).to(gl.float32)
            at = channel == ((entry >> 16) & 255).to(gl.int32)
            value = gl.where(at, (entry << 16).to(gl.float32, bitcast=True), 0.0)
            listed += value[:, None] * line[None, :]
    return listed


@gluon.jit
def attend_raw(
    q,  # a tuple of bfloat16 [C, ROWS], MMA operands of C channels each
    top,
    total,
    acc,
    listed,
    early,  # shared bfloat16 [4, U, HEAD_DIM], as all of the following
    late,
    weights,
    weight_lines,
    weight_tiles,
    raw_k_ptr,
    raw_v_ptr,
    row_ptr,  # of the table
    head,
    kv_heads,
    first,
    last,
    raw_tokens,
    raw_skip,
    scale_log2,
    BLOCK_TOKENS: gl.constexpr,
    RAW_TOKENS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    A: gl.constexpr,
    B: gl.constexpr,
    mma: gl.constexpr,
    COPY: gl.constexpr,
):
    """The raw blocks ``first`` to ``last`` of one head, in the same tiles as packed ones."""
    U: gl.constexpr = BLOCK_TOKENS // 8
    a_row = gl.arange(0, 2 * U, layout=gl.SliceLayout(1, A))
    C: gl.constexpr = q[0].shape[0]
    a_channel = gl.arange(0, C, layout=gl.SliceLayout(0, A))
    c_unit = gl.arange(0, U, layout=gl.SliceLayout(1, COPY))
    c_channel = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, COPY))
    row = gl.arange(0, 2 * U, layout=gl.SliceLayout(1, mma))
    zero = gl.zeros([2 * U, q[0].shape[1]], gl.float32, layout=mma)
    page_stride = kv_heads * RAW_TOKENS * HEAD_DIM
    for block in range(first, last):
        for place in gl.static_range(8):
            token = gl.minimum(block * BLOCK_TOKENS + c_unit * 8 + place, raw_tokens - 1)
            held = gl.load(row_ptr + token // RAW_TOKENS).to(gl.int64) * page_stride
            held = held + (head * RAW_TOKENS + token % RAW_TOKENS) * HEAD_DIM
            from_ptr = raw_v_ptr + held[:, None] + c_channel[None, :]
            if place < 4:
                async_copy.async_copy_global_to_shared(early.index(place), from_ptr)
            else:
                async_copy.async_copy_global_to_shared(late.index(place - 4), from_ptr)
        async_copy.commit_group()
        scores = ()
        for place in gl.static_range(4):
            token = gl.minimum(block * BLOCK_TOKENS + a_row * 4 + place, raw_tokens - 1)
            held = gl.load(row_ptr + token // RAW_TOKENS).to(gl.int64) * page_stride
            held = held + (head * RAW_TOKENS + token % RAW_TOKENS) * HEAD_DIM
            from_ptr = raw_k_ptr + held[:, None] + a_channel[None, :]
            score = zero
            for c in gl.static_range(HEAD_DIM // C):
                score = mma_v2(gl.load(from_ptr + c * C), q[c], score)
            token = block * BLOCK_TOKENS + row * 4 + place
            inside = ((token < raw_tokens) & (token >= raw_skip))[:, None]
            scores = scores + (gl.where(inside, score, MASKED),)  # noqa: RUF005
        top, total, decay = weigh(scores, top, total, scale_log2, weights, weight_lines)
        async_copy.wait_group(0)
        barrier()
        acc = acc * decay[None, :]
        listed = listed * decay[None, :]
        for plane in gl.static_range(2):
            for place in gl.static_range(4):
                if plane == 0:
                    value = early.index(place).permute([1, 0]).load(A)
                else:
                    value = late.index(place).permute([1, 0]).load(A)
                acc = mma_v2(value, weight_tiles.index(2 * place + plane).load(B), acc)
        barrier()
    return top, total, acc, listed
