"""Allocation units of the KV pool: how many a sequence has, and how many bytes each of them takes.

A unit is a page of unpacked KV (16 tokens by default), or one codec block of every layer. Where the blocks of a
format differ in size, a unit is the sum of one drawn block per array, K and V of each layer: a random source of
its kind, then a quantile of that source's measured sizes, or raw BF16 with the share of blocks that stay so. Drawn
units lie in a ring, and each prefix chain and each sequence reads it from a place of its own: a unit has the same
size whoever asks, and the bytes of a run of units are a difference of two sums, however long it is.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from kvfold.codec.sizes import BF16_BITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvfold.codec.sizes import BlockBits, FormatSizes
    from kvfold.sim.memory import MemoryBudget
    from kvfold.sim.model import ModelSpec

#: Units in the ring: their mean is that of the format within the spread of one unit / 64.
DRAWS = 4096
#: Sets this stream of random numbers apart from the others of the same seed.
_STREAM = 0x51ED
#: Spreads consecutive keys over the ring (2^32 over the golden ratio).
_SPREAD = 2654435769


@dataclass(frozen=True, slots=True)
class Units:
    """`mean_bytes` is what every unit takes, unless `sums` (prefix sums of the ring, DRAWS + 1) says otherwise.

    `raw_bytes`: a unit of which every block is raw, the worst case.
    """

    tokens: int
    packed: bool
    mean_bytes: int
    raw_bytes: int
    largest_bytes: int
    sums: tuple[int, ...] = ()

    @property
    def drawn(self) -> bool:
        """Whether units differ in size."""
        return bool(self.sums)

    def blocks(self, tokens: int) -> int:
        """Units of a sequence of `tokens` tokens: pages begun, or codec blocks filled."""
        return tokens // self.tokens if self.packed else -(-tokens // self.tokens)

    def run_bytes(self, key: int, first: int, last: int) -> int:
        """Bytes of the units [first, last) of the chain or sequence `key`; units count from the first token."""
        if not self.sums:
            return (last - first) * self.mean_bytes
        return self._before(key, last) - self._before(key, first)

    def cut(self, key: int, last: int, size_bytes: int) -> int:
        """The largest position from which the units up to `last` take at least `size_bytes`; may be negative."""
        if not self.sums:
            return last - -(-size_bytes // self.mean_bytes)
        rounds, rest = divmod(self._before(key, last) - size_bytes, self.sums[-1])
        return rounds * DRAWS + bisect_right(self.sums, rest, hi=DRAWS) - 1 - _offset(key)

    def _before(self, key: int, position: int) -> int:
        rounds, rest = divmod(_offset(key) + position, DRAWS)
        return rounds * self.sums[-1] + self.sums[rest]


def _offset(key: int) -> int:
    return key * _SPREAD % 2**32 * DRAWS >> 32


def draw_units(model: ModelSpec, sizes: FormatSizes, tp: int, budget: MemoryBudget, seed: int) -> Units:
    """The units of one GPU's pool; a pure function of its arguments.

    An MLA layer has one array, whose blocks are drawn from K and V alike.
    """
    tokens = budget.unit_tokens
    raw_bytes = tokens * model.kv_bytes_per_token(tp=tp) if budget.packed else budget.unit_bytes
    known = [source for source in sizes.blocks if source.raw_block_share or source.chunked]
    if not (budget.packed and known and model.kv_elements_per_token(tp)):
        return Units(tokens, budget.packed, budget.unit_bytes, raw_bytes, budget.unit_bytes)
    rng = np.random.default_rng([_STREAM, seed])
    latent = model.mla_rank + model.mla_rope_dim
    # elements per token of K, or of V, of one layer
    head = (model.kv_elements_per_token(tp) - model.mla_layers * latent) // max(1, 2 * model.full_layers)
    bits = np.zeros(DRAWS)
    for kinds, arrays, elements in (
        ("k", model.full_layers, head),
        ("v", model.full_layers, head),
        ("kv", model.mla_layers, latent),
    ):
        sources = [source for source in sizes.blocks if source.kind in kinds]
        bits += elements * tokens * _draw_bits(rng, sources, (DRAWS, arrays)).sum(axis=1)
    drawn = np.rint(bits / 8).astype(np.int64).tolist()
    return Units(tokens, budget.packed, budget.unit_bytes, raw_bytes, max(drawn), (0, *accumulate(drawn)))


def _draw_bits(
    rng: np.random.Generator, sources: Sequence[BlockBits], shape: tuple[int, int]
) -> NDArray[np.float64]:
    """Resident bits per element of blocks, [units, arrays]."""
    which, quantile, chance = rng.integers(len(sources), size=shape), rng.random(shape), rng.random(shape)
    bits = np.empty(shape)
    for index, source in enumerate(sources):
        mine = which == index
        bits[mine] = source.resident_bits
        if source.chunked:
            shares, encoded = np.array(source.shares), np.array(source.encoded_bits)
            mean = float(np.diff(shares) @ (encoded[1:] + encoded[:-1]) / 2)
            bits[mine] += np.interp(quantile[mine], shares, encoded) - mean
        bits[mine & (chance < source.raw_block_share)] = BF16_BITS
    return bits
