"""An interpreter for the PTX that kernels here are made of: integers, float32, shared memory, warps of 32."""

from __future__ import annotations

import re
import struct

import numpy as np

MASK = 0xFFFFFFFF
BASE = 0x400  # address of global_smem
SIZES = {"u8": 1, "u16": 2, "b32": 4, "f32": 4}
TOKENS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")


def bits_of(value: int | np.floating) -> int:
    return int(np.float32(value).view(np.uint32)) if isinstance(value, np.floating) else int(value) & MASK


def float_of(value: int | np.floating) -> np.float32:
    return value if isinstance(value, np.floating) else np.uint32(int(value) & MASK).view(np.float32)


def run(asm: str, operands: dict[str, list], shared: np.ndarray, threads: int = 1) -> list[dict]:
    """Run one asm block in every thread; the registers of each. ``shared`` is ``uint8``, read and written."""
    program: list[str] = []
    labels: dict[str, int] = {}
    for text in asm.strip()[1:-1].split(";"):
        statement = text.strip()
        while label := re.match(r"([A-Z]+):\s*", statement):
            labels[label[1]] = len(program)
            statement = statement[label.end() :]
        if statement and not statement.startswith(".reg"):
            program.append(statement)
    registers = [{name: values[i] for name, values in operands.items()} for i in range(threads)]
    at = [0] * threads
    for first in range(0, threads, 32):
        warp = range(first, min(first + 32, threads))
        while True:
            moving = [i for i in warp if at[i] < len(program) and not program[at[i]].startswith("shfl")]
            for i in moving:
                at[i] = _step(program[at[i]], at[i], registers[i], shared, labels)
            if moving:
                continue
            if at[first] >= len(program):
                break
            assert len({at[i] for i in warp}) == 1, "lanes meet at different exchanges"
            target, source, step, *_ = TOKENS.findall(program[at[first]].partition(" ")[2])
            values = [registers[i][source] for i in warp]
            for lane, i in enumerate(warp):
                registers[i][target] = values[lane ^ int(step)]
                at[i] += 1
    return registers


def _value(text: str, held: dict) -> int | np.floating:
    if text in held:
        return held[text]
    if text == "global_smem":
        return BASE
    return float_of(int(text[2:], 16)) if text.startswith("0f") else int(text, 0) & MASK


def _step(statement: str, at: int, held: dict, shared: np.ndarray, labels: dict[str, int]) -> int:
    """Run one statement of one thread; the number of the next."""
    if guard := re.match(r"@(!?)(\w+)\s+(.*)$", statement):
        if bool(held[guard[2]]) == (guard[1] == "!"):
            return at + 1
        statement = guard[3]
    name, _, rest = statement.partition(" ")
    kind, *options = name.split(".")
    arguments = [argument.strip() for argument in TOKENS.findall(rest)]
    if kind == "bra":
        return labels[arguments[0]]
    if kind in ("ld", "st"):
        address, registers = arguments[::-1] if kind == "ld" else arguments
        base, _, offset = address.strip("[]").partition("+")
        size, names = SIZES[options[-1]], registers.strip("{}").split(",")
        start = bits_of(_value(base, held)) + int(offset or 0) - BASE
        assert start % (size * len(names)) == 0, statement
        assert 0 <= start <= len(shared) - size * len(names), statement
        for i, register in enumerate(names):
            place = slice(start + i * size, start + (i + 1) * size)
            if kind == "ld":
                loaded = int.from_bytes(shared[place].tobytes(), "little")
                held[register.strip()] = float_of(loaded) if options[-1] == "f32" else loaded
            else:
                stored = struct.pack("<I", bits_of(_value(register.strip(), held)))
                shared[place] = np.frombuffer(stored, np.uint8)
    elif kind != "bar":
        values = [_value(argument, held) for argument in arguments[1:]]
        held[arguments[0]] = _result(kind, options, values)
    return at + 1


def _result(kind: str, options: list[str], values: list) -> int | bool | np.floating:
    if options[-1] == "f32" and kind in ("add", "sub", "mul", "fma"):
        a, b, *c = (np.float64(float_of(value)) for value in values)
        return np.float32({"add": a + b, "sub": a - b, "mul": a * b, "fma": a * b + (c[0] if c else 0)}[kind])
    if kind == "selp":
        return values[0] if values[2] else values[1]
    if kind == "mov":
        return float_of(values[0]) if options[-1] == "f32" else values[0]
    x, y, *z = (bits_of(value) for value in values)
    if kind == "setp":
        if options[-1] == "s32":
            x, y = (value - (value >> 31 << 32) for value in (x, y))
        return {"ge": x >= y, "lt": x < y, "ne": x != y}[options[0]]
    if kind == "lop3":
        table = z[1]
        return sum(
            (table >> (4 * (x >> b & 1) + 2 * (y >> b & 1) + (z[0] >> b & 1)) & 1) << b for b in range(32)
        )
    if kind == "shf":
        both, turn = y << 32 | x, z[0] % 32
        return (both >> turn if options[0] == "r" else both << turn >> 32) & MASK
    if kind in ("shl", "shr"):
        return (x << y if kind == "shl" else x >> y) & MASK
    return {"add": x + y, "and": x & y, "mad": x * y + (z[0] if z else 0)}[kind] & MASK
