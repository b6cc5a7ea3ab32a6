"""What was scarce in a run: memory, slots, compute, bandwidth, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvfold.sim.run import FS_PER_S

if TYPE_CHECKING:
    from kvfold.sim.run import Run

#: Calls that wait in less than this share of the busy time are no sign of anything scarce.
FEW_WAIT = 0.05
#: The pool is full when live sequences hold this share of it; it is also too small when so much of all prompt
#: tokens was computed again.
FULL_POOL, COMPUTED_AGAIN = 0.95, 0.02


def scarcity(run: Run, max_num_seqs: int, replicas: int, makespan_s: float) -> dict[str, Any]:
    """`what` is scarce, why (`text`), and the shares that say so.

    `busy_share`: of the makespan, over all replicas. The others are of the busy time: `waiting_share`, calls wait
    to be admitted; `full_share`, they do so while the pool is full; `capped_share`, while the batch is at its cap;
    `prefill_share`, the step computes prompt tokens. Memory is scarce when calls wait for it more than for slots,
    or when what was cached had to be computed again; else slots; else, as long as calls wait, what steps spend
    their time on: prompts are bound by operations, decode by bandwidth.
    """
    stretches = run.stretches
    steps = stretches.steps.astype(np.float64)
    time_s = (steps * stretches.first_step_fs + steps * (steps - 1) / 2 * stretches.growth_fs) / FS_PER_S
    busy_s = float(time_s.sum())
    waiting = stretches.waiting > 0
    full = waiting & (stretches.used_bytes >= FULL_POOL * run.kv["capacity_bytes"])
    capped = waiting & ~full & (stretches.decode_seqs >= max_num_seqs)

    def share(rows: Any) -> float:
        return float(time_s[rows].sum()) / busy_s if busy_s else 0.0

    admitted = ~np.isnan(run.calls.scheduled_s)
    prompt_tokens = int(run.calls.input_tokens[admitted].sum())
    again = run.kv["re_prefilled_tokens"] / max(1, prompt_tokens)
    shares = {
        "busy_share": min(1.0, busy_s / (makespan_s * replicas)) if makespan_s > 0 else 0.0,
        "waiting_share": share(waiting),
        "full_share": share(full),
        "capped_share": share(capped),
        "prefill_share": share(stretches.prefill_tokens > 0),
        "computed_again_share": again,
    }
    what = _what(shares)
    percents = {name: 100 * value for name, value in shares.items()}
    text = _memory_text(percents) if what == "memory" else _TEXTS[what].format(**percents)
    return {"what": what, "text": text, **shares}


def _what(shares: dict[str, float]) -> str:
    if shares["computed_again_share"] > COMPUTED_AGAIN:
        return "memory"
    if shares["waiting_share"] < FEW_WAIT:
        return "nothing"
    if max(shares["full_share"], shares["capped_share"]) > shares["waiting_share"] / 2:
        return "memory" if shares["full_share"] >= shares["capped_share"] else "slots"
    return "compute" if shares["prefill_share"] > 0.5 else "bandwidth"


_TEXTS = {
    "nothing": "nothing is scarce: the engine computes {busy_share:.0f} % of the time, and calls wait in "
    "{waiting_share:.1f} % of that",
    "slots": "slots are scarce: calls wait behind a full batch in {capped_share:.0f} % of the busy time (raise "
    "--max-num-seqs)",
    "compute": "compute is scarce: calls wait in {waiting_share:.0f} % of the busy time, and steps with prompts "
    "take {prefill_share:.0f} % of it",
    "bandwidth": "bandwidth is scarce: calls wait in {waiting_share:.0f} % of the busy time, and steps that only "
    "decode take the most of it",
}


def _memory_text(percents: dict[str, float]) -> str:
    """Live calls fill the pool, or cached prefixes are evicted from it, or both."""
    parts = []
    if percents["full_share"] >= 0.5:
        parts.append(f"calls wait for a full pool in {percents['full_share']:.0f} % of the busy time")
    if percents["computed_again_share"] > 100 * COMPUTED_AGAIN:
        again = f"{percents['computed_again_share']:.1f} % of all prompt tokens were computed again"
        parts.append(f"{again}, evicted from the cache or preempted")
    return f"memory is scarce: {' and '.join(parts)}"
