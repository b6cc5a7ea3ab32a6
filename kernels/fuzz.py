"""Random shapes and contents through the gate, in few compiled variants, many processes side by side."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING

from kvfold.kernels.inputs import Case

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Variant:
    """What kernels are compiled for, the checks (`kvfold.kernels.gate.CHECKS`) and a share of the cases."""

    checks: tuple[str, ...]
    group: int
    head_dim: int
    block_tokens: int
    raw_page_tokens: int
    splits: int
    windows: tuple[int | None, ...] = (None, 64, 500, 1024)
    programs: int | None = None
    copies: int = 2  # of fused formats (`kvfold.kernels.shares.copies_at_once`)
    weight: int = 2

    @property
    def has_skips(self) -> bool:
        """Of all cases alike: a kernel for windows is one more variant, and takes cases without one too."""
        return self.windows != (None,)


VARIANTS = (
    # The shapes that are timed, in each way to divide the work, up to the most query heads of a KV head.
    Variant(("bf16", "fixed4", "fixed4-pages"), 4, 128, 256, 64, 3, (None,), weight=4),
    Variant(("bf16", "fixed3", "fixed3-pages"), 4, 128, 256, 64, 3, (None,), weight=4),
    Variant(("bf16", "fixed4", "fixed3"), 8, 128, 256, 64, 1, copies=1, weight=3),
    Variant(("bf16", "fixed4", "fixed3"), 16, 128, 256, 64, 1, programs=11, copies=1, weight=3),
    # Other sizes.
    Variant(("bf16", "fixed4-coded"), 16, 64, 128, 16, 3, weight=4),
    Variant(("bf16", "fixed4-coded"), 16, 256, 256, 256, 1, copies=1),
    # Kernels that are not tuned, and the lossy peer.
    Variant(("fixed4-portable", "fixed3-portable"), 4, 128, 256, 64, 2),
    Variant(("gaac", "gaac-decode"), 4, 128, 64, 64, 3),
    Variant(("fp8-e4m3", "fp8-e5m2"), 4, 128, 256, 64, 3),
)
CHUNK = 40  # cases that one process takes at a time


def cases(count: int, seed: int) -> Iterator[tuple[int, Case]]:
    """Seeded cases, each with the number of its variant: ragged and empty sequences, odd head counts, raw blocks
    among packed ones or a window, pages that several sequences share."""
    rng = random.Random(seed)
    turns = [number for number, variant in enumerate(VARIANTS) for _ in range(variant.weight)]
    for turn in range(count):
        number = turns[turn % len(turns)]
        variant = VARIANTS[number]
        window = variant.windows[turn // len(turns) % len(variant.windows)]
        lengths = tuple(
            rng.choice((0, 1, 63, variant.block_tokens, *(rng.randint(1, 3000) for _ in range(4))))
            for _ in range(rng.randint(2, 5))  # a batch or a head count of 1 would be one more variant
        )
        yield (
            number,
            Case(
                lengths=lengths,
                kv_heads=rng.choice((2, 3)),
                group=variant.group,
                head_dim=variant.head_dim,
                block_tokens=variant.block_tokens,
                raw_page_tokens=variant.raw_page_tokens,
                raw_share=rng.choice((0.0, 0.3)) if window is None else 0.0,
                window=window,
                seed=rng.randrange(1 << 30),
                shared_blocks=rng.choice((0, 0, 1, 4)),
            ),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case: what was checked, a fused format also in the tile, and what is wrong."""

    case: Case
    checks: tuple[str, ...]
    faults: list[str]


def fuzz(count: int, seed: int, device: str, jobs: int = 1) -> Iterator[Outcome | frozenset[str]]:
    """Each case with its faults, in any order; last the kernels that were compiled.

    With several jobs a process takes a variant at a time, so that none compiles what another has.
    """
    chosen: dict[int, list[Case]] = {}
    for number, case in cases(count, seed):
        chosen.setdefault(number, []).append(case)
    # First a chunk of each variant: whoever comes later finds its kernels in Triton's cache.
    longest = max(map(len, chosen.values()))
    tasks = [
        (number, some[start : start + CHUNK], device)
        for start in range(0, longest, CHUNK)
        for number, some in chosen.items()
        if start < len(some)
    ]
    variants: frozenset[str] = frozenset()
    done: Iterator[tuple[list[Outcome], frozenset[str]]]
    if jobs == 1:
        done = map(_check, tasks)
    else:
        pool = get_context("spawn").Pool(min(jobs, len(tasks)))
        done = pool.imap_unordered(_check, tasks)
    for outcomes, compiled in done:
        yield from outcomes
        variants |= compiled
    yield variants


def _check(task: tuple[int, list[Case], str]) -> tuple[list[Outcome], frozenset[str]]:
    from kvfold.kernels.gate import check_case

    number, some, device = task
    variant = VARIANTS[number]
    outcomes = []
    for case in some:
        try:
            gate = check_case(
                case,
                device,
                variant.checks,
                variant.splits,
                variant.programs,
                variant.has_skips,
                variant.copies,
            )
            outcomes.append(Outcome(case, tuple(gate.checked), gate.faults))
        except Exception as error:  # a launch that fails is a fault of its case, not the end of the others
            outcomes.append(Outcome(case, (), [f"{type(error).__name__}: {error}"]))
    return outcomes, _compiled()


def _compiled() -> frozenset[str]:
    """All kernels that this process has compiled or loaded from Triton's cache: module, name and specialization.

    Not their hashes: those of Triton depend on which other kernels a process has met before.
    """
    from triton.runtime.jit import JITFunction

    functions = {
        id(value): value
        for name, module in list(sys.modules.items())
        if name.startswith("kvfold.kernels.")
        for value in vars(module).values()
        if isinstance(value, JITFunction)
    }
    return frozenset(
        f"{function.__module__.rpartition('.')[2]}.{function.__name__} {specialization}"
        for function in functions.values()
        for caches in function.device_caches.values()
        for specialization in caches[0]
    )
