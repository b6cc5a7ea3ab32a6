"""What happens to a session's KV while it waits for a tool or a person.

`lru`: it stays as prefix cache as long as nobody needs the room. `keep`: it is held until the next call. `drop`:
it goes at once and is computed again. `ttl:SECONDS`: held so long, then as `lru`. `swap`: it goes to host memory
and comes back over the link. `least-waste`: of keep, drop and swap the one with the smallest expected waste.
`oracle`: a bound on them all, as if every later use were known and every transfer hidden: what was computed once
comes back at no cost, and a session that waits holds nothing that others could use.

Waste is counted in byte-seconds, after InferCept (Abhyankar et al., ICML 2024): keep wastes the bytes held for the
wait; drop the bytes of this session and of all that stand still while it is computed again; swap the bytes of the
batch for as long as a transfer cannot be hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvfold.sim.errors import ConfigError
from kvfold.sim.run import FS_PER_S
from kvfold.sim.work import Chunk
from kvfold.traces.table import WAIT_KINDS

if TYPE_CHECKING:
    from kvfold.sim.work import Cost
    from kvfold.traces.table import Trace

POLICIES = ("lru", "keep", "drop", "ttl", "swap", "least-waste", "oracle")


@dataclass(frozen=True, slots=True)
class Retention:
    """A policy and, for `ttl`, its time."""

    policy: str = "lru"
    ttl_s: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether KV may be held against eviction, so that its release can let a waiting call in."""
        return self.policy in ("keep", "ttl", "least-waste")


def parse_retention(text: str) -> Retention:
    """`lru, keep, drop, swap, least-waste, oracle` or `ttl:SECONDS`; raises ConfigError for anything else."""
    name, colon, number = text.partition(":")
    if name not in POLICIES or bool(colon) != (name == "ttl"):
        raise ConfigError(
            f"--retention must be lru, keep, drop, ttl:SECONDS, swap, least-waste or oracle, got {text!r}"
        )
    if name != "ttl":
        return Retention(name)
    try:
        seconds = float(number)
    except ValueError:
        seconds = float("nan")
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"the time of --retention ttl:SECONDS must be a number from 0 up, got {number!r}")
    return Retention(name, seconds)


@dataclass(frozen=True, slots=True)
class Waits:
    """Per call: the wait until its next call (None: it has none), and the mean wait of that kind in the trace."""

    actual_s: list[float | None]
    expected_s: list[float]


def waits_of(trace: Trace) -> Waits:
    """The shortest wait over a call's children; unknown waits count as 0, as they are replayed."""
    waits_s = np.nan_to_num(trace.edge_wait_s, nan=0.0)
    mean_of = {
        kind: float(waits_s[trace.edge_wait_kind == kind].mean())
        for kind in range(len(WAIT_KINDS))
        if (trace.edge_wait_kind == kind).any()
    }
    actual: list[float | None] = [None] * len(trace)
    expected = [0.0] * len(trace)
    for parent, wait_s, kind in zip(
        trace.edge_parent.tolist(), waits_s.tolist(), trace.edge_wait_kind.tolist(), strict=True
    ):
        known = actual[parent]
        if known is None or wait_s < known:
            actual[parent] = wait_s
            expected[parent] = mean_of[kind]
    return Waits(actual, expected)


@dataclass(frozen=True, slots=True)
class Stake:
    """What is at stake when a call ends: its own bytes, those of the others, and the times to get back."""

    own_bytes: int
    others_bytes: int
    reprefill_s: float
    transfer_s: float
    hidden_s: float  # of a transfer, behind the step that it goes with


def choose(stake: Stake, wait_s: float) -> str:
    """`keep, drop` or `swap` for a call whose session is expected to wait so long: the one of least waste."""
    batch_bytes = stake.own_bytes + stake.others_bytes
    waste = {
        "keep": stake.own_bytes * wait_s,
        "drop": batch_bytes * stake.reprefill_s,
        "swap": batch_bytes * max(0.0, stake.transfer_s - stake.hidden_s),
    }
    return min(waste, key=lambda name: (waste[name], name != "keep"))


def reprefill_s(cost: Cost, tokens: int, chunk_tokens: int) -> float:
    """Time to compute a prompt of so many tokens alone, in chunks of the token budget."""
    fs, done = 0, 0
    while done < tokens:
        step = min(chunk_tokens, tokens - done)
        fs += cost.base_fs(0, step, 0) + cost.chunk_fs(Chunk(step, done, False))
        done += step
    return fs / FS_PER_S
