"""Packers and unpackers of `fixed3` that look right and are not; every one must fail its test."""

import torch

from kvfold.kernels.fixed3_pack import Slots, pack
from kvfold.kernels.fixed3_unpack import unpack


def does_nothing(raw, raw_pages, slots, places, kind, block_tokens):
    return torch.zeros((len(places), raw.shape[1]), dtype=torch.int32)


def swaps_the_kinds(raw, raw_pages, slots, places, kind, block_tokens):
    return pack(raw, raw_pages, slots, places, "v" if kind == "k" else "k", block_tokens)


def forgets_the_last_entry(raw, raw_pages, slots, places, kind, block_tokens):
    counts = pack(raw, raw_pages, slots, places, kind, block_tokens)
    lists = slots.lists.view(torch.int16)
    for block, place in enumerate(places.tolist()):
        for head in range(raw.shape[1]):
            lists[place, head, int(counts[block, head]) - 1] = 0
    return counts


def swaps_two_entries(raw, raw_pages, slots, places, kind, block_tokens):
    counts = pack(raw, raw_pages, slots, places, kind, block_tokens)
    lists = slots.lists.view(torch.int16)
    lists[..., :2] = lists[..., :2].flip(-1)
    return counts


def shifts_a_base(raw, raw_pages, slots, places, kind, block_tokens):
    counts = pack(raw, raw_pages, slots, places, kind, block_tokens)
    start = 11 * block_tokens * raw.shape[3] // 8
    slots.mains[..., start : start + 1] += 1
    return counts


def writes_behind_a_list(raw, raw_pages, slots, places, kind, block_tokens):
    counts = pack(raw, raw_pages, slots, places, kind, block_tokens)
    slots.lists[..., -1] = 0
    return counts


def writes_past_the_end(raw, raw_pages, slots, places, kind, block_tokens):
    counts = pack(raw, raw_pages, slots, places, kind, block_tokens)
    torch.as_strided(slots.mains, (slots.mains.numel() + 1,), (1,))[-1] = 0
    return counts


def unpacks_nothing(slots, places, raw, raw_pages, kind, block_tokens):
    pass


def forgets_exceptions(slots, places, raw, raw_pages, kind, block_tokens):
    mains = slots.mains.clone()
    mains[..., 11 * block_tokens * raw.shape[3] // 8 + raw.shape[3] :] = 0
    unpack(Slots(mains, slots.lists, slots.entries), places, raw, raw_pages, kind, block_tokens)


def loses_the_sign_of_zero(slots, places, raw, raw_pages, kind, block_tokens):
    unpack(slots, places, raw, raw_pages, kind, block_tokens)
    raw[raw == 0] = 0.0


PACKERS = (
    does_nothing,
    swaps_the_kinds,
    forgets_the_last_entry,
    swaps_two_entries,
    shifts_a_base,
    writes_behind_a_list,
    writes_past_the_end,
)
UNPACKERS = (unpacks_nothing, forgets_exceptions, loses_the_sign_of_zero)
