"""Latency of one request, by formula: every time that the metrics and the SLO check speak of is made here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvfold.sim.run import OUTCOMES, Calls

Floats = NDArray[np.float64]

COMPLETED = OUTCOMES.index("completed")


@dataclass(frozen=True, slots=True)
class Latency:
    """One value per request in seconds, NaN where it is not defined. docs/metrics.md has the formulas.

    With a = arrival, s = first scheduled, f = first output token, l = last output token, N = output tokens.
    """

    queue_s: Floats  # s - a
    prefill_s: Floats  # f - s, a preemption during prefill included
    decode_s: Floats  # l - f, a preemption during decode included
    ttft_s: Floats  # f - a
    ttft_from_schedule_s: Floats  # f - s
    tpot_s: Floats  # (l - f) / (N - 1); not defined for N < 2
    e2e_s: Floats  # l - a
    norm_latency_s: Floats  # (l - a) / N


@dataclass(frozen=True, slots=True)
class TokenLatency:
    """Latency of requests whose every token is timed, and the gaps pooled over all of them."""

    requests: Latency
    output_tokens: NDArray[np.int64]
    itl_s: Floats  # [sum of N - 1], one per token after the first of its request
    icl_s: Floats  # [chunks after the first], tokens that complete at one instant are one chunk


def latency(
    arrival_s: ArrayLike,
    scheduled_s: ArrayLike,
    first_token_s: ArrayLike,
    last_token_s: ArrayLike,
    output_tokens: ArrayLike,
) -> Latency:
    """The per-request formulas; arguments have one value per request."""
    a, s, f, last = (np.asarray(x, np.float64) for x in (arrival_s, scheduled_s, first_token_s, last_token_s))
    tokens = np.asarray(output_tokens, np.int64)
    gaps = np.where(tokens >= 2, tokens - 1, np.nan)
    return Latency(
        queue_s=s - a,
        prefill_s=f - s,
        decode_s=last - f,
        ttft_s=f - a,
        ttft_from_schedule_s=f - s,
        tpot_s=(last - f) / gaps,
        e2e_s=last - a,
        norm_latency_s=(last - a) / np.where(tokens >= 1, tokens, np.nan),
    )


def call_latency(calls: Calls) -> Latency:
    """Latency of the completed calls; rows of the others are NaN, so that no average can hold them."""
    done = calls.outcome == COMPLETED
    return latency(
        np.where(done, calls.arrival_s, np.nan),
        calls.scheduled_s,
        np.where(done, calls.first_token_s, np.nan),
        np.where(done, calls.last_token_s, np.nan),
        calls.output_tokens,
    )


def token_latency(arrival_s: ArrayLike, scheduled_s: ArrayLike, token_s: Sequence[ArrayLike]) -> TokenLatency:
    """Latency from explicit token completion times: ``token_s[r]`` holds those of request r, in order.

    Raises ValueError for a request without a token.
    """
    times = [np.asarray(request, np.float64) for request in token_s]
    if any(len(request) == 0 for request in times):
        raise ValueError("every request must have at least one token time, got one without")
    tokens = np.array([len(request) for request in times], np.int64)
    gaps = [np.diff(request) for request in times]
    pooled = np.concatenate(gaps) if gaps else np.empty(0)
    return TokenLatency(
        requests=latency(
            arrival_s,
            scheduled_s,
            [request[0] for request in times],
            [request[-1] for request in times],
            tokens,
        ),
        output_tokens=tokens,
        itl_s=pooled,
        icl_s=pooled[pooled > 0],
    )
