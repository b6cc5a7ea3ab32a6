"""Packers and unpackers that look right and are not; every one must fail its test."""

import torch

from kvfold.kernels.fixed4_pack import pack
from kvfold.kernels.fixed4_unpack import unpack


def does_nothing(raw, raw_pages, records, places, kind, block_tokens):
    return torch.zeros((len(places), raw.shape[1]), dtype=torch.int32)


def skips_the_last_block(raw, raw_pages, records, places, kind, block_tokens):
    pack(raw, raw_pages[:-1].contiguous(), records, places[:-1].contiguous(), kind, block_tokens)
    return torch.zeros((len(places), raw.shape[1]), dtype=torch.int32)


def swaps_the_kinds(raw, raw_pages, records, places, kind, block_tokens):
    return pack(raw, raw_pages, records, places, "v" if kind == "k" else "k", block_tokens)


def forgets_exceptions(raw, raw_pages, records, places, kind, block_tokens):
    counts = pack(raw, raw_pages, records, places, kind, block_tokens)
    start = block_tokens * raw.shape[3] * 3 // 2
    records[..., start : start + 64] = 0
    return counts


def lists_exceptions_backwards(raw, raw_pages, records, places, kind, block_tokens):
    counts = pack(raw, raw_pages, records, places, kind, block_tokens)
    start = block_tokens * raw.shape[3] * 3 // 2
    entries = records[..., start : start + 64].contiguous().view(torch.int32)
    records[..., start : start + 64] = entries.flip(-1).contiguous().view(torch.uint8)
    return counts


def writes_past_the_end(raw, raw_pages, records, places, kind, block_tokens):
    counts = pack(raw, raw_pages, records, places, kind, block_tokens)
    torch.as_strided(records, (records.numel() + 1,), (1,))[-1] = 0
    return counts


def unpacks_nothing(records, places, raw, raw_pages, kind, block_tokens):
    pass


def loses_the_sign_of_zero(records, places, raw, raw_pages, kind, block_tokens):
    unpack(records, places, raw, raw_pages, kind, block_tokens)
    raw[raw == 0] = 0.0


def rounds(records, places, raw, raw_pages, kind, block_tokens):
    unpack(records, places, raw, raw_pages, kind, block_tokens)
    bits = raw.view(torch.int16)
    bits[bits != 0] &= ~1


PACKERS = (
    does_nothing,
    skips_the_last_block,
    swaps_the_kinds,
    forgets_exceptions,
    lists_exceptions_backwards,
    writes_past_the_end,
)
UNPACKERS = (unpacks_nothing, loses_the_sign_of_zero, rounds)
