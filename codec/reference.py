"""Slow decoders, written from the layouts alone and meant to be read: what fast ones must equal.

They trust the pages. Patterns are ``uint16 [kv_head, token, head_dim]``.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvfold.codec.packed import Packed


def decode_gaac(packed: Packed, group: int = 8) -> NDArray[np.uint16]:
    """`gaac` and `gaac-2bit`, in groups of any size."""
    if packed.windows is None:
        raise ValueError("gaac pages need the windows that they were packed with, got None")
    kv_heads, _, head_dim = packed.shape
    head_elements = packed.block_tokens * head_dim
    tag_bytes = (head_elements // group + 3) // 4
    modes = [(3, packed.windows.narrow_base), (4, packed.windows.wide_base)]
    modes += [(8, np.zeros_like(packed.windows.wide_base))]
    if packed.windows.inner_bases is not None:
        modes += [(2, packed.windows.base(4))]
    patterns, pages = _begin(packed)
    for page, data in enumerate(pages):
        signs_start = 4 * kv_heads
        tags_start = signs_start + kv_heads * head_elements
        for head in range(kv_heads):
            payload = 8 * int.from_bytes(data[4 * head : 4 * head + 4], "little")
            bits = int.from_bytes(data, "little")
            for number in range(head_elements // group):
                tag = (data[tags_start + head * tag_bytes + number // 4] >> (2 * (number % 4))) & 3
                width, bases = modes[tag]
                for element in range(number * group, (number + 1) * group):
                    token, channel = _place(packed, element)
                    exponent = (bits >> payload) % 2**width + int(bases[head, channel])
                    payload += width
                    sign_mantissa = data[signs_start + head * head_elements + element]
                    patterns[head, page * packed.block_tokens + token, channel] = _pattern(
                        sign_mantissa, exponent
                    )
    return patterns


def decode_fixed4(packed: Packed) -> NDArray[np.uint16]:
    """`fixed4` of either kind."""
    kv_heads, _, head_dim = packed.shape
    block_tokens, units = packed.block_tokens, packed.block_tokens // 8
    capacity = 16 * math.ceil(head_dim / 128)
    patterns, pages = _begin(packed)
    for page, data in enumerate(pages):
        block = patterns[:, page * block_tokens : (page + 1) * block_tokens]
        if len(data) == 2 * packed.page_elements:
            block[:] = np.frombuffer(data, "<u2").reshape(block.shape)
            continue
        for head in range(kv_heads):
            record = data[head * len(data) // kv_heads : (head + 1) * len(data) // kv_heads]
            word_count = 3 * units * head_dim
            words = [int(word) for word in np.frombuffer(record, "<u4", word_count)]
            entries = np.frombuffer(record, "<u4", capacity, 4 * word_count)
            base_start = 4 * (word_count + capacity)
            bases = record[base_start : base_start + head_dim]
            count = int.from_bytes(record[base_start + head_dim :][:4], "little")
            for token in range(block_tokens):
                unit, j = divmod(token, 8)
                for channel in range(head_dim):
                    if packed.axis == "channel":
                        pair, half = channel // 2, channel % 2
                        place = [(unit * 3 + plane) * head_dim + 2 * pair for plane in range(3)]
                    else:
                        pair, half = unit // 2, unit % 2
                        place = [(plane * head_dim + channel) * units + 2 * pair for plane in range(3)]
                    byte_word = words[place[j // 4] + j % 4 // 2]
                    nibble_word = words[place[2] + j // 4]
                    bits = _rotate_left(byte_word, 8 * (j % 2)) & 0x07F807F8
                    bits |= _rotate_left(nibble_word, -4 * (j % 4)) & 0x80078007
                    code = (bits >> 16 * half) & 0xFFFF
                    offset = (code >> 7) & 15
                    exponent = bases[channel] + offset if offset else 0
                    block[head, token, channel] = (code & 0x807F) | exponent << 7
            for entry in entries[:count].tolist():
                block[head, entry >> 24, (entry >> 16) & 0xFF] = entry & 0xFFFF
    return patterns


def decode_fixed3(packed: Packed) -> NDArray[np.uint16]:
    """`fixed3` of either kind."""
    kv_heads, _, head_dim = packed.shape
    by_token = packed.axis == "channel"
    tokens, channels = 32 * math.ceil(packed.block_tokens / 32), 16 * math.ceil(head_dim / 16)
    row_tokens = 2 ** int(math.log2(256 // head_dim))
    rows = max(head_dim, math.ceil(tokens / row_tokens))
    groups = tokens * channels // 32
    main_bytes = 16 * math.ceil((44 * groups + head_dim + rows) / 16)
    patterns, pages = _begin(packed)
    for page, data in enumerate(pages):
        block = patterns[:, page * packed.block_tokens : (page + 1) * packed.block_tokens]
        if len(data) == 2 * packed.page_elements:
            block[:] = np.frombuffer(data, "<u2").reshape(block.shape)
            continue
        entry_place = kv_heads * main_bytes
        for head in range(kv_heads):
            record = data[head * main_bytes : (head + 1) * main_bytes]
            words = [int(word) for word in np.frombuffer(record, "<u4", 11 * groups)]
            bases = record[44 * groups :][:head_dim]
            ends = record[44 * groups + head_dim :][:rows]
            codes = {}
            for token in range(packed.block_tokens):
                for channel in range(head_dim):
                    if by_token:
                        plane, column = divmod(channel, channels // 4)
                        group = token // 2 * (channels // 16) + column // 4
                        m, half = 4 * plane + column % 4 // 2 * 2 + token % 2, channel % 2
                    else:
                        group = channel * (tokens // 32) + token // 32
                        m, half = token % 16, token // 16 % 2
                    word = words[2 * (m // 4 * groups + group) + m // 2 % 2]
                    rest = [words[8 * groups + 2 * group + i] for i in range(2)] + [
                        words[10 * groups + group]
                    ]
                    bits = _rotate_left(word, -8 * (m % 2)) & 0x03FC03FC
                    if m < 15:
                        bits |= _rotate_left(rest[m // 5], -3 * (m % 5)) & 0x80038003
                    else:
                        bits |= (
                            rest[0] << 1 & 0x80008000
                            | rest[1] >> 14 & 0x00010001
                            | rest[2] >> 13 & 0x00020002
                        )
                    code = codes[token, channel] = bits >> 16 * half & 0xFFFF
                    block[head, token, channel] = code + (bases[channel] << 7)
            for row in range(rows):
                for _ in range(ends[row] - (ends[row - 1] if row % 32 else 0)):
                    upper, position = data[entry_place], data[entry_place + 1]
                    entry_place += 2
                    if by_token:
                        token, channel = row * row_tokens + position % row_tokens, position // row_tokens
                    else:
                        j = position // 64 * 4 + position // 4 % 2 * 2 + position % 2
                        token, channel = 32 * (position // 8 % 8) + 16 * (position // 2 % 2) + j, row
                    block[head, token, channel] = upper << 8 | codes[token, channel] >> 2 & 0xFF
            entry_place = 16 * math.ceil(entry_place / 16)
    return patterns


def decode_escape(packed: Packed, code_bits: int) -> NDArray[np.uint16]:
    """`esc3` (codes of 3 bits) and `esc2-2` (2 bits)."""
    if packed.windows is None:
        raise ValueError("pages need the windows that they were packed with, got None")
    windows = packed.windows
    kv_heads, _, head_dim = packed.shape
    elements = packed.block_tokens * head_dim
    patterns, pages = _begin(packed)
    for page, data in enumerate(pages):
        for head in range(kv_heads):
            first = int.from_bytes(data[4 * head : 4 * head + 4], "little")
            plane = kv_heads * (4 + elements) + head * elements * code_bits // 8
            codes = _fields(data[plane:], code_bits, elements)
            second_count = codes.count(2**code_bits - 1)
            second = []
            if code_bits == 2:
                second = _fields(data[first:], 2, second_count)
                first += math.ceil(second_count / 4)
            nibble_count = second.count(3) if code_bits == 2 else second_count
            nibbles = _fields(data[first:], 4, nibble_count)
            whole = iter(data[first + math.ceil(nibble_count / 2) :])
            for element, code in enumerate(codes):
                token, channel = divmod(element, head_dim)
                narrow = range(int(windows.base(2**code_bits - 1)[head, channel]), 256)[: 2**code_bits - 1]
                level = list(narrow)
                if code == len(level) and code_bits == 2:
                    six = int(windows.base(6)[head, channel])
                    level, code = [e for e in range(six, six + 6) if e not in narrow], second.pop(0)
                if code == len(level):
                    nibble = nibbles.pop(0)
                    exponent = int(windows.wide_base[head, channel]) + nibble if nibble else next(whole)
                else:
                    exponent = level[code]
                sign_mantissa = data[4 * kv_heads + head * elements + element]
                patterns[head, page * packed.block_tokens + token, channel] = _pattern(
                    sign_mantissa, exponent
                )
    return patterns


def decode_tags(packed: Packed, group: int) -> NDArray[np.uint16]:
    """`tag8` and `tag32`."""
    if packed.windows is None:
        raise ValueError("pages need the windows that they were packed with, got None")
    kv_heads, _, head_dim = packed.shape
    elements = packed.block_tokens * head_dim
    tag_bytes = math.ceil(elements / group / 8)
    patterns, pages = _begin(packed)
    for page, data in enumerate(pages):
        for head in range(kv_heads):
            place, extras = (int.from_bytes(data[8 * head + at :][:4], "little") for at in (0, 4))
            plane = kv_heads * (8 + elements)
            codes = _fields(data[plane + head * elements * 3 // 8 :], 3, elements)
            tags = _fields(
                data[plane + kv_heads * elements * 3 // 8 + head * tag_bytes :], 1, elements // group
            )
            base = np.tile(packed.windows.narrow_base[head].astype(int), packed.block_tokens)
            exponents = (base + codes) % 256
            for number in range(elements // group):
                if tags[number]:
                    p, lane = divmod(data[place], group)
                    q = 1 if p == 256 // group - 1 else -(p + 1)
                    exponents[number * group + lane] = (exponents[number * group + lane] + 8 * q) % 256
                    place += 1
            for entry in range(extras):
                position = int.from_bytes(data[place + 2 * entry :][:2], "little")
                exponents[position] = data[place + 2 * extras + entry]
            for element in range(elements):
                token, channel = divmod(element, head_dim)
                sign_mantissa = data[8 * kv_heads + head * elements + element]
                patterns[head, page * packed.block_tokens + token, channel] = _pattern(
                    sign_mantissa, int(exponents[element])
                )
    return patterns


def _fields(data: bytes, bits: int, count: int) -> list[int]:
    """The first ``count`` fields of so many bits, from bit 0 of byte 0 on."""
    number = int.from_bytes(data[: math.ceil(count * bits / 8)], "little")
    return [(number >> bits * field) % 2**bits for field in range(count)]


def _begin(packed: Packed) -> tuple[NDArray[np.uint16], list[bytes]]:
    """Patterns with the tail in its place, and the bytes of each page."""
    kv_heads, tokens, head_dim = packed.shape
    patterns = np.empty((kv_heads, tokens, head_dim), np.uint16)
    patterns[:, packed.page_count * packed.block_tokens :] = packed.tail
    return patterns, [packed.pages[start:end].tobytes() for start, end in pairwise(packed.page_starts)]


def _place(packed: Packed, element: int) -> tuple[int, int]:
    """Token and channel of an element in group order."""
    if packed.axis == "channel":
        token, channel = divmod(element, packed.shape[2])
    else:
        channel, token = divmod(element, packed.block_tokens)
    return token, channel


def _pattern(sign_mantissa: int, exponent: int) -> int:
    sign, mantissa = divmod(sign_mantissa, 128)
    return sign * 2**15 + exponent * 2**7 + mantissa


def _rotate_left(word: int, bits: int) -> int:
    bits %= 32
    return (word << bits | word >> (32 - bits)) & 0xFFFFFFFF
