"""Synthetic traces: plain Poisson load, and the bundled sample of chat and agent sessions.

Quantile tables are (share, value) knots; between two knots the logarithm of the value is linear in the share,
which keeps heavy tails. Only uniform draws are taken from the generator, so a seed gives the same trace on
every platform and NumPy version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any

import numpy as np

from kvfold.traces.columns import KIND, Edges, assemble, by_arrival
from kvfold.traces.prefix import Chains
from kvfold.traces.table import Meta, Trace

_Table = Sequence[tuple[float, float]]

BLOCK_TOKENS = 64
#: Longest prompt before a session is compacted; with the longest output it stays under 40,960 tokens.
CONTEXT_LIMIT_TOKENS = 36_000
#: Someone who would wait longer than this has left.
LONGEST_HUMAN_WAIT_S = 1_800.0

# WEKA / kv-cache-tester, 710 sessions: client gap after a tool result (n = 41,422) and after human text
# (n = 6,359). The upper ends are set so that the means are the recorded 42.6 s and 614 s.
TOOL_WAIT_S: _Table = (
    (0, 1),
    (0.05, 3),
    (0.25, 5),
    (0.5, 8),
    (0.75, 19),
    (0.9, 67),
    (0.95, 137),
    (0.99, 606),
    (1, 2_600),
)
HUMAN_WAIT_S: _Table = (
    (0, 5),
    (0.25, 40),
    (0.5, 127),
    (0.75, 408),
    (0.9, 1_541),
    (0.95, 3_087),
    (0.99, 6_854),
    (1, 14_800),
)
# WEKA: output tokens of a call, and calls between two human turns.
AGENT_OUTPUT_TOKENS: _Table = ((0, 20), (0.5, 216), (0.9, 898), (0.99, 3_686), (1, 4_096))
STEPS_PER_TURN: _Table = ((0, 1), (0.5, 1), (0.9, 16), (0.99, 65), (1, 90))
# Tokens that a tool result adds (WEKA growth per call less the previous output); the top end cut to the limit.
TOOL_TOKENS: _Table = ((0, 20), (0.5, 280), (0.9, 2_900), (1, 16_500))
# Mooncake conversation: output tokens of a call, and P50 of what a person adds (growth less the output).
CHAT_OUTPUT_TOKENS: _Table = ((0, 5), (0.5, 350), (0.9, 597), (0.99, 1_119), (1, 2_000))
CHAT_TOKENS: _Table = ((0, 10), (0.5, 130), (0.9, 1_500), (1, 8_000))
# Choices of this sample.
FIRST_CHAT_TOKENS: _Table = ((0, 200), (0.5, 1_200), (0.9, 5_000), (1, 16_000))
FIRST_AGENT_TOKENS: _Table = ((0, 300), (0.5, 2_000), (0.9, 6_000), (1, 12_000))
SUMMARY_TOKENS: _Table = ((0, 1_500), (0.5, 3_000), (1, 6_000))
SUBAGENT_TASK_TOKENS: _Table = ((0, 150), (0.5, 400), (1, 1_200))

# Tools and system prompt (WEKA: tools P50 12,262, system P50 2,772; sub-agents about 8,500 in all).
_AGENT_SYSTEM_TOKENS, _SUBAGENT_SYSTEM_TOKENS, _CHAT_SYSTEM_TOKENS = 15_040, 8_512, 1_024

# Made for a quarter of an hour of starting sessions that replay in seconds.
_SESSIONS, _GAP_S, _AGENT_SHARE = 177, 5.0, 0.4
_NEXT_TURN_SHARE, _SPAWN_SHARE = 0.5, 0.03
# Stated service for the arrivals of later calls: TTFT P50 of WEKA and 50 tokens/s.
_FIRST_TOKEN_S, _TOKEN_S = 2.5, 0.02


def poisson(requests: int, rate_per_s: float, input_tokens: int, output_tokens: int, seed: int) -> Trace:
    """Single-shot calls of one size with exponential gaps (mean ``1 / rate_per_s``), no shared prefixes.

    Raises ValueError for a count or a rate that is not positive.
    """
    if min(requests, input_tokens, output_tokens) < 1 or not 0 < rate_per_s < float("inf"):
        raise ValueError(
            "requests, rate_per_s, input_tokens and output_tokens must be positive,"
            f" got {requests}, {rate_per_s}, {input_tokens}, {output_tokens}"
        )
    uniform = np.random.default_rng(seed).random(requests)
    columns = {
        "arrival_time_s": np.round(np.cumsum(-np.log1p(-uniform) / rate_per_s), 6),
        "input_tokens": np.full(requests, input_tokens),
        "output_tokens": np.full(requests, output_tokens),
    }
    load = f"{rate_per_s:g} requests/s, {input_tokens:,} in, {output_tokens:,} out"
    return assemble(
        _meta(f"poisson seed {seed}", requests, (f"synthetic: Poisson, {load}, seed {seed}",)), columns
    )


def sample(seed: int) -> Trace:
    """177 chat and agent sessions that start within about 15 minutes, on a common clock.

    Agents have tool and human waits, a growing context that is compacted at its limit, and a few sub-agents
    that a later call joins; all share their system prompts. The waits are drawn from the tables above.
    """
    sampler = _Sampler(seed)
    start_s = 0.0
    for session in range(_SESSIONS):
        start_s += -_GAP_S * float(np.log1p(-sampler.uniform()))
        sampler.session(session, start_s)
    calls = [sampler.calls[at] for at in by_arrival(np.array([call.arrival_s for call in sampler.calls]))]
    row = {id(call): at for at, call in enumerate(calls)}
    chains, edges = Chains(), Edges()
    for at, call in enumerate(calls):
        chains.add(call.chain, f"sample:{at}")
        for parent, wait_s, kind in call.parents:
            edges.add(at, row[id(parent)], wait_s, KIND[kind])
    columns: dict[str, Any] = chains.columns() | {
        "session_id": [call.session for call in calls],
        "turn_index": [call.turn for call in calls],
        "agent_id": [call.agent for call in calls],
        "parent_request_id": [row[id(call.parents[0][0])] if call.parents else -1 for call in calls],
        "arrival_time_s": [call.arrival_s for call in calls],
        "wait_before_s": [call.wait_s for call in calls],
        "wait_kind": [KIND[call.kind] for call in calls],
        "input_tokens": [call.input_tokens for call in calls],
        "output_tokens": [call.output_tokens for call in calls],
    }
    warnings = (
        f"synthetic: sessions drawn from published quantiles of chat and agent traffic, seed {seed}",
        f"arrivals of later calls assume {_FIRST_TOKEN_S:g} s and {_TOKEN_S:g} s a token of service",
        f"a person who would wait more than {LONGEST_HUMAN_WAIT_S:,.0f} s has left",
    )
    meta = _meta(f"sample seed {seed}", len(calls), warnings, BLOCK_TOKENS)
    return assemble(meta, columns, edges)


@dataclass(slots=True)
class _Context:
    """A prompt: its whole 64-token blocks, and its tokens."""

    chain: list[int]
    tokens: int

    def copy(self) -> _Context:
        return _Context(self.chain.copy(), self.tokens)


@dataclass(slots=True)
class _Call:
    arrival_s: float
    session: int
    turn: int
    agent: int
    chain: list[int]
    input_tokens: int
    output_tokens: int
    parents: list[tuple[_Call, float, str]] = field(default_factory=list)
    wait_s: float = nan
    kind: str = "none"

    @property
    def end_s(self) -> float:
        return self.arrival_s + _FIRST_TOKEN_S + _TOKEN_S * self.output_tokens


class _Sampler:
    """Draws sessions one after another; ``calls`` collects theirs."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._blocks = 0
        self._turn = 0
        self._agents = 0
        self._session = 0
        self.calls: list[_Call] = []
        self._systems = {
            name: self._grown(_Context([], 0), tokens)
            for name, tokens in (
                ("agent", _AGENT_SYSTEM_TOKENS),
                ("subagent", _SUBAGENT_SYSTEM_TOKENS),
                ("chat", _CHAT_SYSTEM_TOKENS),
            )
        }

    def uniform(self) -> float:
        return float(self._rng.random())

    def draw(self, table: _Table) -> float:
        return float(
            np.exp(np.interp(self.uniform(), [share for share, _ in table], np.log([v for _, v in table])))
        )

    def session(self, session: int, start_s: float) -> None:
        self._session, self._turn, self._agents = session, 0, 0
        is_agent = self.uniform() < _AGENT_SHARE
        system = "agent" if is_agent else "chat"
        context = self._grown(
            self._systems[system], self.draw(FIRST_AGENT_TOKENS if is_agent else FIRST_CHAT_TOKENS)
        )
        outputs = AGENT_OUTPUT_TOKENS if is_agent else CHAT_OUTPUT_TOKENS
        call = self._call(0, start_s, context, outputs)
        while True:
            for _ in range(int(self.draw(STEPS_PER_TURN)) - 1 if is_agent else 0):
                call, context = self._tool_step(call, context)
            wait_s = round(self.draw(HUMAN_WAIT_S), 1)
            if self.uniform() >= _NEXT_TURN_SHARE or wait_s > LONGEST_HUMAN_WAIT_S:
                return
            context = self._next(context, system, call.output_tokens, self.draw(CHAT_TOKENS))
            call = self._follow(call, wait_s, "human", context, outputs)

    def _tool_step(self, call: _Call, context: _Context) -> tuple[_Call, _Context]:
        """The next call of an agent, after a tool or after one to three sub-agents."""
        if self.uniform() >= _SPAWN_SHARE:
            context = self._next(context, "agent", call.output_tokens, self.draw(TOOL_TOKENS))
            return self._follow(
                call, round(self.draw(TOOL_WAIT_S), 1), "tool", context, AGENT_OUTPUT_TOKENS
            ), context
        lasts = [self._subagent(call) for _ in range(1 + int(3 * self.uniform()))]
        context = self._next(context, "agent", call.output_tokens, sum(last.output_tokens for last in lasts))
        gap_s = round(1 + 4 * self.uniform(), 1)
        joined = self._call(0, max(last.end_s for last in lasts) + gap_s, context, AGENT_OUTPUT_TOKENS)
        joined.parents = [(call, 0.0, "subagent"), *((last, gap_s, "subagent") for last in lasts)]
        joined.wait_s, joined.kind = round(joined.arrival_s - call.end_s, 1), "tool"
        return joined, context

    def _subagent(self, spawner: _Call) -> _Call:
        """Three to eight calls of a sub-agent; the last one."""
        self._agents += 1
        agent = self._agents
        context = self._grown(self._systems["subagent"], self.draw(SUBAGENT_TASK_TOKENS))
        call = self._follow(spawner, 0.5, "subagent", context, AGENT_OUTPUT_TOKENS, agent)
        for _ in range(2 + int(6 * self.uniform())):
            context = self._next(context, "subagent", call.output_tokens, self.draw(TOOL_TOKENS))
            wait_s = round(self.draw(TOOL_WAIT_S), 1)
            call = self._follow(call, wait_s, "tool", context, AGENT_OUTPUT_TOKENS, agent)
        return call

    def _follow(
        self, parent: _Call, wait_s: float, kind: str, context: _Context, outputs: _Table, agent: int = 0
    ) -> _Call:
        call = self._call(agent, parent.end_s + wait_s, context, outputs)
        call.parents, call.wait_s, call.kind = [(parent, wait_s, kind)], wait_s, kind
        return call

    def _call(self, agent: int, arrival_s: float, context: _Context, outputs: _Table) -> _Call:
        output_tokens = int(self.draw(outputs))
        arrival_s = round(arrival_s, 1)
        call = _Call(
            arrival_s, self._session, self._turn, agent, context.chain, context.tokens, output_tokens
        )
        self._turn += 1
        self.calls.append(call)
        return call

    def _next(self, context: _Context, system: str, output_tokens: float, added: float) -> _Context:
        """The context with an answer and what came after it; past the limit a summary takes its place."""
        if context.tokens + output_tokens + added <= CONTEXT_LIMIT_TOKENS:
            return self._grown(context, output_tokens + added)
        return self._grown(self._systems[system], self.draw(SUMMARY_TOKENS) + min(added, 14_000))

    def _grown(self, context: _Context, tokens: float) -> _Context:
        grown = context.copy()
        grown.tokens += int(tokens)
        new = grown.tokens // BLOCK_TOKENS - len(grown.chain)
        grown.chain.extend(range(self._blocks, self._blocks + new))
        self._blocks += new
        return grown


def _meta(source: str, rows: int, warnings: tuple[str, ...], block_tokens: int = 0) -> Meta:
    return Meta(
        format="canonical",
        source=source,
        sha256="",
        time_unit="s",
        block_size_tokens=block_tokens,
        partial_last="dropped" if block_tokens else "none",
        hash_scope="global" if block_tokens else "none",
        rows_read=rows,
        rows_kept=rows,
        warnings=warnings,
    )
