"""Which replica a call goes to. A router is a function of the replicas and the call; it may remember sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvfold.sim.errors import ConfigError

if TYPE_CHECKING:
    from kvfold.sim.engine import Engine
    from kvfold.traces.table import Trace

Router = Callable[[Sequence["Engine"], int], int]  # (replicas, call) -> index of a replica


def round_robin(_: Trace) -> Router:
    """Each call to the next replica."""
    turn = -1

    def route(replicas: Sequence[Engine], call: int) -> int:
        nonlocal turn
        turn = (turn + 1) % len(replicas)
        return turn

    return route


def least_outstanding(_: Trace) -> Router:
    """The replica with the fewest tokens still to compute or to generate."""
    return lambda replicas, call: _lightest(replicas)


def fewest_calls(_: Trace) -> Router:
    """The replica with the fewest calls, a waiting one counted as four that run: vLLM's rule between its
    data-parallel ranks (DPLBAsyncMPClient.get_core_engine_for_request), on counts that are never stale."""
    return lambda replicas, call: min(range(len(replicas)), key=lambda index: _load(replicas[index]))


def prefix_affinity(_: Trace) -> Router:
    """The replica that holds the longest prefix of the prompt; the lightest one among equals."""

    def route(replicas: Sequence[Engine], call: int) -> int:
        hits = [replica.cached_tokens(call) for replica in replicas]
        longest = max(hits)
        return _lightest(replicas, [index for index, hit in enumerate(hits) if hit == longest])

    return route


def session_sticky(trace: Trace) -> Router:
    """A session stays where its first call went: to the replica that was lightest then."""
    session_of = trace.session_id.tolist()
    home: dict[int, int] = {}

    def route(replicas: Sequence[Engine], call: int) -> int:
        session = session_of[call]
        if session < 0:
            return _lightest(replicas)
        if session not in home:
            home[session] = _lightest(replicas)
        return home[session]

    return route


ROUTERS: dict[str, Callable[[Trace], Router]] = {
    "round-robin": round_robin,
    "least-outstanding": least_outstanding,
    "fewest-calls": fewest_calls,
    "prefix-affinity": prefix_affinity,
    "session-sticky": session_sticky,
}


def make_router(name: str, trace: Trace) -> Router:
    """A fresh router; raises ConfigError for an unknown name."""
    if name not in ROUTERS:
        raise ConfigError(f"--router must be one of {', '.join(ROUTERS)}, got {name!r}")
    return ROUTERS[name](trace)


def _load(replica: Engine) -> int:
    return 4 * len(replica.state.waiting) + len(replica.state.running)


def _lightest(replicas: Sequence[Engine], among: Sequence[int] | None = None) -> int:
    indices = range(len(replicas)) if among is None else among
    return min(indices, key=lambda index: (replicas[index].outstanding_tokens, index))
