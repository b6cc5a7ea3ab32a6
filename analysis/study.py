"""The replays behind a plan: the recorded load, equal concurrency, and the highest load of every format."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvfold.analysis.search import (
    ATTAINMENT,
    FAR,
    NEAR,
    Found,
    Outcome,
    highest_load,
    judge,
    largest_power_of_two,
)
from kvfold.analysis.steptable import step_s
from kvfold.sim.memory import bytes_of_sequence, max_sequences
from kvfold.sim.scenario import Scenario, run
from kvfold.sim.sessions import Load

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfold.analysis.deployment import Deployment
    from kvfold.analysis.slo import Slo
    from kvfold.codec.sizes import FormatSizes
    from kvfold.sim.memory import MemoryBudget
    from kvfold.sim.retention import Retention
    from kvfold.sim.run import Run
    from kvfold.sim.scheduler import Limits
    from kvfold.traces.table import Trace


#: KV memory binds when a pool without a limit serves so many times the load.
BINDS = 1.1


@dataclass(frozen=True, slots=True)
class Question:
    """What a plan answers. `formats` holds the baseline first; `concurrency` None lets the plan find N.

    With `seeds` > 1 the search for the highest load is repeated with the sessions rotated against their starts.
    """

    deployment: Deployment
    trace: Trace
    slo: Slo
    formats: tuple[FormatSizes, ...]
    limits: Limits
    concurrency: int | None
    retention: Retention
    prefix_caching: bool
    seed: int
    seeds: int

    @property
    def baseline(self) -> FormatSizes:
        return self.formats[0]

    @property
    def has_clock(self) -> bool:
        return self.trace.meta.clock == "common"

    @property
    def load_unit(self) -> str:
        if not self.has_clock:
            return "live sessions"
        return "sessions/s" if (self.trace.session_id >= 0).any() else "requests/s"

    @property
    def unit_load(self) -> float:
        """What a load of 1 means in `load_unit`: the recorded rate of first calls, or one session."""
        if not self.has_clock:
            return 1.0
        roots = np.ones(len(self.trace), bool)
        roots[self.trace.edge_child] = False
        arrivals_s = self.trace.arrival_time_s[roots]
        span_s = float(arrivals_s.max() - arrivals_s.min())
        return len(arrivals_s) / span_s if span_s > 0 else float(len(arrivals_s))


@dataclass(frozen=True, slots=True)
class Answers:
    """All replays of a plan: by format, at the recorded load, at equal concurrency, and at the highest load.

    `gate` is the attainment that counts as served: ATTAINMENT, or ATTAINMENT of what the baseline attains with
    one live session where even that falls short of it (requests that miss the SLO on an empty engine).
    """

    gate: float
    alone: float  # attainment of the baseline with one live session; NaN where it was not needed

    recorded: dict[str, Outcome]
    concurrency: int
    concurrency_origin: str
    equal: dict[str, Outcome]
    highest: dict[str, tuple[Found, ...]]  # one search per seed; the first replays the sessions as recorded
    by_load: dict[str, list[Outcome]]  # all replays of the sessions as recorded whose load is in `load_unit`
    unlimited: Outcome | None  # BINDS times the baseline's highest load, with KV memory without a limit


def replays(question: Question, progress: Callable[[str], None]) -> Answers:
    """Run everything that the plan needs."""
    scenarios = {sizes.name: _scenario(question, sizes) for sizes in question.formats}
    done: dict[tuple[str, Load], Outcome] = {}

    def replay(name: str, load: Load, at: float) -> Outcome:
        if (name, load) not in done:
            outcome = judge(at, run(replace(scenarios[name], load=load)), question.slo)
            progress(f"{name}: {_result_text(load, outcome)}")
            done[name, load] = outcome
        return done[name, load]

    def live(name: str, rotation: int, sessions: float) -> Outcome:
        return replay(name, Load(live_sessions=int(sessions), rotation=rotation), sessions)

    def scaled(name: str, rotation: int, scale: float) -> Outcome:
        return replay(name, Load(rate_scale=scale, rotation=rotation), scale)

    baseline = question.baseline.name
    recorded = {name: scaled(name, 0, 1.0) for name in scenarios} if question.has_clock else {}
    most = len(sessions_of(question.trace))
    gate, alone = ATTAINMENT, float("nan")
    find = partial(largest_power_of_two, partial(live, baseline, 0), _first_concurrency(question), most=most)
    found = find(gate=gate)
    if found.best is None:
        alone = live(baseline, 0, 1).attainment
        gate = ATTAINMENT * alone
        found = find(gate=gate)
    assert found.best is not None
    concurrency, origin = int(found.best.load), f"largest power of two at which {baseline} meets the SLO"
    if found.failed_load is None:
        origin += f"; bounded by the {most:,} sessions of the trace"
    if question.concurrency is not None:
        concurrency, origin = question.concurrency, "given"
    equal = {name: live(name, 0, concurrency) for name in scenarios}
    load_at, start = (scaled, 1.0) if question.has_clock else (live, float(concurrency))
    search = partial(highest_load, gate=gate, whole=not question.has_clock)
    first = search(partial(load_at, baseline, 0), start)
    # where attainment does not fall steadily, what is found depends on the start: one for all, near the answer
    start = first.best.load if first.best is not None else first.lowest.load
    near = partial(search, start=start, stride=NEAR if first.is_limit else FAR)
    rotations = [
        0,
        *np.random.default_rng(question.seed).integers(1, max(2, most), question.seeds - 1).tolist(),
    ]
    highest = {
        name: tuple(near(partial(load_at, name, rotation)) for rotation in rotations) for name in scenarios
    }
    found = highest[baseline][0]
    unlimited = None
    if found.best is not None and found.failed is not None:
        at = max(found.failed.load, BINDS * found.best.load)
        load = Load(rate_scale=at) if question.has_clock else Load(live_sessions=int(at))
        roomy = replace(scenarios[baseline], budget=_unlimited(question), load=load)
        unlimited = judge(at, run(roomy), question.slo)
        progress(f"{baseline}, KV memory without a limit: {_result_text(load, unlimited)}")
    by_load: dict[str, list[Outcome]] = {name: [] for name in scenarios}
    for (name, load), outcome in done.items():
        if load.rotation == 0 and (load.live_sessions is None) == question.has_clock:
            by_load[name].append(outcome)
    return Answers(gate, alone, recorded, concurrency, origin, equal, highest, by_load, unlimited)


def span_s(of: Run) -> float:
    done = ~np.isnan(of.calls.last_token_s)
    if not done.any():
        return max(of.busy_s, 1e-9)
    return float(of.calls.last_token_s[done].max() - np.nanmin(of.calls.arrival_s))


def _scenario(question: Question, sizes: FormatSizes) -> Scenario:
    return Scenario(
        trace=question.trace,
        cost=question.deployment.cost(sizes),
        budget=question.deployment.budget(sizes),
        max_context_tokens=question.deployment.max_context_tokens,
        limits=question.limits,
        retention=question.retention,
        prefix_caching=question.prefix_caching,
        seed=question.seed,
        power=question.deployment.power(),
    )


def sessions_of(trace: Trace) -> set[int]:
    """One number per session; single-shot calls count as one each."""
    ids = trace.session_id.astype(np.int64)
    return set(np.where(ids >= 0, ids, -1 - np.arange(len(ids))).tolist())


def _first_concurrency(question: Question) -> int:
    """Where to start looking: the batch at which the pool is full or a step takes as long as the TPOT allows."""
    trace, deployment = question.trace, question.deployment
    context = int(np.mean(trace.input_tokens + trace.output_tokens))
    most = max(1, max_sequences(deployment.budget(question.baseline), context))
    cost, batch = deployment.cost(question.baseline), 1
    limit_s = question.slo.tpot_s
    while batch * 2 <= most and (limit_s is None or step_s(cost, batch * 2, context) <= limit_s / 2):
        batch *= 2
    return batch


def _unlimited(question: Question) -> MemoryBudget:
    """Room for all calls of the trace at once."""
    budget = question.deployment.budget(question.baseline)
    tokens = (question.trace.input_tokens + question.trace.output_tokens).tolist()
    room_bytes = budget.kv_budget_bytes + sum(bytes_of_sequence(budget, each) for each in tokens)
    return replace(budget, kv_budget_bytes=room_bytes, num_units=room_bytes // budget.unit_bytes)


def _result_text(load: Load, outcome: Outcome) -> str:
    return f"{_load_text(load)}: {100 * outcome.attainment:.1f} % of requests meet the SLO"


def _load_text(load: Load) -> str:
    turned = f", sessions rotated by {load.rotation}" if load.rotation else ""
    if load.live_sessions is not None:
        return f"{load.live_sessions:,} live{turned}"
    return f"{load.rate_scale:.3g} x the recorded rate{turned}"
