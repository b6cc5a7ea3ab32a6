"""What one simulation returns: one flat row per call, one per engine step or stretch of equal steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

#: Unit of the simulation's clock.
FS_PER_S = 10**15

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: Codes of ``Calls.outcome`` are positions in this tuple.
OUTCOMES = ("completed", "rejected", "timed_out", "failed")


@dataclass(frozen=True, slots=True)
class Calls:
    """One row per offered call, in trace order. Times are seconds from the start of the run, NaN if never.

    ``output_tokens`` is what the call produced (0 if rejected). ``cached_tokens`` counts prompt tokens found in
    the prefix cache, or brought back from host memory, at the first admission; ``prefilled_tokens`` all tokens
    computed as prefill, the ones computed again after a preemption included.
    """

    request_id: Ints
    session_id: NDArray[np.int32]
    input_tokens: Ints
    output_tokens: Ints
    arrival_s: Floats
    scheduled_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    cached_tokens: Ints
    prefilled_tokens: Ints
    preemptions: Ints
    outcome: NDArray[np.int8]
    replica: Ints  # -1: never accepted
    wait_before_s: Floats  # simulated wait between the last parent's end and the arrival; NaN for roots
    wait_kind: NDArray[np.int8]  # traces.table.WAIT_KINDS


@dataclass(frozen=True, slots=True)
class Stretches:
    """Runs of consecutive engine steps whose duration changes linearly.

    Step j of a stretch (j = 0 .. steps-1) lasts ``first_step_fs + j * growth_fs`` femtoseconds; in each of its
    steps ``decode_seqs`` sequences gain one token after an earlier one of theirs (so it counts that many
    inter-token gaps) and ``prefill_tokens`` prompt tokens are computed.
    """

    start_s: Floats
    steps: Ints
    first_step_fs: Ints
    growth_fs: Ints
    decode_seqs: Ints
    prefill_tokens: Ints
    kv_tokens: Ints  # live tokens of decoding sequences at the first step
    waiting: Ints  # calls in the queue when the stretch starts
    used_bytes: Ints  # KV bytes held by live sequences at the end of the stretch
    replica: Ints


@dataclass(frozen=True, slots=True)
class Run:
    """Result of one simulation; a pure function of the scenario and its seed.

    ``gap_s`` holds the inter-token gaps that span a preemption (all other gaps are step durations).
    ``reject_reasons`` counts rejected calls by reason, ``fail_reasons`` those given up after their admission.
    ``kv`` has the totals of CLI.md's ``kv`` object.
    ``notes`` are the assumptions that a reader must know (unknown waits replayed as 0, and the like).
    """

    calls: Calls
    stretches: Stretches
    gap_s: Floats
    reject_reasons: dict[str, int]
    kv: dict[str, float]
    busy_s: float
    attention_origin_s: dict[str, float]  # time of steps with decoding, by origin of the attention's cost
    energy_j: float
    energy_origin: str
    idle_energy_j: float
    notes: tuple[str, ...]
    fail_reasons: dict[str, int] = field(default_factory=dict)
    attention_energy_j: float = 0.0  # part of energy_j that measured watts of decode attention give
