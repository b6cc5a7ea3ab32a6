"""Decode attention over `fixed3` pages, decoded straight into tensor-core operands (NVIDIA Hopper).

As `kvfold.kernels.fixed4_gluon` does: words are copied into shared memory, loaded in the layout of an MMA operand
and turned into registers of two BF16 codes; a channel's base goes into the query (K) or the accumulator (V).
Tokens (K) and channels (V) are the rows of the products: 16 tiles of 128 rows and one MMA step, one per pair of a
group (`kvfold.codec.fixed3`).

Codes have 64 as the exponent of offset 0: ``value = code * 2 ** (base - 64)``. The query is scaled by that, exact
while bases of K are at most 191; sums of V by it at the end, and when a block changes it. One thread starts the
copies of a block, of K as soon as all words of the block before are in registers; so of V.

Exceptions went through the products as what their codes say; threads then walk the rows of the list and add
the difference to the truth, in float32 and in the order of the list, so that bits do not change between launches.
With ``IN_TILE`` they are put into the tile instead, and bases are added to the codes: slow, with the sums in the
order of raw pages.
"""

# Tuples change their length in code that only Triton runs.
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kvfold.kernels import fixed3_layout
from kvfold.kernels.fixed3_layout import (
    COPY_K,
    COPY_V,
    CORRECT_K,
    LOAD_BASES,
    SCALE,
    START,
    WAIT_K,
    WAIT_V,
)
from kvfold.kernels.fixed3_steps import (
    BLOCK_TOKENS,
    HEAD_DIM,
    WARPS,
    add_listed_keys,
    attend_raw,
    byte_ptrs,
    copy,
    correct_values,
    decoded,
    first_channels,
    load_weights,
    no_sums,
    run,
    sums_of_channels,
    true_tile,
    view,
    weigh,
    weight_places,
)
from kvfold.kernels.fixed4_steps import MASKED, barrier
from kvfold.kernels.shares import block_counts as triton_block_counts
from kvfold.kernels.shares import share_start as triton_share_start

block_counts = gluon.jit(triton_block_counts.fn)
share_start = gluon.jit(triton_share_start.fn)

PLANE = gl.constexpr(fixed3_layout.PLANE_LINES)
BASES = gl.constexpr(fixed3_layout.BASE_LINE)
V, QUERY, DECAY, ALL = (
    gl.constexpr({quads: lines[name] for quads, lines in fixed3_layout.FIRST_LINES.items()})
    for name in ("v", "query", "decay", "all")
)
POOL_MARK = gl.constexpr(0x5AC3F01D)


@gluon.jit
def _plus(a, b):
    return a + b


# Entries are read one by one, so their alignment makes no other kernel.
@gluon.jit(do_not_specialize_on_alignment=["k_entries_ptr", "v_entries_ptr"])
def attend_kernel(
    q_ptr,  # bfloat16 [batch, kv_heads * GROUP, HEAD_DIM]
    k_words_ptr,  # uint32 view of [page, kv_heads, MAIN_BYTES]
    v_words_ptr,
    k_lists_ptr,  # uint32 view of lists
    v_lists_ptr,
    k_entries_ptr,  # uint32 [page, kv_heads]: start << 8 | length, in 16 bytes of lists
    v_entries_ptr,
    raw_k_ptr,  # bfloat16 [raw page, kv_heads, RAW_TOKENS, HEAD_DIM]
    raw_v_ptr,
    packed_table_ptr,  # int32 [batch, packed_width]
    packed_counts_ptr,  # int32 [batch]
    packed_skips_ptr,  # int32 [batch]
    raw_table_ptr,  # int32 [batch, raw_width]
    raw_tokens_ptr,  # int32 [batch]
    raw_skips_ptr,  # int32 [batch]
    out_ptr,  # float32 [batch, kv_heads * GROUP, HEAD_DIM]
    part_ptr,  # float32 [part, HEADS, HEAD_DIM]
    lse_ptr,  # float32 [part, HEADS]
    packed_width,
    raw_width,
    batch,
    kv_heads,
    splits,
    scale_log2,
    GROUP: gl.constexpr,
    QUADS: gl.constexpr,  # of heads that are corrected together
    HEADS: gl.constexpr,  # columns: GROUP padded
    RAW_TOKENS: gl.constexpr,
    WINDOW: gl.constexpr,  # whether skips may be other than 0
    IN_TILE: gl.constexpr,
    IS_WHOLE: gl.constexpr,  # one split
    EXCEPTIONS: gl.constexpr,  # only a measurement of their cost leaves them out
    COPIES: gl.constexpr,  # on their way at a time: 2, of K and of V, or 1
    EVEN: gl.constexpr,  # shares (`kvfold.kernels.shares`) instead of splits
    BATCH_TILE: gl.constexpr,
):
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8]
    )
    A: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    B: gl.constexpr = gl.DotOperandLayout(1, mma, 4)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, mma)
    LINES: gl.constexpr = gl.SliceLayout(1, mma)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    THREAD: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])

    pool = gl.allocate_shared_memory(gl.uint32, [ALL[QUADS], 32], LINE)
    view(pool, 0, gl.uint32, [1], LINE).store(gl.full([1], POOL_MARK, gl.uint32, layout=THREAD))
    barrier()
    thread = gl.arange(0, 32 * WARPS, layout=THREAD)
    run(START[QUADS], thread * 0 + POOL_MARK)
    barrier()

    q_unit = gl.arange(0, 16, layout=gl.SliceLayout(1, B))
    q_row = gl.arange(0, HEADS, layout=gl.SliceLayout(0, B))
    channel = gl.arange(0, HEAD_DIM, layout=LINES)
    row = gl.arange(0, HEAD_DIM, layout=LINES)  # of a tile of scores: token 2 row + place
    heads = gl.arange(0, HEADS, layout=COLUMNS)
    # Where weights of token 2 row + place lie: its position, with bit 2 turned by bit 4.
    position = (row >> 1 & 3) * 64 + (row >> 4) * 8 + (row & 1) * 4 + (row >> 3 & 1) * 2
    position = position ^ (position >> 2 & 4)
    line = position[:, None] * (2 * HEADS) + heads[None, :] * 2
    of_head = heads * 4 if QUADS == 1 else heads // 4 * 4096 + heads % 4 * 4
    extra_place = row[:, None] * 32 + of_head[None, :]
    extra_place = gl.where((heads < GROUP)[None, :], extra_place, -1)
    places = weight_places(B, HEADS)
    base_place = gl.arange(0, 16, layout=gl.SliceLayout(1, B)) // 4 * 8
    base_place = base_place[:, None] + gl.zeros([16, HEADS], gl.int32, layout=B)
    a_row = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, A))[:, None] + gl.zeros(
        [HEAD_DIM, 16], gl.int32, layout=A
    )
    a_column = gl.arange(0, 16, layout=gl.SliceLayout(0, A))[None, :] + gl.zeros(
        [HEAD_DIM, 16], gl.int32, layout=A
    )
    zero = gl.zeros([HEAD_DIM, HEADS], gl.float32, layout=mma)

    program = gl.program_id(0)
    if EVEN:
        sequence = gl.arange(0, BATCH_TILE, layout=THREAD)
        counts = block_counts(sequence, batch, packed_counts_ptr, raw_tokens_ptr, BLOCK_TOKENS)
        ends = gl.associative_scan(counts, 0, _plus) * kv_heads
        all_blocks = gl.max(ends, 0)
        programs = gl.maximum(gl.minimum(gl.num_programs(0), all_blocks), 1)
        place_in_row = share_start(gl.minimum(program, programs), programs, all_blocks)
        end = share_start(gl.minimum(program + 1, programs), programs, all_blocks)
    else:
        place_in_row = program
        end = program + 1
    is_ahead = place_in_row < 0  # whether the first block is on its way
    done = 0  # packed blocks
    while place_in_row < end:
        if EVEN:
            is_before = ends <= place_in_row
            b = gl.sum(is_before.to(gl.int32), 0)
            start_of_b = gl.max(gl.where(is_before, ends, 0), 0)
        else:
            b = place_in_row // (kv_heads * splits)
        packed_count = gl.load(packed_counts_ptr + b)
        raw_tokens = gl.load(raw_tokens_ptr + b)
        blocks = packed_count + (raw_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
        if EVEN:
            head = (place_in_row - start_of_b) // blocks
            first = (place_in_row - start_of_b) % blocks
            last = gl.minimum(first + end - place_in_row, blocks)
            part = program + b * kv_heads + head
            place_in_row += last - first
        else:
            head = place_in_row // splits % kv_heads
            per_split = (blocks + splits - 1) // splits
            first = 0 if IS_WHOLE else place_in_row % splits * per_split
            last = gl.minimum(first + per_split, blocks)
            part = place_in_row
            place_in_row += 1
        packed_last = gl.minimum(last, packed_count)
        table_ptr = packed_table_ptr + b * packed_width
        has_packed = first < packed_last
        unit = gl.load(table_ptr + first, mask=has_packed, other=0).to(gl.int64) * kv_heads + head
        this_v_entry = gl.load(v_entries_ptr + unit, mask=has_packed, other=0)
        if has_packed & (is_ahead == 0):
            copy(thread, k_words_ptr, unit, k_lists_ptr, gl.load(k_entries_ptr + unit), COPY_K[QUADS])
            if COPIES == 2:
                copy(thread, v_words_ptr, unit, v_lists_ptr, this_v_entry, COPY_V[QUADS])
        if EVEN:
            # The next head's first block, whose copy may start while this head's last is consumed.
            next_b = gl.minimum(b + (head + 1) // kv_heads, batch - 1)
            has_next = (place_in_row < end) & (gl.load(packed_counts_ptr + next_b) > 0)
            is_ahead = has_next & (first < packed_last) & (last <= packed_count)
            next_unit = gl.load(packed_table_ptr + next_b * packed_width).to(gl.int64) * kv_heads
            next_unit = gl.where(is_ahead, next_unit + (head + 1) % kv_heads, 0)
            next_k_entry = gl.load(k_entries_ptr + next_unit, mask=is_ahead, other=0)
            next_v_entry = gl.load(v_entries_ptr + next_unit, mask=is_ahead, other=0)
        q_start = (b * kv_heads + head) * GROUP * HEAD_DIM
        queries = ()  # by 2 plane + word
        for part_of_q in gl.static_range(8):
            q_channel = first_channels(q_unit, part_of_q)
            mask = (q_row[None, :] < GROUP) & (q_channel[:, None] < HEAD_DIM)
            part_ptrs = q_ptr + q_start + q_row[None, :] * HEAD_DIM + q_channel[:, None]
            queries = queries + (gl.load(part_ptrs, mask=mask, other=0.0),)  # noqa: RUF005
        mask_of_lines = (heads[None, :] < GROUP) & (channel[:, None] < HEAD_DIM)
        line_ptrs = q_ptr + q_start + heads[None, :] * HEAD_DIM + channel[:, None]
        q_lines = gl.load(line_ptrs, mask=mask_of_lines, other=0.0)
        view(pool, QUERY[QUADS], gl.bfloat16, [HEAD_DIM, HEADS], PLAIN).store(q_lines)
        barrier()

        top = gl.full([HEADS], -1e30, gl.float32, layout=COLUMNS)
        total = gl.zeros([HEAD_DIM, HEADS], gl.float32, layout=mma)
        acc = gl.zeros([HEAD_DIM, HEADS], gl.float32, layout=mma)
        base = gl.full([HEAD_DIM], 64.0, gl.float32, layout=LINES)
        sums = no_sums(THREAD, QUADS)

        if first < packed_last:
            page = gl.load(table_ptr + gl.minimum(first + 1, packed_last - 1)).to(gl.int64)
            k_entry = gl.load(k_entries_ptr + page * kv_heads + head)
            v_entry = gl.load(v_entries_ptr + page * kv_heads + head)
            for block in range(first, packed_last):
                if IN_TILE:
                    here = gl.load(table_ptr + block).to(gl.int64) * kv_heads + head
                    k_main_ptr, k_list_ptr = byte_ptrs(k_words_ptr, k_lists_ptr, k_entries_ptr, here)
                    v_main_ptr, v_list_ptr = byte_ptrs(v_words_ptr, v_lists_ptr, v_entries_ptr, here)
                follows = block + 1 < packed_last
                this_unit = unit
                unit = page * kv_heads + head
                if EVEN:
                    unit = gl.where(follows, unit, next_unit)
                    k_entry = gl.where(follows, k_entry, next_k_entry)
                    v_entry = gl.where(follows, v_entry, next_v_entry)
                    follows = follows | is_ahead
                page = gl.load(table_ptr + gl.minimum(block + 2, packed_last - 1)).to(gl.int64)

                parity = thread * 0 + done % 2
                done += 1
                run(WAIT_K[QUADS], parity)
                if EXCEPTIONS and not IN_TILE:
                    for quad in gl.static_range(QUADS):
                        run(CORRECT_K[QUADS][quad], thread)
                rest = view(pool, 4 * PLANE, gl.uint32, [HEAD_DIM, 16], PLAIN).load(A)
                rest_2 = view(pool, 5 * PLANE, gl.uint16, [HEAD_DIM, 16], PLAIN).load(A)
                words = ()
                bases = ()
                for plane in gl.static_range(4):
                    words = words + (view(pool, plane * PLANE, gl.uint32, [HEAD_DIM, 16], PLAIN).load(A),)  # noqa: RUF005
                    held = gl.inline_asm_elementwise(
                        LOAD_BASES[plane],
                        "=r,=r,r,r,r,r",
                        [base_place],
                        dtype=gl.bfloat16,
                        is_pure=False,
                        pack=4,
                    )
                    bases = bases + (held,)  # noqa: RUF005
                barrier()
                if COPIES == 1:
                    copy(thread, v_words_ptr, this_unit, v_lists_ptr, this_v_entry, COPY_V[QUADS])
                    this_v_entry = v_entry
                elif follows:
                    copy(thread, k_words_ptr, unit, k_lists_ptr, k_entry, COPY_K[QUADS])
                next_k = gl.load(k_entries_ptr + page * kv_heads + head)
                s0, s1 = zero, zero
                for plane in gl.static_range(4):
                    for word in gl.static_range(2):
                        q = gl.inline_asm_elementwise(
                            SCALE[word],
                            "=&r,=&r,r,r,r,r",
                            [queries[2 * plane + word], bases[plane]],
                            dtype=gl.bfloat16,
                            is_pure=True,
                            pack=4,
                        )
                        key_0 = decoded(words[plane], rest, rest_2, 4 * plane + 2 * word)
                        key_1 = decoded(words[plane], rest, rest_2, 4 * plane + 2 * word + 1)
                        if IN_TILE:
                            k_channel = first_channels(a_column, 2 * plane + word)
                            k_base = gl.load(k_main_ptr + 128 * BASES + k_channel)
                            key_0 = true_tile(key_0, a_row, k_channel * 2, k_base, k_main_ptr, k_list_ptr)
                            key_1 = true_tile(key_1, a_row, k_channel * 2 + 1, k_base, k_main_ptr, k_list_ptr)
                            q = queries[2 * plane + word]
                        s0 = mma_v2(key_0, q, s0)
                        s1 = mma_v2(key_1, q, s1)
                scores = (s0, s1)
                if EXCEPTIONS and not IN_TILE:
                    scores = add_listed_keys(scores, extra_place, QUADS)
                if WINDOW:
                    skip = gl.where(block == 0, gl.load(packed_skips_ptr + b), 0)
                    kept = ()
                    for place in gl.static_range(2):
                        inside = (row * 2 + place >= skip)[:, None]
                        kept = kept + (gl.where(inside, scores[place], MASKED),)  # noqa: RUF005
                    scores = kept
                top, total, decay = weigh(scores, top, total, scale_log2, line, QUADS)
                view(pool, DECAY[QUADS], gl.float32, [HEADS], LINE).store(decay)

                run(WAIT_V[QUADS], parity)
                barrier()
                if EXCEPTIONS and not IN_TILE:
                    sums = correct_values(thread, sums, QUADS)
                if IN_TILE:
                    new_base = gl.full([HEAD_DIM], 64.0, gl.float32, layout=LINES)
                else:
                    v_bases = view(pool, V[QUADS] + BASES, gl.uint8, [HEAD_DIM], LINE)
                    new_base = v_bases.load(LINES).to(gl.float32)
                acc = acc * decay[None, :] * gl.exp2(base - new_base)[:, None]
                base = new_base + 0.0
                rest = view(pool, V[QUADS] + 4 * PLANE, gl.uint32, [HEAD_DIM, 16], PLAIN).load(A)
                rest_2 = view(pool, V[QUADS] + 5 * PLANE, gl.uint16, [HEAD_DIM, 16], PLAIN).load(A)
                words = ()
                for plane in gl.static_range(4):
                    words = words + (  # noqa: RUF005
                        view(pool, V[QUADS] + plane * PLANE, gl.uint32, [HEAD_DIM, 16], PLAIN).load(A),
                    )
                barrier()
                if follows:
                    if COPIES == 1:
                        copy(thread, k_words_ptr, unit, k_lists_ptr, k_entry, COPY_K[QUADS])
                    else:
                        copy(thread, v_words_ptr, unit, v_lists_ptr, v_entry, COPY_V[QUADS])
                k_entry = next_k
                v_entry = gl.load(v_entries_ptr + page * kv_heads + head)
                for plane in gl.static_range(4):
                    for place in gl.static_range(4):
                        value = decoded(words[plane], rest, rest_2, 4 * plane + place)
                        if IN_TILE:
                            v_position = a_column // 2 * 8 + a_column % 2 * 2
                            v_position = v_position + (64 * plane + place // 2 * 4 + place % 2)
                            v_base = gl.load(v_main_ptr + 128 * BASES + a_row)
                            value = true_tile(value, a_row, v_position, v_base, v_main_ptr, v_list_ptr)
                        acc = mma_v2(value, load_weights(places, 4 * plane + place, QUADS), acc)

        # From here on nothing is scaled by a base.
        acc = acc * gl.exp2(gl.where(first < packed_last, base - 64.0, 0.0))[:, None]
        acc = acc + gl.convert_layout(sums_of_channels(sums, QUADS), mma)

        raw_first = gl.maximum(first, packed_count) - packed_count
        raw_last = last - packed_count
        if raw_first < raw_last:
            barrier()
            top, total, acc = attend_raw(
                queries,
                top,
                total,
                acc,
                pool,
                line,
                places,
                raw_k_ptr,
                raw_v_ptr,
                raw_table_ptr + b * raw_width,
                head,
                kv_heads,
                raw_first,
                raw_last,
                raw_tokens,
                gl.load(raw_skips_ptr + b),
                scale_log2,
                RAW_TOKENS,
                QUADS,
                A,
                mma,
            )
            # Copies of packed blocks may overwrite what the copies of raw ones wrote.
            run("fence.proxy.async.shared::cta; mov.u32 $0, 0;", thread)

        sums = gl.sum(total, 0)
        is_empty = sums == 0.0
        acc = acc / gl.where(is_empty, 1.0, sums)[None, :]
        if IS_WHOLE or (EVEN and last - first == blocks):
            to = out_ptr + ((b * kv_heads + head) * GROUP + heads)[None, :] * HEAD_DIM + channel[:, None]
            gl.store(to, acc, mask=(heads < GROUP)[None, :] & (channel < HEAD_DIM)[:, None])
        else:
            part_row = part * HEADS + heads
            gl.store(part_ptr + part_row[None, :] * HEAD_DIM + channel[:, None], acc)
            gl.store(lse_ptr + part_row, gl.where(is_empty, float("-inf"), top + gl.log2(sums)))
