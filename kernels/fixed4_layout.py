"""How `fixed4` words become registers: the PTX that decodes them, and where they lie in shared memory.

Token t of a block is unit t // 8, plane t % 8 // 4, place t % 4; the planes are the byte planes 0 and 1 of
`kvfold.codec.fixed4`. Rows of K's tiles are ``2 unit + plane``.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl


def _decode_asm(place: int, nibbles: str) -> str:
    """PTX for the pair of one of the four places that share a nibble word; operands 1 and 2 are byte words."""
    byte_word = "$1" if place < 2 else "$2"
    steps = "{ .reg .b32 w, t; "
    if place % 2:
        steps += f"shf.l.wrap.b32 w, {byte_word}, {byte_word}, 8; "
        byte_word = "w"
    steps += f"and.b32 w, {byte_word}, 0x07F807F8; "
    if place:
        steps += f"shf.l.wrap.b32 t, {nibbles}, {nibbles}, {32 - 4 * place}; "
        nibbles = "t"
    return steps + f"lop3.b32 $0, {nibbles}, 0x80078007, w, 0xEA; }}"


# For K a nibble word comes as two halves, one operand; for V plane 0's and plane 1's are neighbours, two operands.
DECODE_K = gl.constexpr(tuple(_decode_asm(place, "$3") for place in range(4)))
DECODE_V = gl.constexpr(tuple(_decode_asm(place % 4, "$3" if place < 4 else "$4") for place in range(8)))


def _bits(count: int, step: int, axis: int) -> list[list[int]]:
    """Offset bits that walk along one axis from ``step`` on, doubling."""
    return [[step << i, 0] if axis == 0 else [0, step << i] for i in range(count)]


def nibble_layout(units: int, head_dim: int) -> gl.SharedLinearLayout:
    """K's nibble words, copied as ``uint32 [unit, word]`` with 64 bytes swapped in odd units, seen as ``uint16``
    halves ``[2 unit + plane, channel]``: half, plane, then pairs of channels."""
    bases = [[0, 1], [1, 0], *_bits(head_dim.bit_length() - 2, 2, 1)]
    return gl.SharedLinearLayout([*bases, [2, 16], *_bits(units.bit_length() - 2, 4, 0)])


def weight_layouts(units: int, heads: int) -> tuple[gl.SharedLinearLayout, gl.SharedLinearLayout]:
    """Weights of one place as they are written, ``[2 unit + plane, head]``, and of one plane of it as they are
    read, ``[unit, head]``. Units lie side by side; heads 2 and 4 move to other banks."""
    count = units.bit_length() - 1
    swapped = [[units // 2, 2], [units // 4, 4]]
    more = [[0, 8]] if heads == 16 else []
    read = [*_bits(count, 1, 0), [0, 1], *swapped, *more]
    written = [*([2 * row, column] for row, column in read), [1, 0]]
    return gl.SharedLinearLayout(written), gl.SharedLinearLayout(read)
