"""Random shapes and contents through the gate, in few compiled variants."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvfold.kernels.gate import find_faults
from kvfold.kernels.inputs import Case

if TYPE_CHECKING:
    from collections.abc import Iterator

# What kernels are compiled for: group, head_dim, block_tokens, raw_page_tokens.
VARIANTS = (
    (4, 128, 256, 64),
    (4, 128, 256, 16),
    (1, 64, 256, 32),
    (8, 64, 128, 128),
    (16, 128, 256, 256),
    (5, 128, 128, 16),
)


def cases(count: int, seed: int) -> Iterator[Case]:
    """Seeded cases: ragged lengths, odd head counts, raw blocks among packed ones, windows on every third."""
    rng = random.Random(seed)
    for number in range(count):
        group, head_dim, block_tokens, raw_page_tokens = VARIANTS[number % len(VARIANTS)]
        has_window = number // len(VARIANTS) % 3 == 0
        yield Case(
            lengths=tuple(
                rng.choice((1, 63, block_tokens, rng.randint(1, 3000))) for _ in range(rng.randint(1, 4))
            ),
            kv_heads=rng.choice((1, 2, 3)),
            group=group,
            head_dim=head_dim,
            block_tokens=block_tokens,
            raw_page_tokens=raw_page_tokens,
            raw_share=0.0 if has_window else rng.choice((0.0, 0.3)),
            window=rng.choice((64, 500, 1024)) if has_window else None,
            seed=rng.randrange(1 << 30),
        )


def fuzz(count: int, seed: int, device: str) -> Iterator[tuple[Case, list[str]]]:
    """Each case with its faults."""
    rng = random.Random(seed + 1)
    for case in cases(count, seed):
        yield case, find_faults(case, device, splits=rng.choice((1, 3, 5)))
