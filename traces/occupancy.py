"""How long contexts are held: while a call is served, and between calls, by what the session waits for.

A call's context is its prompt and its output. It is held for the time of its service, and then until the next
call of its thread (same session and agent) arrives, unless a retention limit ends it before: token-seconds of
KV, whatever a token costs. Service is the recorded one, so the figures belong to the system that was logged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvfold.traces.table import WAIT_KINDS, Ints, Trace

#: Retention limits that `inspect` prints; infinity holds every context to the next call.
LIMITS_S = (60.0, 300.0, 600.0, 3_600.0, float("inf"))


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Token-seconds held in waits, over those held in service.

    ``ratios[kind][i]`` is for waits of that kind and ``limits_s[i]``; NaN where no service time is recorded.
    ``calls_without_service`` are not in the denominator, ``waits_unknown`` not in the numerator.
    """

    limits_s: tuple[float, ...]
    ratios: dict[str, tuple[float, ...]]
    service_token_s: float
    calls_without_service: int
    waits_unknown: int


def before_in_thread(trace: Trace) -> Ints:
    """The row of the call before, in the same session and agent; -1 for the first and for single-shot calls."""
    rows = np.lexsort((np.arange(len(trace)), trace.agent_id, trace.session_id))
    session, agent = trace.session_id[rows], trace.agent_id[rows]
    follows = (session[1:] == session[:-1]) & (agent[1:] == agent[:-1]) & (session[1:] >= 0)
    before = np.full(len(trace), -1, np.int64)
    before[rows[1:][follows]] = rows[:-1][follows]
    return before


def occupancy(trace: Trace, limits_s: tuple[float, ...] = LIMITS_S) -> Occupancy:
    """Measures ``trace``; a wait counts up to each of ``limits_s`` seconds, with the context before it."""
    context_tokens = (trace.input_tokens + np.maximum(trace.output_tokens, 0)).astype(np.float64)
    served = ~np.isnan(trace.recorded_e2e_s)
    service_token_s = float((context_tokens[served] * trace.recorded_e2e_s[served]).sum())
    before = before_in_thread(trace)
    follows = before >= 0
    known = follows & ~np.isnan(trace.wait_before_s)
    ratios: dict[str, tuple[float, ...]] = {}
    for code, kind in enumerate(WAIT_KINDS):
        rows = np.flatnonzero(known & (trace.wait_kind == code))
        if not rows.size:
            continue
        held = context_tokens[before[rows]]
        token_s = [float((held * np.minimum(trace.wait_before_s[rows], limit)).sum()) for limit in limits_s]
        ratios[kind] = tuple(each / service_token_s if service_token_s else float("nan") for each in token_s)
    return Occupancy(
        limits_s, ratios, service_token_s, int((~served).sum()), int(follows.sum() - known.sum())
    )
