"""Calls that wait for admission, in order of priority (lower numbers first), then of arrival."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from kvfold.sim.errors import ConfigError

if TYPE_CHECKING:
    from kvfold.traces.table import Trace

ORDERS = "fcfs, sessions-first or tenants:NAME,NAME,..."


@dataclass(slots=True, eq=False)
class Waiting:
    """A call in the queue; `generated` output tokens were handed out before a preemption.

    `host_tokens` of its prompt lie in host memory and come back over the link; `host_bytes` of them are its own,
    put there when it was preempted.
    """

    call: int
    input_tokens: int
    output_tokens: int
    priority: int = 0
    rank: int = 0  # number of its arrival
    generated: int = 0
    preemptions: int = 0
    host_tokens: int = 0
    host_bytes: int = 0


class Queue(list[tuple[int, int, Waiting]]):
    """Waiting calls as a heap of (priority, rank, call); the head is the next to be admitted."""

    def push(self, waiting: Waiting) -> None:
        heappush(self, (waiting.priority, waiting.rank, waiting))

    def head(self) -> Waiting:
        return self[0][2]

    def take(self) -> Waiting:
        """The head, which waits no longer."""
        return heappop(self)[2]

    def in_order(self) -> list[Waiting]:
        return [waiting for _, _, waiting in sorted(self)]

    def give_up(self, call: int) -> Waiting | None:
        """Take a call out that has not been admitted yet; None if it has, or is not here."""
        for index, (_, _, waiting) in enumerate(self):
            if waiting.call == call and not waiting.preemptions:
                del self[index]
                heapify(self)
                return waiting
        return None


def check_order(order: str) -> None:
    """Raises ConfigError unless `order` is one of ORDERS."""
    name, _, tenants = order.partition(":")
    if order not in ("fcfs", "sessions-first") and not (name == "tenants" and all(tenants.split(","))):
        raise ConfigError(f"--scheduler must be {ORDERS}, got {order!r}")


def priorities_of(order: str, trace: Trace) -> list[int]:
    """The priority of every call, lower first.

    `fcfs`: all are equal. `sessions-first`: calls that go on with a session before first and single ones.
    `tenants:A,B`: calls of tenant A, then of B, then all others. Raises ConfigError for another order, and for a
    tenant that the trace does not know.
    """
    check_order(order)
    if order == "fcfs":
        return [0] * len(trace)
    if order == "sessions-first":
        later = set(trace.edge_child.tolist())
        return [0 if call in later else 1 for call in range(len(trace))]
    named = order.partition(":")[2].split(",")
    unknown = sorted(set(named) - set(trace.tenant))
    if unknown:
        known = ", ".join(sorted(set(trace.tenant) - {""})[:8]) or "none"
        raise ConfigError(f"--scheduler {order}: no call of tenant {unknown[0]!r}; the trace has {known}")
    return [named.index(tenant) if tenant in named else len(named) for tenant in trace.tenant]
