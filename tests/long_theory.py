"""Queueing theory at full size, as Markdown tables: `python -m tests.long_theory`, one to three minutes.

Ends with 1 where a call of the engine differs from the recursion, where the recursion is beyond a limit of
docs/theory.md, or where more intervals miss their closed form than chance explains.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import numpy as np

from tests.queueing import LOADS, QUEUES, Check, compare, estimate, uniforms
from tests.test_theory import CASES, assert_engine_is_the_recursion

#: Largest |error|: relative, but points for a probability of waiting.
LIMITS = {"W_q": 0.02, "loss": 0.02, "P(wait)": 0.01, "utilisation": 0.005}
#: Of 64 intervals of 99 %, more than three miss in one of 250 right programs.
MISSES = 3


@dataclass
class Table:
    """Prints rows of a Markdown table as they come."""

    columns: tuple[str, ...]

    def __post_init__(self) -> None:
        self.row(*self.columns)
        self.row(*["---"] * len(self.columns))

    def row(self, *cells: object) -> None:
        print("|", " | ".join(str(cell) for cell in cells), "|", flush=True)


def engine_against_recursion(calls: int) -> None:
    """Raises AssertionError at the first case in which a call differs."""
    print(f"\nEngine and recursion, {calls:,} calls each\n")
    table = Table(("queue", "load", "steps per service", "arrivals", "engine", "lost", "differing calls"))
    for case in CASES:
        lost = assert_engine_is_the_recursion(case, calls)
        arrivals = "at step ends" if case.on_grid else "Poisson"
        mode = "stepwise" if case.stepwise else "coalesced"
        table.row(case.queue.name, case.rho, f"{case.mean_steps:,}", arrivals, mode, f"{lost:,}", 0)


def recursion_against_closed_forms(calls: int, seed: int) -> bool:
    """Whether every measure is within its limit and no more than MISSES outside their 99 % intervals."""
    print(f"\nRecursion and closed forms, {calls:,} calls each in antithetic pairs, seed {seed}\n")
    table = Table(
        ("queue", "load", "measure", "closed form", "recursion", "error", "99 % interval", "remark")
    )
    rng = np.random.default_rng(seed)
    checks = [check for queue in QUEUES for rho in LOADS for check in compare(queue, rho, calls, rng)]
    for check in checks:
        unit = "points" if check.measure == "P(wait)" else "%"
        table.row(
            check.queue,
            check.rho,
            check.measure,
            f"{check.theory:.5f}",
            f"{check.estimate:.5f}",
            f"{100 * check.error:+.3f} {unit}",
            f"± {100 * check.half_width():.3f}",
            "beyond" if is_beyond(check) else "outside" if is_outside(check) else "",
        )
    beyond, outside = sum(map(is_beyond, checks)), sum(map(is_outside, checks))
    print(f"\nOf {len(checks)} measures {beyond} are beyond their limit, {outside} outside their interval")
    return beyond == 0 and outside <= MISSES


def is_beyond(check: Check) -> bool:
    return abs(check.error) > LIMITS[check.measure]


def is_outside(check: Check) -> bool:
    return abs(check.error) > check.half_width()


def what_steps_change(calls: int, seed: int) -> None:
    """Mean wait with services of few steps against that with steps of 1 fs, on the same numbers."""
    print(f"\nMean wait with steps, against the textbook queue, {calls:,} calls each, seed {seed}\n")
    counts = (10, 100, 1_000, 10_000)
    table = Table(("queue", "load", *(f"{count:,} steps per service" for count in counts)))
    rng = np.random.default_rng(seed)
    for queue in QUEUES[:2]:
        for rho in LOADS:
            u = uniforms(rng, calls)
            textbook = estimate(queue, rho, u)["W_q"]
            changes = (estimate(queue, rho, u, count)["W_q"] / textbook - 1 for count in counts)
            table.row(queue.name, rho, *(f"{100 * change:+.3f} %" for change in changes))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=10**7, help="calls per queue and load (%(default)s)")
    parser.add_argument("--engine-calls", type=int, default=10**5, help="calls per engine run (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    engine_against_recursion(args.engine_calls)
    agrees = recursion_against_closed_forms(args.calls, args.seed)
    what_steps_change(min(args.calls, 10**6), args.seed)
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
