"""What is simulated: a trace offered to one or more equal replicas behind a router."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvfold.sim.clock import Clock
from kvfold.sim.engine import Engine
from kvfold.sim.errors import ConfigError
from kvfold.sim.gpu import require
from kvfold.sim.lockstep import serve_together
from kvfold.sim.lookahead import LookaheadEngine
from kvfold.sim.recorder import Recorder
from kvfold.sim.retention import Retention, waits_of
from kvfold.sim.router import make_router
from kvfold.sim.scheduler import Limits
from kvfold.sim.sessions import Load, Sessions
from kvfold.sim.units import Units, draw_units
from kvfold.sim.waiting import priorities_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfold.sim.memory import MemoryBudget
    from kvfold.sim.power import Power
    from kvfold.sim.run import Run
    from kvfold.sim.work import Cost
    from kvfold.traces.table import Trace


@dataclass(frozen=True)
class Scenario:
    """Everything a run depends on. `max_context_tokens` bounds prompt plus output of a call; every replica has
    its own `budget`. `seed` draws the sizes of blocks. Raises ConfigError for a rule that is broken."""

    trace: Trace
    cost: Cost
    budget: MemoryBudget
    max_context_tokens: int
    load: Load = field(default_factory=Load)
    limits: Limits = field(default_factory=Limits)
    retention: Retention = field(default_factory=Retention)
    prefix_caching: bool = True
    replicas: int = 1
    router: str = "round-robin"
    stepwise: bool = False
    async_scheduling: bool = False  # kvfold.sim.lookahead
    #: The replicas step together (kvfold.sim.lockstep): tokens of all -> time of what they compute together.
    lockstep_fs: Callable[[int], int] | None = None
    seed: int = 0
    power: Power | None = None  # None: what the GPU's profile says

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"--replicas must be at least 1, got {self.replicas}")
        if self.async_scheduling and self.retention.policy != "lru":
            raise ConfigError("asynchronous scheduling is modelled with --retention lru alone")
        if self.lockstep_fs is not None and not self.async_scheduling:
            raise ConfigError("replicas that step together are modelled with asynchronous scheduling alone")

    @property
    def shares_prefixes(self) -> bool:
        return self.prefix_caching and self.trace.meta.hash_scope != "none"

    @cached_property
    def host_link_bytes_per_s(self) -> float:
        """Bandwidth to host memory; raises ConfigError where the GPU profile does not know it."""
        return require(self.cost.gpu, "host_link_bytes_per_s")

    @cached_property
    def units(self) -> Units:
        """The pool's units, drawn from what was measured of the format."""
        return draw_units(self.cost.model, self.cost.sizes, self.cost.tp, self.budget, self.seed)

    @cached_property
    def priorities(self) -> list[int]:
        """Of each call, lower first."""
        return priorities_of(self.limits.order, self.trace)

    @cached_property
    def heirs(self) -> list[int]:
        """How many calls go on from each call."""
        return np.bincount(self.trace.edge_parent, minlength=len(self.trace)).tolist()

    @cached_property
    def parents(self) -> list[tuple[int, ...]]:
        """Parents of each call, whose KV it goes on from."""
        parents: list[tuple[int, ...]] = [()] * len(self.trace)
        for child, parent in zip(
            self.trace.edge_child.tolist(), self.trace.edge_parent.tolist(), strict=True
        ):
            parents[child] += (parent,)
        return parents


def run(scenario: Scenario) -> Run:
    """Replay the trace and return its records; a pure function of the scenario."""
    clock, trace = Clock(), scenario.trace
    recorder, waits = Recorder(trace, scenario.replicas), waits_of(trace)
    route = make_router(scenario.router, trace)

    def arrive(call: int) -> None:
        engines[route(engines, call) if len(engines) > 1 else 0].offer(call)

    sessions = Sessions(clock, trace, scenario.load, arrive)
    kind = LookaheadEngine if scenario.async_scheduling else Engine
    engines = [
        kind(index, clock, scenario, waits, recorder, sessions.ended) for index in range(scenario.replicas)
    ]
    sessions.start()
    if scenario.lockstep_fs is None:
        for engine in engines:
            clock.process(engine.serve())
    else:
        ranks = [engine for engine in engines if isinstance(engine, LookaheadEngine)]
        clock.process(serve_together(clock, ranks, scenario.lockstep_fs))
    gc.freeze()  # what is there now outlives the run, so that looking for garbage in it again and again is in vain
    clock.run()
    gc.unfreeze()
    states = [engine.state for engine in engines]
    return recorder.finish(scenario, states, sessions.unknown_waits, sessions.wait_before_s)
