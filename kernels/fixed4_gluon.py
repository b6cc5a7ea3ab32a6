"""Decode attention over `fixed4` pages, decoded straight into tensor-core operands (NVIDIA, Ampere and later).

Per block of packed tokens a program copies the records of its KV head into shared memory, loads their words in the
layout of an MMA operand, and turns byte words and nibble words into registers of two BF16 codes. Nothing is added
to the codes: a channel's base is a power of two, so it goes into the query (K) or into the accumulator (V), where
it is exact. Tokens (K) and channels (V) are the rows of the products and the query heads their 8 or 16 columns,
which wastes half as much of a tile at 4 heads per group as heads in 16 rows would. K takes four tiles, one per
place (`kvfold.kernels.fixed4_layout`), V in eight, one per plane and place.

Powers of two keep every intermediate normal and cancel at the end: the query is scaled by 2 ** (base - 64),
weights by 2 ** 60. They are exact while bases of K are at most 160, which the packer sees to, queries are below
2 ** 31 and query times key is far from the ends of float32.

Exceptions are coded as zero and added from the block's list: products of two BF16 values, exact, but out of order.
With ``IN_TILE`` they are put into the tile, and bases are added to the codes: slow, the sums in raw pages' order.
"""

# Tuples change their length in code that only Triton runs: they grow by `+`, it compiles no starred expressions.
# mypy: disable-error-code="assignment, misc, var-annotated"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kvfold.kernels.fixed4_layout import DECODE_K, DECODE_V
from kvfold.kernels.fixed4_steps import (
    MASKED,
    QUERY_BIAS,
    QUERY_UNSCALE,
    WEIGHT_SCALE,
    add_listed_keys,
    add_listed_values,
    attend_raw,
    barrier,
    copy_k,
    copy_v,
    true_tile,
    weigh,
)
from kvfold.kernels.shares import block_counts as triton_block_counts
from kvfold.kernels.shares import share_start as triton_share_start

block_counts = gluon.jit(triton_block_counts.fn)
share_start = gluon.jit(triton_share_start.fn)


@gluon.jit
def _plus(a, b):
    return a + b


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
    out_ptr,  # float32 [batch, kv_heads * GROUP, HEAD_DIM], of heads that one program attends as a whole
    part_ptr,  # float32 [part, ROWS, HEAD_DIM], of all others
    lse_ptr,  # float32 [part, ROWS]
    packed_width,
    raw_width,
    batch,
    kv_heads,
    splits,
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
    IS_WHOLE: gl.constexpr,  # one split: no parts
    EXCEPTIONS: gl.constexpr,  # only a measurement of their cost leaves them out
    COPIES: gl.constexpr,  # on their way at a time: 2, of K and of V, or 1
    EVEN: gl.constexpr,  # a program has a share of all blocks (`kvfold.kernels.shares`), else a split of one head
    BATCH_TILE: gl.constexpr,  # power of two that holds the batch
):
    U: gl.constexpr = BLOCK_TOKENS // 8
    C: gl.constexpr = min(HEAD_DIM, 128)  # channels of K that are in registers at a time
    PARTS: gl.constexpr = HEAD_DIM // C
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
    RAW: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    COPY_K: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    COPY_V: gl.constexpr = gl.BlockedLayout([1, 4], [128 // U, U // 4], [WARPS, 1], [1, 0])
    COPY_RAW: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [WARPS, 1], [1, 0])
    COPY_TAIL: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    QUERY: gl.constexpr = gl.BlockedLayout([8, 1], [HEAD_DIM // 8, 256 // HEAD_DIM], [1, WARPS], [0, 1])

    q_row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, QUERY))[None, :]
    q_offset = q_row * HEAD_DIM + gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, QUERY))[:, None]
    sq = gl.allocate_shared_memory(gl.bfloat16, [HEAD_DIM, ROWS], PLAIN)
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
    k_offsets = (k_offset, nibble_offset, tail_offset)
    v_offsets = (v_offset, tail_offset)
    k_token = gl.arange(0, 2 * U, layout=gl.SliceLayout(1, A)) * 4
    k_channel = gl.arange(0, C, layout=gl.SliceLayout(0, A))
    v_channel = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, A))
    v_token = gl.arange(0, U, layout=gl.SliceLayout(0, A)) * 8
    channel = gl.arange(0, HEAD_DIM, layout=LINES)
    row = gl.arange(0, 2 * U, layout=LINES)  # of a tile of scores: token 4 row + place

    zero = gl.zeros([2 * U, ROWS], gl.float32, layout=mma)
    out_row = gl.arange(0, ROWS, layout=HEADS)

    program = gl.program_id(0)
    if EVEN:
        sequence = gl.arange(0, BATCH_TILE, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        counts = block_counts(sequence, batch, packed_counts_ptr, raw_tokens_ptr, BLOCK_TOKENS)
        ends = gl.associative_scan(counts, 0, _plus) * kv_heads
        all_blocks = gl.max(ends, 0)
        programs = gl.maximum(gl.minimum(gl.num_programs(0), all_blocks), 1)
        position = share_start(gl.minimum(program, programs), programs, all_blocks)
        end = share_start(gl.minimum(program + 1, programs), programs, all_blocks)
    else:
        position = program
        end = program + 1
    is_ahead = position < 0  # whether the first block is on its way
    turn = 0  # which half of the tails
    while position < end:
        if EVEN:
            is_before = ends <= position
            b = gl.sum(is_before.to(gl.int32), 0)
            position_of_b = gl.max(gl.where(is_before, ends, 0), 0)
        else:
            b = position // (kv_heads * splits)
        packed_count = gl.load(packed_counts_ptr + b)
        raw_tokens = gl.load(raw_tokens_ptr + b)
        blocks = packed_count + (raw_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
        if EVEN:
            head = (position - position_of_b) // blocks
            first = (position - position_of_b) % blocks
            last = gl.minimum(first + end - position, blocks)
            part = program + b * kv_heads + head
            position += last - first
        else:
            head = position // splits % kv_heads
            per_split = (blocks + splits - 1) // splits
            first = 0 if IS_WHOLE else position % splits * per_split
            last = gl.minimum(first + per_split, blocks)
            part = position
            position += 1
        packed_last = gl.minimum(last, packed_count)
        table_ptr = packed_table_ptr + b * packed_width
        # Loaded also where it is not needed: so it waits for no count where first is known.
        page = gl.load(table_ptr + gl.minimum(first, packed_width - 1)).to(gl.int64)
        query_ptr = q_ptr + (b * kv_heads + head) * (GROUP * HEAD_DIM)
        query = gl.load(query_ptr + q_offset, mask=q_row < GROUP, other=0.0)
        record = (page * kv_heads + head) * SLOT_WORDS
        if (first < packed_last) & (is_ahead == 0):
            copy_k(k_words, k_nibbles, k_tail.index(turn), k_words_ptr + record, k_offsets)
            async_copy.commit_group()
            if COPIES == 2:
                copy_v(v_words, v_tail.index(turn), v_words_ptr + record, v_offsets)
                async_copy.commit_group()
        if EVEN:
            # Where the next head's first block is, whose copy may start while this head's last is consumed.
            next_b = gl.minimum(b + (head + 1) // kv_heads, batch - 1)
            next_page = gl.load(packed_table_ptr + next_b * packed_width).to(gl.int64)
            next_record = (next_page * kv_heads + (head + 1) % kv_heads) * SLOT_WORDS
            has_next = (position < end) & (gl.load(packed_counts_ptr + next_b) > 0)
            is_ahead = has_next & (first < packed_last) & (last <= packed_count)
        sq.store(query)
        q = ()
        for c in gl.static_range(PARTS):
            q = q + (sq.slice(c * C, C).load(B),)  # noqa: RUF005

        top = gl.full([ROWS], -1e30, gl.float32, layout=HEADS)
        total = gl.zeros([2 * U, ROWS], gl.float32, layout=mma)
        acc = gl.zeros([HEAD_DIM, ROWS], gl.float32, layout=mma)
        listed = gl.zeros([HEAD_DIM, ROWS], gl.float32, layout=mma)  # the part of exceptions, at true scale
        base = gl.full([HEAD_DIM], 60.0, gl.float32, layout=LINES)

        if first < packed_last:
            page = gl.load(table_ptr + gl.minimum(first + 1, packed_last - 1)).to(gl.int64)
            k_scale = scale_log2 * (1.0 if IN_TILE else QUERY_UNSCALE)
            for block in range(first, packed_last):
                # Where nothing follows groups are empty, so that as many stay in flight.
                follows = block + 1 < packed_last
                this_record = record
                record = (page * kv_heads + head) * SLOT_WORDS
                if EVEN:
                    record = gl.where(follows, record, next_record)
                    follows = follows | is_ahead
                page = gl.load(table_ptr + gl.minimum(block + 2, packed_last - 1)).to(gl.int64)
                slot = turn
                turn = 1 - slot

                async_copy.wait_group(COPIES - 1)
                barrier()
                k_count = gl.max(k_word.index(slot * TAIL + COUNT).load(COPY_TAIL), 0).to(gl.int32)
                scores = (zero, zero, zero, zero)
                for c in gl.static_range(PARTS):
                    q_scaled = q[c]
                    if not IN_TILE:
                        factor = k_bytes.index(slot).slice(c * C, C).load(gl.SliceLayout(1, B)).to(gl.uint16)
                        factor = ((factor + (127 - QUERY_BIAS)) << 7).to(gl.bfloat16, bitcast=True)
                        q_scaled = gl.inline_asm_elementwise(
                            "mul.rn.bf16x2 $0, $1, $2;",
                            "=r,r,r",
                            [q_scaled, factor[:, None] + gl.zeros([C, ROWS], gl.bfloat16, layout=B)],
                            dtype=gl.bfloat16,
                            is_pure=True,
                            pack=2,
                        )
                    words = k_words.slice(c * C, C, 1).load(A)
                    halves = k_halves.slice(c * C, C, 1).load(A)
                    if IN_TILE:
                        a_base = k_bytes.index(slot).slice(c * C, C).load(gl.SliceLayout(0, A))
                        a_base = a_base[None, :] + gl.zeros([2 * U, C], gl.uint8, layout=A)
                    if c == PARTS - 1:
                        barrier()
                        if COPIES == 1:
                            copy_v(v_words, v_tail.index(slot), v_words_ptr + this_record, v_offsets)
                        elif follows:
                            copy_k(k_words, k_nibbles, k_tail.index(turn), k_words_ptr + record, k_offsets)
                        async_copy.commit_group()
                    sums = ()
                    for place in gl.static_range(4):
                        key = gl.inline_asm_elementwise(
                            DECODE_K[place],
                            "=&r,r,r,r",
                            [words, halves],
                            dtype=gl.bfloat16,
                            is_pure=True,
                            pack=2,
                        )
                        if IN_TILE:
                            token = k_token + place
                            key = true_tile(
                                key,
                                a_base,
                                k_count,
                                k_word,
                                slot * TAIL + LIST,
                                token,
                                k_channel + c * C,
                                True,
                            )
                        sums = sums + (mma_v2(key, q_scaled, scores[place]),)  # noqa: RUF005
                    scores = sums
                if EXCEPTIONS and not IN_TILE:
                    scores = add_listed_keys(scores, k_count, k_word, slot * TAIL + LIST, query_line, row)
                if WINDOW:
                    skip = gl.where(block == 0, gl.load(packed_skips_ptr + b), 0)
                    kept = ()
                    for place in gl.static_range(4):
                        inside = (row * 4 + place >= skip)[:, None]
                        kept = kept + (gl.where(inside, scores[place], MASKED),)  # noqa: RUF005
                    scores = kept
                top, total, decay = weigh(scores, top, total, k_scale, weights, weight_lines)

                async_copy.wait_group(COPIES - 1)
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
                        if follows:
                            if COPIES == 1:
                                copy_k(
                                    k_words, k_nibbles, k_tail.index(turn), k_words_ptr + record, k_offsets
                                )
                            else:
                                copy_v(v_words, v_tail.index(turn), v_words_ptr + record, v_offsets)
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
                            token = v_token + (4 * plane + place)
                            value = true_tile(
                                value, a_base, v_count, v_word, slot * TAIL + LIST, v_channel, token, False
                            )
                        acc = mma_v2(value, weight_tiles.index(2 * place + plane).load(B), acc)
                if EXCEPTIONS and not IN_TILE:
                    listed = listed * decay[None, :]
                    listed = add_listed_values(
                        listed, v_count, v_word, slot * TAIL + LIST, weight_line, channel, BLOCK_TOKENS // 4
                    )
            if is_ahead == 0:
                async_copy.wait_group(0)

        # From here on nothing is scaled by a base.
        acc = acc * gl.exp2(gl.where(first < packed_last, base, 0.0))[:, None]
        if packed_last < last:
            barrier()
            top, total, acc, listed = attend_raw(
                q,
                top,
                total,
                acc,
                listed,
                k_words._reinterpret(gl.bfloat16, [4, U, HEAD_DIM], RAW),
                v_words._reinterpret(gl.bfloat16, [4, U, HEAD_DIM], RAW),
                weights,
                weight_lines,
                weight_tiles,
                raw_k_ptr,
                raw_v_ptr,
                raw_table_ptr + b * raw_width,
                head,
                kv_heads,
                gl.maximum(first, packed_count) - packed_count,
                last - packed_count,
                raw_tokens,
                gl.load(raw_skips_ptr + b),
                scale_log2,
                BLOCK_TOKENS,
                RAW_TOKENS,
                HEAD_DIM,
                A,
                B,
                mma,
                COPY_RAW,
            )

        weight_sums = gl.sum(total, 0)
        is_empty = weight_sums == 0.0
        acc = (acc + listed) * (1.0 / WEIGHT_SCALE) / gl.where(is_empty, 1.0, weight_sums)[None, :]
        if IS_WHOLE or (EVEN and last - first == blocks):
            to = out_ptr + ((b * kv_heads + head) * GROUP + out_row)[None, :] * HEAD_DIM + channel[:, None]
            gl.store(to, acc, mask=(out_row < GROUP)[None, :] & (channel < HEAD_DIM)[:, None])
        else:
            part_row = part * ROWS + out_row
            gl.store(part_ptr + part_row[None, :] * HEAD_DIM + channel[:, None], acc)
            gl.store(lse_ptr + part_row, gl.where(is_empty, float("-inf"), top + gl.log2(weight_sums)))
