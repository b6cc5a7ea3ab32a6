"""Decode attention over `fixed4` pages, decoded straight into tensor-core operands (NVIDIA, Ampere and later).

Per block of packed tokens a program copies the records of its KV head into shared memory, loads their words in the
layout of an MMA operand, and turns byte words and nibble words into registers of two BF16 codes. Nothing is added
to the codes: a channel's base is a power of two, so it goes into the query (K) or into the accumulator (V), where
it is exact. Tokens (K) and channels (V) are the rows of the products and the query heads their 8 or 16 columns,
which wastes half as much of a tile at 4 heads per group as heads in 16 rows would. K takes four tiles, one per
place (`kvfold.kernels.fixed4_layout`), V in eight, one per plane and place.

Powers of two keep every intermediate normal and cancel at the end: the query is scaled by 2 ** (base - 64),
weights by 2 ** 60. They are exact while bases of K are at most 191 and query times key is far from the ends of
float32.

Exceptions are coded as zero and added from the block's list: products of two BF16 values, exact, but out of order
in the float32 sums. With ``IN_TILE`` they are put into the tile instead, and bases are added to the codes: slow,
with the sums in the order of raw pages.
"""

# Tuples change their length in code that only Triton runs.
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kvfold.kernels.fixed4_layout import DECODE_K, DECODE_V

# Triton 3.6 calls it thread_barrier.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# Tuples grow by `+` below: Triton compiles no starred expressions.

WEIGHT_SCALE = gl.constexpr(2.0**60)
QUERY_BIAS = gl.constexpr(64)
QUERY_UNSCALE = gl.constexpr(2.0**64)
TINY_QUERY_UNSCALE = gl.constexpr(2.0**-64)
MASKED = gl.constexpr(-1e38)


@gluon.jit
def _true_values(code, base):
    """Bits of BF16 values from codes and bases of the same shape."""
    bits = code.to(gl.uint16, bitcast=True)
    return bits + gl.where((bits & 0x780) != 0, base.to(gl.uint16) << 7, 0)


@gluon.jit
def _weights(scores, top, total, scale, weights, weight_lines):
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
def attend_kernel(
    q_ptr,  # bfloat16 [batch, kv_heads * GROUP, HEAD_DIM]
    k_words_ptr,  # uint32 view of [page, kv_heads, SLOT_BYTES]
    v_words_ptr,
    raw_k_ptr,  # bfloat16 [raw page, kv_heads, RAW_TOKENS, HEAD_DIM]
    raw_v_ptr,
    packed_table_ptr,  # int32 [batch, packed_width]
    packed_counts_ptr,  # int32 [batch]
    packed_skips_ptr,  # int32 [batch]
    raw_table_ptr,  # int32 [batch, raw_width]
    raw_tokens_ptr,  # int32 [batch]
    raw_skips_ptr,  # int32 [batch]
    part_ptr,  # float32 [batch, kv_heads, splits, ROWS, HEAD_DIM]; the output itself where there is one split
    lse_ptr,  # float32 [batch, kv_heads, splits, ROWS]
    packed_width,
    raw_width,
    scale_log2,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,  # 8 or 16: GROUP padded
    HEAD_DIM: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
    RAW_TOKENS: gl.constexpr,
    SLOT_BYTES: gl.constexpr,
    CAPACITY: gl.constexpr,
    NIBBLES: gl.constexpr,  # nibble_layout
    WRITTEN: gl.constexpr,  # weight_layouts
    READ: gl.constexpr,
    WARPS: gl.constexpr,
    WINDOW: gl.constexpr,  # whether skips may be other than 0
    IN_TILE: gl.constexpr,
    IS_WHOLE: gl.constexpr,  # one split
    EXCEPTIONS: gl.constexpr,  # only a measurement of their cost leaves them out
):
    U: gl.constexpr = BLOCK_TOKENS // 8
    LIST_START: gl.constexpr = BLOCK_TOKENS * HEAD_DIM * 3 // 2
    SLOT_WORDS: gl.constexpr = SLOT_BYTES // 4
    # What follows the words is a power of two in every shape that is allowed; in shared memory it is turned, so
    # that bases come first (a slice starts at a multiple of its length), then the count, and exceptions last.
    TAIL: gl.constexpr = SLOT_WORDS - LIST_START // 4
    COUNT: gl.constexpr = HEAD_DIM // 4
    LIST: gl.constexpr = TAIL - CAPACITY
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8]
    )
    A: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    B: gl.constexpr = gl.DotOperandLayout(1, mma, 4)
    HEADS: gl.constexpr = gl.SliceLayout(0, mma)
    LINES: gl.constexpr = gl.SliceLayout(1, mma)
    # 64 bytes change places in odd rows, so that eight lanes that read at once share no bank.
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 2, [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    COPY_K: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    COPY_V: gl.constexpr = gl.BlockedLayout([1, 4], [128 // U, U // 4], [WARPS, 1], [1, 0])
    COPY_RAW: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [WARPS, 1], [1, 0])
    COPY_TAIL: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])

    head = gl.program_id(0)
    split = gl.program_id(1)
    b = gl.program_id(2)
    kv_heads = gl.num_programs(0)
    split_count = gl.num_programs(1)
    packed_count = gl.load(packed_counts_ptr + b)
    raw_tokens = gl.load(raw_tokens_ptr + b)
    blocks = packed_count + (raw_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    per_split = (blocks + split_count - 1) // split_count
    first = split * per_split
    last = gl.minimum(first + per_split, blocks)
    packed_last = gl.minimum(last, packed_count)

    q_channel = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, B))
    q_row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, B))
    q_offset = (b * kv_heads + head) * GROUP * HEAD_DIM + q_row[None, :] * HEAD_DIM + q_channel[:, None]
    q = gl.load(q_ptr + q_offset, mask=(q_row[None, :] < GROUP) & (q_channel[:, None] < HEAD_DIM), other=0.0)
    sq = gl.allocate_shared_memory(gl.bfloat16, [HEAD_DIM, ROWS], PLAIN)
    sq.store(q)
    k_words = gl.allocate_shared_memory(gl.uint32, [2 * U, HEAD_DIM], WORDS)  # [2 unit + plane, word]
    k_nibbles = gl.allocate_shared_memory(gl.uint32, [U, HEAD_DIM], WORDS)
    v_words = gl.allocate_shared_memory(gl.uint32, [3, HEAD_DIM, U], WORDS)
    k_tail = gl.allocate_shared_memory(gl.uint32, [2, TAIL], LINE)
    v_tail = gl.allocate_shared_memory(gl.uint32, [2, TAIL], LINE)
    weights = gl.allocate_shared_memory(gl.bfloat16, [4, 2 * U, ROWS], WRITTEN)
    weight_lines = gl.allocate_shared_memory(gl.bfloat16, [4, 2 * U, ROWS], PLAIN)
    k_halves = k_nibbles._reinterpret(gl.uint16, [2 * U, HEAD_DIM], NIBBLES)
    weight_tiles = weights._reinterpret(gl.bfloat16, [8, U, ROWS], READ)  # by 2 place + plane
    weight_line = weight_lines._reinterpret(gl.bfloat16, [BLOCK_TOKENS, ROWS], LINE)
    query_line = sq._reinterpret(gl.bfloat16, [HEAD_DIM, ROWS], LINE)
    k_word = k_tail._reinterpret(gl.uint32, [2 * TAIL, 1], LINE)
    v_word = v_tail._reinterpret(gl.uint32, [2 * TAIL, 1], LINE)
    k_bytes = k_tail._reinterpret(gl.uint8, [2, 4 * TAIL], LINE)
    v_bytes = v_tail._reinterpret(gl.uint8, [2, 4 * TAIL], LINE)

    k_row = gl.arange(0, 2 * U, layout=gl.SliceLayout(1, COPY_K))
    k_column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, COPY_K))
    k_offset = (k_row // 2 * 3 + k_row % 2)[:, None] * HEAD_DIM + k_column[None, :]
    nibble_row = gl.arange(0, U, layout=gl.SliceLayout(1, COPY_K))
    nibble_offset = (nibble_row * 3 + 2)[:, None] * HEAD_DIM + k_column[None, :]
    v_offset = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, COPY_V))[:, None] * U
    v_offset = v_offset + gl.arange(0, U, layout=gl.SliceLayout(0, COPY_V))[None, :]
    tail_offset = LIST_START // 4 + (gl.arange(0, TAIL, layout=COPY_TAIL) + CAPACITY) % TAIL
    channel = gl.arange(0, HEAD_DIM, layout=LINES)
    row = gl.arange(0, 2 * U, layout=LINES)  # of a tile of scores: token 4 row + place

    top = gl.full([ROWS], -1e30, gl.float32, layout=HEADS)
    total = gl.zeros([2 * U, ROWS], gl.float32, layout=mma)
    acc = gl.zeros([HEAD_DIM, ROWS], gl.float32, layout=mma)
    listed = gl.zeros([HEAD_DIM, ROWS], gl.float32, layout=mma)  # the part of exceptions, at true scale
    zero = gl.zeros([2 * U, ROWS], gl.float32, layout=mma)
    base = gl.full([HEAD_DIM], 60.0, gl.float32, layout=LINES)

    if first < packed_last:
        table_ptr = packed_table_ptr + b * packed_width
        record = (gl.load(table_ptr + first).to(gl.int64) * kv_heads + head) * SLOT_WORDS
        async_copy.async_copy_global_to_shared(k_words, k_words_ptr + record + k_offset)
        async_copy.async_copy_global_to_shared(k_nibbles, k_words_ptr + record + nibble_offset)
        async_copy.async_copy_global_to_shared(k_tail.index(first % 2), k_words_ptr + record + tail_offset)
        async_copy.commit_group()
        for plane in gl.static_range(3):
            async_copy.async_copy_global_to_shared(
                v_words.index(plane), v_words_ptr + record + (v_offset + plane * U * HEAD_DIM)
            )
        async_copy.async_copy_global_to_shared(v_tail.index(first % 2), v_words_ptr + record + tail_offset)
        async_copy.commit_group()
        page = gl.load(table_ptr + gl.minimum(first + 1, packed_last - 1)).to(gl.int64)
        k_scale = scale_log2 * (1.0 if IN_TILE else QUERY_UNSCALE)
        for block in range(first, packed_last):
            # Past the last block groups are empty, so that as many stay in flight.
            record = (page * kv_heads + head) * SLOT_WORDS
            page = gl.load(table_ptr + gl.minimum(block + 2, packed_last - 1)).to(gl.int64)
            slot = block % 2

            async_copy.wait_group(1)
            barrier()
            k_count = gl.max(k_word.index(slot * TAIL + COUNT).load(COPY_TAIL), 0).to(gl.int32)
            if IN_TILE:
                q_scaled = q
            else:
                factor = (
                    k_bytes.index(slot).slice(0, HEAD_DIM).load(gl.SliceLayout(1, B)).to(gl.uint16)
                    + (127 - QUERY_BIAS)
                ) << 7
                factor = factor.to(gl.bfloat16, bitcast=True)[:, None] + gl.zeros(
                    [HEAD_DIM, ROWS], gl.bfloat16, layout=B
                )
                q_scaled = gl.inline_asm_elementwise(
                    "mul.rn.bf16x2 $0, $1, $2;",
                    "=r,r,r",
                    [q, factor],
                    dtype=gl.bfloat16,
                    is_pure=True,
                    pack=2,
                )
            words = k_words.load(A)
            halves = k_halves.load(A)
            if IN_TILE:
                a_base = k_bytes.index(slot).slice(0, HEAD_DIM).load(gl.SliceLayout(0, A))[
                    None, :
                ] + gl.zeros([2 * U, HEAD_DIM], gl.uint8, layout=A)
            barrier()
            if block + 1 < packed_last:
                async_copy.async_copy_global_to_shared(k_words, k_words_ptr + record + k_offset)
                async_copy.async_copy_global_to_shared(k_nibbles, k_words_ptr + record + nibble_offset)
                async_copy.async_copy_global_to_shared(
                    k_tail.index((block + 1) % 2), k_words_ptr + record + tail_offset
                )
            async_copy.commit_group()
            scores = ()
            for place in gl.static_range(4):
                key = gl.inline_asm_elementwise(
                    DECODE_K[place], "=&r,r,r,r", [words, halves], dtype=gl.bfloat16, is_pure=True, pack=2
                )
                if IN_TILE:
                    bits = _true_values(key, a_base)
                    for e in range(k_count):
                        entry = gl.max(k_word.index(slot * TAIL + LIST + e).load(COPY_TAIL), 0)
                        is_row = gl.arange(0, 2 * U, layout=gl.SliceLayout(1, A)) * 4 + place == (
                            entry >> 24
                        ).to(gl.int32)
                        is_column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, A)) == (
                            (entry >> 16) & 255
                        ).to(gl.int32)
                        bits = gl.where(
                            is_row[:, None] & is_column[None, :], (entry & 0xFFFF).to(gl.uint16), bits
                        )
                    key = bits.to(gl.bfloat16, bitcast=True)
                scores = scores + (mma_v2(key, q_scaled, zero),)  # noqa: RUF005
            if EXCEPTIONS and not IN_TILE:
                s0, s1, s2, s3 = scores
                for e in range(k_count):
                    entry = gl.max(k_word.index(slot * TAIL + LIST + e).load(COPY_TAIL), 0)
                    token = (entry >> 24).to(gl.int32)
                    line = query_line.index(((entry >> 16) & 255).to(gl.int32)).load(HEADS).to(gl.float32)
                    scaled = (entry << 16).to(gl.float32, bitcast=True) * TINY_QUERY_UNSCALE
                    extra = gl.where(row == token // 4, scaled, 0.0)[:, None] * line[None, :]
                    s0 += gl.where(token % 4 == 0, extra, 0.0)
                    s1 += gl.where(token % 4 == 1, extra, 0.0)
                    s2 += gl.where(token % 4 == 2, extra, 0.0)
                    s3 += gl.where(token % 4 == 3, extra, 0.0)
                scores = (s0, s1, s2, s3)
            if WINDOW:
                skip = gl.where(block == 0, gl.load(packed_skips_ptr + b), 0)
                kept = ()
                for place in gl.static_range(4):
                    inside = (row * 4 + place >= skip)[:, None]
                    kept = kept + (gl.where(inside, scores[place], MASKED),)  # noqa: RUF005
                scores = kept
            top, total, decay = _weights(scores, top, total, k_scale, weights, weight_lines)

            async_copy.wait_group(1)
            barrier()
            v_count = gl.max(v_word.index(slot * TAIL + COUNT).load(COPY_TAIL), 0).to(gl.int32)
            if IN_TILE:
                new_base = gl.zeros([HEAD_DIM], gl.float32, layout=LINES)
                a_base = v_bytes.index(slot).slice(0, HEAD_DIM).load(gl.SliceLayout(1, A))[
                    :, None
                ] + gl.zeros([HEAD_DIM, U], gl.uint8, layout=A)
            else:
                new_base = v_bytes.index(slot).slice(0, HEAD_DIM).load(LINES).to(gl.float32)
            acc = acc * decay[None, :] * gl.exp2(base - new_base)[:, None]
            base = new_base + 0.0
            nibbles = v_words.index(2).load(A)
            for plane in gl.static_range(2):
                words = v_words.index(plane).load(A)
                if plane == 1:
                    barrier()
                    if block + 1 < packed_last:
                        for part in gl.static_range(3):
                            async_copy.async_copy_global_to_shared(
                                v_words.index(part), v_words_ptr + record + (v_offset + part * U * HEAD_DIM)
                            )
                        async_copy.async_copy_global_to_shared(
                            v_tail.index((block + 1) % 2), v_words_ptr + record + tail_offset
                        )
                    async_copy.commit_group()
                for place in gl.static_range(4):
                    value = gl.inline_asm_elementwise(
                        DECODE_V[4 * plane + place],
                        "=&r,r,r,r,r",
                        [words, nibbles],
                        dtype=gl.bfloat16,
                        is_pure=True,
                        pack=2,
                    )
                    if IN_TILE:
                        bits = _true_values(value, a_base)
                        for e in range(v_count):
                            entry = gl.max(v_word.index(slot * TAIL + LIST + e).load(COPY_TAIL), 0)
                            is_column = gl.arange(0, U, layout=gl.SliceLayout(0, A)) * 8 + (
                                4 * plane + place
                            ) == (entry >> 24).to(gl.int32)
                            is_row = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, A)) == (
                                (entry >> 16) & 255
                            ).to(gl.int32)
                            bits = gl.where(
                                is_row[:, None] & is_column[None, :], (entry & 0xFFFF).to(gl.uint16), bits
                            )
                        value = bits.to(gl.bfloat16, bitcast=True)
                    acc = mma_v2(value, weight_tiles.index(2 * place + plane).load(B), acc)
            if EXCEPTIONS and not IN_TILE:
                listed = listed * decay[None, :]
                # Four at a time, unused entries are zero: their loads do not wait for one another.
                for e in range(0, v_count, 4):
                    for step in gl.static_range(4):
                        entry = gl.max(v_word.index(slot * TAIL + LIST + e + step).load(COPY_TAIL), 0)
                        token = (entry >> 24).to(gl.int32)
                        line = weight_line.index(token % 4 * (2 * U) + token // 4).load(HEADS).to(gl.float32)
                        at = channel == ((entry >> 16) & 255).to(gl.int32)
                        listed += (
                            gl.where(at, (entry << 16).to(gl.float32, bitcast=True), 0.0)[:, None]
                            * line[None, :]
                        )
        async_copy.wait_group(0)

    # From here on nothing is scaled by a base.
    acc = acc * gl.exp2(gl.where(first < packed_last, base, 0.0))[:, None]
    raw_first = gl.maximum(first, packed_count) - packed_count
    raw_last = last - packed_count
    if raw_first < raw_last:
        barrier()
        raw_skip = gl.load(raw_skips_ptr + b)
        page_stride = kv_heads * RAW_TOKENS * HEAD_DIM
        raw_row_ptr = raw_table_ptr + b * raw_width
        a_row = gl.arange(0, 2 * U, layout=gl.SliceLayout(1, A))
        a_channel = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, A))
        c_unit = gl.arange(0, U, layout=gl.SliceLayout(1, COPY_RAW))
        c_channel = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, COPY_RAW))
        RAW: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        early = k_words._reinterpret(gl.bfloat16, [4, U, HEAD_DIM], RAW)
        late = v_words._reinterpret(gl.bfloat16, [4, U, HEAD_DIM], RAW)
        for block in range(raw_first, raw_last):
            for place in gl.static_range(8):
                token = gl.minimum(block * BLOCK_TOKENS + c_unit * 8 + place, raw_tokens - 1)
                held = gl.load(raw_row_ptr + token // RAW_TOKENS).to(gl.int64) * page_stride
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
                held = gl.load(raw_row_ptr + token // RAW_TOKENS).to(gl.int64) * page_stride
                held = held + (head * RAW_TOKENS + token % RAW_TOKENS) * HEAD_DIM
                score = mma_v2(gl.load(raw_k_ptr + held[:, None] + a_channel[None, :]), q, zero)
                token = block * BLOCK_TOKENS + row * 4 + place
                inside = ((token < raw_tokens) & (token >= raw_skip))[:, None]
                scores = scores + (gl.where(inside, score, MASKED),)  # noqa: RUF005
            top, total, decay = _weights(scores, top, total, scale_log2, weights, weight_lines)
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

    sums = gl.sum(total, 0)
    is_empty = sums == 0.0
    acc = (acc + listed) * (1.0 / WEIGHT_SCALE) / gl.where(is_empty, 1.0, sums)[None, :]
    out_row = gl.arange(0, ROWS, layout=HEADS)
    if IS_WHOLE:
        out_ptr = part_ptr + ((b * kv_heads + head) * GROUP + out_row)[None, :] * HEAD_DIM + channel[:, None]
        gl.store(out_ptr, acc, mask=(out_row < GROUP)[None, :] & (channel < HEAD_DIM)[:, None])
    else:
        part = ((b * kv_heads + head) * split_count + split) * ROWS + out_row
        gl.store(part_ptr + part[None, :] * HEAD_DIM + channel[:, None], acc)
        gl.store(lse_ptr + part, gl.where(is_empty, float("-inf"), top + gl.log2(sums)))
