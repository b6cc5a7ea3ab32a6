"""Replicas that step together: the data-parallel ranks of a model whose experts are spread over all of them.

The experts of a step see the tokens of all ranks, so every rank waits for the longest one; and a rank without work
computes one token of nothing as long as another one has some (vLLM's DPEngineCoreProc and execute_dummy_batch).
When all have come to rest, the next call to any of them starts them again. One clock for the group: its steps
begin together and end together. A group of one is an engine of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfold.sim.clock import StepEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import simpy

    from kvfold.sim.clock import Clock
    from kvfold.sim.lookahead import LookaheadEngine

#: Tokens of a rank that has nothing to compute.
DUMMY_TOKENS = 1


def serve_together(
    clock: Clock, engines: Sequence[LookaheadEngine], shared_fs: Callable[[int], int] | None = None
) -> Generator[simpy.Event, None, None]:
    """The loop of all ranks. `shared_fs`: tokens of all ranks -> time of the blocks that they compute together,
    which a rank's step alone counts as if the others had as many tokens as it has."""
    ranks = len(engines)
    while True:
        begun = [(engine, step) for engine in engines if (step := engine.begin()) is not None]
        if not begun:
            called = clock.event()
            for engine in engines:
                engine.rest(called)
            yield called
            for engine in engines:
                engine.wake()
            yield StepEnd(clock, 0)
            continue
        if shared_fs is None:
            length_fs = max(step.alone_fs for _, step in begun)
        else:
            own_fs = max(step.alone_fs - shared_fs(ranks * step.tokens) for _, step in begun)
            tokens = sum(step.tokens for _, step in begun) + DUMMY_TOKENS * (ranks - len(begun))
            length_fs = own_fs + shared_fs(tokens)
        for engine, step in begun:
            engine.take(step, length_fs)
        yield StepEnd(clock, length_fs)
        for engine, step in begun:
            engine.end(step)
