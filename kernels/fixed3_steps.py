"""Steps of attention over `fixed3` pages, and raw blocks among packed ones (Gluon, Hopper)."""

# Tuples change their length in code that only Triton runs.
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kvfold.kernels import fixed3_layout
from kvfold.kernels.fixed3_layout import ADD_EXTRA, CORRECT_V, DECODE, LOAD_WEIGHTS, STORE_WEIGHTS
from kvfold.kernels.fixed4_steps import MASKED, barrier

MAIN_WORDS = gl.constexpr(fixed3_layout.LINE_BYTES // 4 * fixed3_layout.MAIN_LINES)
ENDS = gl.constexpr(fixed3_layout.LINE_BYTES * fixed3_layout.BASE_LINE + fixed3_layout.HEAD_DIM)
WARPS = gl.constexpr(fixed3_layout.WARPS)
HEAD_DIM = gl.constexpr(fixed3_layout.HEAD_DIM)
BLOCK_TOKENS = gl.constexpr(fixed3_layout.BLOCK_TOKENS)


@gluon.jit
def run(ASM: gl.constexpr, operand):
    """PTX of one operand per thread whose result is not used."""
    gl.inline_asm_elementwise(ASM, "=r,r", [operand], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def view(pool, line, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    return pool.index(line)._reinterpret(dtype, shape, layout)


@gluon.jit
def copy(thread, words_ptr, unit, lists_ptr, entry, COPY: gl.constexpr):
    """Start copying one head's main part and list."""
    main = (words_ptr + unit * MAIN_WORDS).to(gl.int64)
    listed = (lists_ptr + (entry >> 8).to(gl.int64) * 4).to(gl.int64)
    nothing = thread.to(gl.int64) * 0
    gl.inline_asm_elementwise(
        COPY,
        "=r,l,l,r",
        [main + nothing, listed + nothing, (entry & 255).to(gl.int32) + thread * 0],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def decoded(words, rest, rest_2, m: gl.constexpr):
    """The tile of pair m of every group."""
    return gl.inline_asm_elementwise(
        DECODE[m], "=&r,r,r,r,r,r", [words, rest, rest_2], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def byte_ptrs(words_ptr, lists_ptr, entries_ptr, unit):
    """Where one head's main part and its list are, in bytes."""
    start = (gl.load(entries_ptr + unit) >> 8).to(gl.int64) * 16
    main_ptr = words_ptr.to(gl.pointer_type(gl.uint8), bitcast=True) + unit * MAIN_WORDS * 4
    return main_ptr, lists_ptr.to(gl.pointer_type(gl.uint8), bitcast=True) + start


@gluon.jit
def true_tile(tile, rows, positions, base, main_ptr, list_ptr):
    """BF16 values of a tile of codes: bases added, exceptions in their places; slow.

    ``rows``, ``positions`` and ``base`` are those of the tile's elements.
    """
    code = tile.to(gl.uint16, bitcast=True)
    bits = code + ((base + 192).to(gl.uint16) << 7)  # the exponent less 64, modulo 256
    entry_ptr = list_ptr
    for row in range(HEAD_DIM):
        start = gl.load(main_ptr + ENDS + row - 1).to(gl.int32)
        start = gl.where(row % 32 == 0, 0, start)
        count = gl.load(main_ptr + ENDS + row).to(gl.int32) - start
        for _ in range(count):
            upper = gl.load(entry_ptr).to(gl.uint16)
            position = gl.load(entry_ptr + 1).to(gl.int32)
            is_listed = (rows == row) & (positions == position)
            bits = gl.where(is_listed, (upper << 8) | (code >> 2 & 0xFF), bits)
            entry_ptr += 2
    return bits.to(gl.bfloat16, bitcast=True)


@gluon.jit
def weigh(scores, top, total, scale, line, QUADS: gl.constexpr):
    """One step of the online softmax; weights go to shared memory, by position."""
    highest = gl.maximum(scores[0], scores[1])
    new_top = gl.maximum(top, gl.max(highest, 0) * scale)
    decay = gl.exp2(top - new_top)
    total = total * decay[None, :]
    for place in gl.static_range(2):
        weight = gl.exp2(scores[place] * scale - new_top[None, :])
        total = total + weight
        gl.inline_asm_elementwise(
            STORE_WEIGHTS[QUADS][place],
            "=r,r,r,r",
            [weight.to(gl.bfloat16), line],
            dtype=gl.bfloat16,
            is_pure=False,
            pack=2,
        )
    return new_top, total, decay


@gluon.jit
def weight_places(B: gl.constexpr, HEADS: gl.constexpr):
    """Where each lane finds the weights of V's even and of its odd pairs of pairs, of plane 0, in bytes.

    Lanes 0 to 15 address the rows of two 8 x 8 tiles: units 4 c and 4 c + 1, then 4 c + 2 and 4 c + 3.
    """
    unit = gl.arange(0, 16, layout=gl.SliceLayout(1, B))
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, B))
    lane = head[None, :] % 8 * 4 + unit[:, None] // 4
    column = head[None, :] // 8 * 16 + unit[:, None] * 0
    row = (lane & 6) * 2 + (lane >> 3 & 1) * 2 + (lane & 1)
    position = row // 2 * 8 + row % 2 * 2
    position = position ^ (position >> 2 & 4)
    return position * (2 * HEADS) + column, (position ^ 4) * (2 * HEADS) + column


@gluon.jit
def load_weights(places, m: gl.constexpr, QUADS: gl.constexpr):
    """Weights of the tokens of pair m of every group, an MMA operand ``[unit, head]``."""
    return gl.inline_asm_elementwise(
        LOAD_WEIGHTS[QUADS][m],
        "=r,=r,r,r,r,r",
        [places[m // 2 % 2]],
        dtype=gl.bfloat16,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def no_sums(THREAD: gl.constexpr, QUADS: gl.constexpr):
    """What the walks add to: of each head of each quad, half a channel's sum in each thread."""
    sums = ()
    for _ in gl.static_range(4 * QUADS):
        sums = sums + (gl.zeros([32 * WARPS], gl.float32, layout=THREAD),)  # noqa: RUF005
    return sums


@gluon.jit
def correct_values(thread, sums, QUADS: gl.constexpr):
    """Sums of a V block's exceptions, decayed and carried on."""
    moved = ()
    for quad in gl.static_range(QUADS):
        added = gl.inline_asm_elementwise(
            CORRECT_V[QUADS][quad],
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [thread, sums[4 * quad], sums[4 * quad + 1], sums[4 * quad + 2], sums[4 * quad + 3]],
            dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
            is_pure=False,
            pack=1,
        )
        moved = moved + (added[0], added[1], added[2], added[3])  # noqa: RUF005
    return moved


@gluon.jit
def sums_of_channels(sums, QUADS: gl.constexpr):
    """What `correct_values` has gathered as ``[channel, head]``, zeros where there are no quads."""
    tiles = ()
    for quad in gl.static_range(QUADS):
        even = gl.join(sums[4 * quad], sums[4 * quad + 2])
        tile = gl.join(even, gl.join(sums[4 * quad + 1], sums[4 * quad + 3])).reshape([HEAD_DIM, 2, 4])
        tiles = tiles + (gl.sum(tile, 1),)  # noqa: RUF005
    if QUADS == 1:
        return side_by_side(tiles[0], gl.zeros_like(tiles[0]), 8)
    elif QUADS == 2:
        return side_by_side(tiles[0], tiles[1], 8)
    else:
        return side_by_side(side_by_side(tiles[0], tiles[1], 8), side_by_side(tiles[2], tiles[3], 8), 16)


@gluon.jit
def side_by_side(left, right, COLUMNS: gl.constexpr):
    return gl.join(left, right).permute([0, 2, 1]).reshape([left.shape[0], COLUMNS])


@gluon.jit
def add_listed_keys(scores, extra_place, QUADS: gl.constexpr):
    """Two tiles of scores with what the walk along K's list has found."""
    summed = ()
    for place in gl.static_range(2):
        score = gl.inline_asm_elementwise(
            ADD_EXTRA[QUADS][place],
            "=&r,=&r,r,r,r,r",
            [scores[place], extra_place],
            dtype=gl.float32,
            is_pure=False,
            pack=2,
        )
        summed = summed + (score,)  # noqa: RUF005
    return summed


@gluon.jit
def first_channels(column, part: gl.constexpr):
    """Channels of columns 0 to 15 of K's tile of plane ``part // 2``, word ``part % 2``."""
    return column // 2 * 4 + column % 2 + (part // 2 * (HEAD_DIM // 4) + part % 2 * 2)


@gluon.jit
def attend_raw(
    q,  # eight tiles bfloat16 [16, heads], by part
    top,
    total,
    acc,
    pool,
    line,
    places,
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
    RAW_TOKENS: gl.constexpr,
    QUADS: gl.constexpr,
    A: gl.constexpr,
    mma: gl.constexpr,
):
    """The raw blocks ``first`` to ``last`` of one head, in the same tiles as packed ones."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    RAW: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    c_unit = gl.arange(0, 16, layout=gl.SliceLayout(1, COPY))
    c_channel = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, COPY))
    a_row = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, A))
    a_column = gl.arange(0, 16, layout=gl.SliceLayout(0, A))
    row = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, mma))
    zero = gl.zeros(acc.shape, gl.float32, layout=mma)
    page_stride = kv_heads * RAW_TOKENS * HEAD_DIM
    for block in range(first, last):
        for m in gl.static_range(16):
            token = gl.minimum(block * BLOCK_TOKENS + c_unit * 16 + m, raw_tokens - 1)
            held = gl.load(row_ptr + token // RAW_TOKENS).to(gl.int64) * page_stride
            held = held + (head * RAW_TOKENS + token % RAW_TOKENS) * HEAD_DIM
            tile = view(pool, m * 32, gl.bfloat16, [16, HEAD_DIM], RAW)
            async_copy.async_copy_global_to_shared(tile, raw_v_ptr + held[:, None] + c_channel[None, :])
        async_copy.commit_group()
        scores = ()
        for place in gl.static_range(2):
            token = gl.minimum(block * BLOCK_TOKENS + a_row * 2 + place, raw_tokens - 1)
            held = gl.load(row_ptr + token // RAW_TOKENS).to(gl.int64) * page_stride
            held = held + (head * RAW_TOKENS + token % RAW_TOKENS) * HEAD_DIM
            score = zero
            for part in gl.static_range(8):
                key = gl.load(raw_k_ptr + held[:, None] + first_channels(a_column, part)[None, :])
                score = mma_v2(key, q[part], score)
            token = block * BLOCK_TOKENS + row * 2 + place
            inside = ((token < raw_tokens) & (token >= raw_skip))[:, None]
            scores = scores + (gl.where(inside, score, MASKED),)  # noqa: RUF005
        top, total, decay = weigh(scores, top, total, scale_log2, line, QUADS)
        async_copy.wait_group(0)
        barrier()
        acc = acc * decay[None, :]
        for m in gl.static_range(16):
            value = view(pool, m * 32, gl.bfloat16, [16, HEAD_DIM], RAW).permute([1, 0]).load(A)
            acc = mma_v2(value, load_weights(places, m, QUADS), acc)
        barrier()
    return top, total, acc
