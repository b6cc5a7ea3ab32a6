"""Where `fixed3` blocks lie in shared memory, and the PTX that decodes words and corrects exceptions.

Blocks have 256 tokens, heads 128 channels, and up to 16 query heads stand side by side. Shared memory is one
allocation in lines of 128 bytes, which PTX addresses from `global_smem`: Triton 3.6 gathers only from tensors.

Two threads walk one row of a list (two tokens of K, one channel of V), every other entry each. What an exception's
code says went through the tensor cores; the true value less that, times the query (K) or the weights (V) of four
heads, a *quad*, puts it right. Everything is made for one, two or four quads.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from kvfold.codec.fixed3 import head_main_bytes, word_bytes
from kvfold.codec.fixed3_heads import GROUP_ROWS, MOST_IN_GROUP

BLOCK_TOKENS = 256
HEAD_DIM = 128
WARPS = 8
LINE_BYTES = 128
AT_ONCE = 2  # entries whose loads overlap; one costs 1.5 %, three are no faster
QUAD = 4
QUADS = (1, 2, 4)

PLANE_LINES = BLOCK_TOKENS * HEAD_DIM // 4 // LINE_BYTES  # one of the four planes of byte words
_BASES = word_bytes(BLOCK_TOKENS, HEAD_DIM)
_ENDS = _BASES + HEAD_DIM
_LIST = head_main_bytes(BLOCK_TOKENS, HEAD_DIM)
MAIN_LINES = _LIST // LINE_BYTES
BASE_LINE = _BASES // LINE_BYTES


def columns(quads: int) -> int:
    """Columns of the products: query heads, padded."""
    return max(8, QUAD * quads)


def head_bytes(quads: int) -> int:
    """Of the query, or of weights, at one channel or token."""
    return 2 * columns(quads)


def _first_lines(quads: int) -> dict[str, int]:
    """Where everything starts, in lines."""
    record = _LIST + 2 * HEAD_DIM // GROUP_ROWS * MOST_IN_GROUP
    sizes = {
        "k": record,
        "v": record,
        "weights": head_bytes(quads) * BLOCK_TOKENS,  # bfloat16 [token, head], tokens by position
        "extra": 4 * QUAD * quads * BLOCK_TOKENS,  # float32 [quad, token, head of it]
        "query": head_bytes(quads) * HEAD_DIM,  # bfloat16 [channel, head]
        "decay": 4 * columns(quads),  # float32 [head]
        "ready": 16,  # two mbarriers: K's and V's copies are there
    }
    lines, place = {}, 0
    for name, size in sizes.items():
        lines[name] = place
        place += -(-size // LINE_BYTES)
    return {**lines, "all": place}


FIRST_LINES = {quads: _first_lines(quads) for quads in QUADS}
PLACES = {
    quads: {name: line * LINE_BYTES for name, line in lines.items()} for quads, lines in FIRST_LINES.items()
}


def _decode_asm(m: int) -> str:
    """PTX for pair m of a group: byte words are operands 1 and 2, rest words 3, 4 and 5."""
    word = "$1" if m // 2 % 2 == 0 else "$2"
    steps = "{ .reg .b32 w, t; "
    if m % 2:
        steps += f"shf.l.wrap.b32 w, {word}, {word}, 24; "
        word = "w"
    steps += f"lop3.b32 w, {word}, 0x03FC03FC, 0x20002000, 0xEA; "
    if m < 15:
        parts = [(m // 5, 32 - m % 5 * 3, "0x80038003")]
    else:
        parts = [(0, 1, "0x80008000"), (1, 18, "0x00010001"), (2, 19, "0x00020002")]
    for i, (rest, turn, mask) in enumerate(parts):
        source = f"${3 + rest}"
        if turn % 32:
            steps += f"shf.l.wrap.b32 t, {source}, {source}, {turn}; "
            source = "t"
        target = "$0" if i == len(parts) - 1 else "w"
        steps += f"lop3.b32 {target}, {source}, {mask}, w, 0xEA; "
    return steps + "}"


DECODE = gl.constexpr(tuple(_decode_asm(m) for m in range(16)))


def _bases_asm(plane: int) -> str:
    """PTX that loads the bases of a thread's eight channels of a plane, from operand 2 on."""
    asm = "{ .reg .b32 t; mov.u32 t, global_smem; add.u32 t, t, $2; "
    return asm + f"ld.shared.v2.b32 {{$0, $1}}, [t+{_BASES + plane * HEAD_DIM // 4}]; }}"


def _scale_asm(word: int) -> str:
    """PTX that scales two pairs of the query, operands 2 and 3, by 2 ** (base - 64), bases in operands 4 and 5."""
    asm = "{ .reg .b32 x; "
    for i in range(2):
        asm += (
            f"prmt.b32 x, ${i + 4}, 0, {'0x4342' if word else '0x4140'}; mad.lo.u32 x, x, 128, 0x1F801F80; "
        )
        asm += f"mul.rn.bf16x2 ${i}, ${i + 2}, x; "
    return asm + "}"


LOAD_BASES = gl.constexpr(tuple(_bases_asm(plane) for plane in range(4)))
SCALE = gl.constexpr(tuple(_scale_asm(word) for word in range(2)))


def _registers(at_once: int) -> str:
    """Registers of a walk; some are of each of the entries whose loads overlap."""
    asm = ".reg .pred p, odd; .reg .b32 sm, t, x, ptr, end, tile, base; .reg .f32 f<4>, c<8>; "
    for j in range(at_once):
        asm += f".reg .pred is{j}; .reg .b32 w{j}, u{j}, a{j}, q{j}, r{j}, b{j}; "
        asm += f".reg .f32 d{j}, e{j}, g{j}, h{j}; "
    return asm


def _row_asm(record: int, thread: str) -> str:
    """The address of the first entry that a thread takes, past that of the list, and where the row ends."""
    steps = f"mov.u32 sm, global_smem; shr.u32 tile, {thread}, 1; add.u32 t, sm, tile; "
    steps += (
        f"ld.shared.u8 end, [t+{record + _ENDS}]; and.b32 x, tile, 31; setp.ne.u32 p, x, 0; mov.u32 ptr, 0; "
    )
    steps += f"@p ld.shared.u8 ptr, [t+{record + _ENDS - 1}]; mov.u32 t, sm; "
    for before in (32, 64, 96):
        steps += f"mov.u32 x, 0; setp.ge.u32 p, tile, {before}; "
        steps += f"@p ld.shared.u8 x, [sm+{record + _ENDS + before - 1}]; mad.lo.u32 t, x, 2, t; "
    steps += f"mad.lo.u32 end, end, 2, t; and.b32 x, {thread}, 1; mad.lo.u32 t, x, 2, t; "
    return steps + "mad.lo.u32 ptr, ptr, 2, t; mad.lo.u32 tile, tile, 64, sm; "


def _entry_asm(record: int, j: int) -> str:
    """An entry, 0 past the row's end, in w, its position in a, and the word that holds its code in u."""
    asm = f"add.u32 x, ptr, {4 * j}; setp.lt.u32 is{j}, x, end; mov.u32 w{j}, 0; "
    asm += f"@is{j} ld.shared.u16 w{j}, [x+{record + _LIST}]; shr.u32 a{j}, w{j}, 8; "
    asm += f"lop3.b32 t, a{j}, 0x3C, tile, 0xEA; shr.u32 x, w{j}, 14; mad.lo.u32 t, x, 8192, t; "
    return asm + f"ld.shared.b32 u{j}, [t+{record}]; "


def _difference_asm(j: int, base: str) -> str:
    """The entry's true value less what its code says, 0 past the end, and its four factors as float32 in f."""
    return (
        f"shr.u32 x, w{j}, 5; and.b32 x, x, 24; shf.r.wrap.b32 u{j}, u{j}, u{j}, x; and.b32 u{j}, u{j}, 0x3FC; "
        f"mad.lo.u32 x, u{j}, 65536, {base}; mov.b32 g{j}, x; "
        f"shl.b32 x, w{j}, 24; mad.lo.u32 x, u{j}, 16384, x; mov.b32 h{j}, x; "
        f"sub.f32 d{j}, h{j}, g{j}; selp.f32 d{j}, d{j}, 0f00000000, is{j}; "
        f"shl.b32 x, q{j}, 16; mov.b32 f0, x; and.b32 x, q{j}, 0xFFFF0000; mov.b32 f1, x; "
        f"shl.b32 x, r{j}, 16; mov.b32 f2, x; and.b32 x, r{j}, 0xFFFF0000; mov.b32 f3, x; "
    )


def _loop_asm(body: str) -> str:
    return f"setp.ge.u32 p, ptr, end; @p bra DONE; NEXT: {body} setp.lt.u32 p, ptr, end; @p bra NEXT; DONE: "


def correct_k_asm(quads: int, quad: int, at_once: int = AT_ONCE) -> str:
    """PTX of one thread of 256: corrections of one token's scores of a quad, to shared memory.

    Operand 1 is the thread; operand 0 is not used.
    """
    places = PLACES[quads]
    record, query, extra = places["k"], places["query"] + 2 * QUAD * quad, places["extra"] + 4096 * quad
    asm = "{" + _registers(at_once) + _row_asm(record, "$1")
    asm += "".join(f"mov.f32 c{i}, 0f00000000; " for i in range(8))
    body = "".join(_entry_asm(record, j) for j in range(at_once))
    for j in range(at_once):
        body += f"shr.u32 x, a{j}, 1; add.u32 t, x, sm; ld.shared.u8 b{j}, [t+{record + _BASES}]; "
        body += f"mad.lo.u32 t, x, {head_bytes(quads)}, sm; ld.shared.v2.b32 {{q{j}, r{j}}}, [t+{query}]; "
    for j in range(at_once):
        body += f"shl.b32 b{j}, b{j}, 23; " + _difference_asm(j, f"b{j}")
        body += f"and.b32 x, a{j}, 1; setp.ne.u32 p, x, 0; "
        body += f"selp.f32 e{j}, d{j}, 0f00000000, p; selp.f32 d{j}, 0f00000000, d{j}, p; "
        for i in range(4):
            body += f"fma.rn.f32 c{i}, f{i}, d{j}, c{i}; fma.rn.f32 c{i + 4}, f{i}, e{j}, c{i + 4}; "
    asm += _loop_asm(body + f"add.u32 ptr, ptr, {4 * at_once}; ")
    # Even threads take the even token's sums of both, odd ones the odd token's.
    asm += "bar.warp.sync 0xffffffff; and.b32 x, $1, 1; setp.ne.u32 odd, x, 0; mad.lo.u32 t, $1, 16, sm; "
    for i in range(4):
        asm += f"selp.f32 f{i}, c{i}, c{i + 4}, odd; selp.f32 c{i}, c{i + 4}, c{i}, odd; mov.b32 x, f{i}; "
        asm += f"shfl.sync.bfly.b32 x, x, 1, 31, 0xffffffff; mov.b32 f{i}, x; add.f32 c{i}, c{i}, f{i}; "
    asm += f"st.shared.v4.f32 [t+{extra}], {{c0, c1, c2, c3}}; "
    return asm + "bar.warp.sync 0xffffffff; mov.u32 $0, 0; }"


def correct_v_asm(quads: int, quad: int, at_once: int = AT_ONCE) -> str:
    """PTX of one thread of 256: a quad's sums of half a channel's exceptions, decayed and carried on.

    Operand 4 is the thread, operands 5 to 8 the sums so far, 0 to 3 the sums.
    """
    places = PLACES[quads]
    record, weights = places["v"], places["weights"] + 2 * QUAD * quad
    asm = "{" + _registers(at_once) + _row_asm(record, "$4")
    asm += f"ld.shared.v4.f32 {{f0, f1, f2, f3}}, [sm+{places['decay'] + 4 * QUAD * quad}]; "
    asm += "".join(f"mul.f32 c{i}, f{i}, ${5 + i}; " for i in range(4))
    asm += f"shr.u32 t, $4, 1; add.u32 t, t, sm; ld.shared.u8 base, [t+{record + _BASES}]; "
    asm += "shl.b32 base, base, 23; "
    body = "".join(_entry_asm(record, j) for j in range(at_once))
    for j in range(at_once):
        body += (
            f"shr.u32 t, a{j}, 2; lop3.b32 t, t, 4, a{j}, 0x6A; mad.lo.u32 t, t, {head_bytes(quads)}, sm; "
        )
        body += f"ld.shared.v2.b32 {{q{j}, r{j}}}, [t+{weights}]; "
    for j in range(at_once):
        body += _difference_asm(j, "base")
        body += "".join(f"fma.rn.f32 c{i}, f{i}, d{j}, c{i}; " for i in range(4))
    asm += _loop_asm(body + f"add.u32 ptr, ptr, {4 * at_once}; ")
    return asm + "".join(f"mov.f32 ${i}, c{i}; " for i in range(4)) + "}"


def _add_extra_asm(quads: int, place: int) -> str:
    """PTX that adds corrections to two neighbouring heads' scores of tokens ``2 row + place``.

    Operands 2 and 3 are the scores, 4 where the corrections are, negative for heads that have none.
    """
    start = PLACES[quads]["extra"] + 4 * QUAD * place
    asm = "{ .reg .pred p; .reg .b32 t; .reg .f32 x, y; mov.u32 t, global_smem; add.u32 t, t, $4; "
    asm += "setp.ge.s32 p, $4, 0; mov.f32 x, 0f00000000; mov.f32 y, 0f00000000; "
    return asm + f"@p ld.shared.v2.f32 {{x, y}}, [t+{start}]; add.f32 $0, $2, x; add.f32 $1, $3, y; }}"


def _store_weights_asm(quads: int, place: int) -> str:
    """PTX that stores two neighbouring heads' weights of tokens ``2 row + place``: operand 1, to operand 2."""
    start = PLACES[quads]["weights"] + head_bytes(quads) * place
    asm = "{ .reg .b32 t; mov.u32 t, global_smem; add.u32 t, t, $2; "
    return asm + f"st.shared.b32 [t+{start}], $1; mov.u32 $0, $1; }}"


def _load_weights_asm(quads: int, m: int) -> str:
    """PTX that loads the weights of a tile of V's pair m as operand B of an MMA, from operand 2 on."""
    start = PLACES[quads]["weights"] + head_bytes(quads) * (m // 4 * 64 + m % 2)
    asm = "{ .reg .b32 t; mov.u32 t, global_smem; add.u32 t, t, $2; "
    return asm + f"ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {{$0, $1}}, [t+{start}]; }}"


def _start_asm(quads: int) -> str:
    """PTX that makes the mbarriers, after a trap unless the allocation, of first word $1, is `global_smem`."""
    ready = PLACES[quads]["ready"]
    asm = "{ .reg .pred p; .reg .b32 t, x; ld.shared.b32 t, [global_smem]; setp.ne.u32 p, t, $1; @p trap; "
    asm += "mov.u32 x, %tid.x; setp.eq.u32 p, x, 0; mov.u32 x, global_smem; "
    for i in range(2):
        asm += f"@p mbarrier.init.shared::cta.b64 [x+{ready + 8 * i}], 1; "
    return asm + "fence.proxy.async.shared::cta; mov.u32 $0, t; }"


def _copy_asm(quads: int, kind: str) -> str:
    """PTX of one thread that starts the copies of a head's main part, at operand 1, and list, at operand 2.

    Operand 3 is the list's length in units of 16 bytes.
    """
    ready = PLACES[quads]["ready"] + 8 * (kind == "v")
    bulk = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    asm = "{ .reg .pred p; .reg .b32 x, t, size; mov.u32 x, %tid.x; setp.ne.u32 p, x, 0; @p bra DONE; "
    asm += "shl.b32 size, $3, 4; mov.u32 t, global_smem; "
    asm += f"add.u32 x, t, {ready}; add.u32 t, t, {PLACES[quads][kind]}; add.u32 size, size, {_LIST}; "
    asm += "mbarrier.arrive.expect_tx.shared::cta.b64 _, [x], size; "
    asm += (
        f"{bulk} [t], [$1], {_LIST}, [x]; sub.u32 size, size, {_LIST}; setp.eq.u32 p, size, 0; @p bra DONE; "
    )
    asm += f"add.u32 t, t, {_LIST}; {bulk} [t], [$2], size, [x]; "
    return asm + "DONE: mov.u32 $0, 0; }"


def _wait_asm(quads: int, kind: str) -> str:
    """PTX that waits for the copies of a block; operand 1 is the parity of the block's number in its program."""
    ready = PLACES[quads]["ready"] + 8 * (kind == "v")
    asm = f"{{ .reg .pred p; .reg .b32 x; mov.u32 x, global_smem; add.u32 x, x, {ready}; AGAIN: "
    asm += "mbarrier.try_wait.parity.shared::cta.b64 p, [x], $1; @!p bra AGAIN; "
    return asm + "mov.u32 $0, 0; }"


# By quads, and by number.
CORRECT_K, CORRECT_V = (
    gl.constexpr({q: tuple(gl.constexpr(make(q, quad)) for quad in range(q)) for q in QUADS})
    for make in (correct_k_asm, correct_v_asm)
)
ADD_EXTRA, STORE_WEIGHTS, LOAD_WEIGHTS = (
    gl.constexpr({q: tuple(gl.constexpr(make(q, number)) for number in range(count)) for q in QUADS})
    for make, count in ((_add_extra_asm, 2), (_store_weights_asm, 2), (_load_weights_asm, 16))
)
START = gl.constexpr({q: gl.constexpr(_start_asm(q)) for q in QUADS})
COPY_K, COPY_V, WAIT_K, WAIT_V = (
    gl.constexpr({q: gl.constexpr(make(q, kind)) for q in QUADS})
    for make in (_copy_asm, _wait_asm)
    for kind in "kv"
)
