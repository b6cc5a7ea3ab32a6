"""Sessions of agents: tool and human waits, a context that grows and is compacted, sub-agents.

A session alternates between two states. A run of tool results, each after a tool wait, ends in a return of the
human (or of both at once, `mixed`), after a human wait; then the next run begins. Every prompt is the one
before it with its output and what came in; at its limit a summary takes its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvfold.traces.arrivals import Clients
from kvfold.traces.draft import BLOCK_TOKENS, Call, Prompt, laid_out
from kvfold.traces.draws import Quantiles, chosen, draws, rounded, uniforms
from kvfold.traces.table import Trace


@dataclass(frozen=True, slots=True)
class Arrival:
    """What may come in between two calls: how often, after which wait, with how many tokens."""

    kind: str
    share: float
    wait_s: Quantiles
    tokens: Quantiles


@dataclass(frozen=True, slots=True)
class Start:
    """How a share of the sessions begins, and how long they go on: resumed ones are long, then short.

    ``calls`` are those of the main thread.
    """

    share: float
    first_tokens: Quantiles
    calls: Quantiles


@dataclass(frozen=True, slots=True)
class Subagents:
    """A tool step is a sub-agent with probability ``share``; the main thread waits for its last call."""

    share: float
    calls: Quantiles
    wait_s: Quantiles
    system_tokens: int
    task_tokens: Quantiles


@dataclass(frozen=True, slots=True)
class Agents:
    """Sessions by their distributions; tokens and seconds of one call each.

    ``first_steps`` are the tool results of a session's first run, which is long, ``tool_steps`` those of a
    later one. The shares of ``starts`` sum to 1, and so do those of ``returns``, which are what ends a run.
    A session has one share of ``limit_tokens`` throughout: prompt and output that do not fit into that limit
    are compacted to ``kept_share`` of what they were. Service takes ``first_token_s`` and ``token_s`` a token of
    output: it spaces the recorded arrivals, a replay makes its own.
    """

    starts: tuple[Start, ...]
    system_tokens: int
    output_tokens: Quantiles
    first_steps: Quantiles
    tool_steps: Quantiles
    tool: Arrival
    returns: tuple[Arrival, ...]
    limit_tokens: Quantiles
    kept_share: Quantiles
    first_token_s: float
    token_s: float
    subagents: Subagents | None = None


def agents(
    model: Agents, sessions: int, starts: Clients, seed: int, block_tokens: int = BLOCK_TOKENS
) -> Trace:
    """``sessions`` sessions of ``model``, whose starts ``starts`` spreads over its clients (column tenant)."""
    start_s, clients = starts.arrivals(sessions, seed)
    maker = _Maker(model, seed)
    for session, (at_s, client) in enumerate(zip(start_s.tolist(), clients.tolist(), strict=True)):
        maker.session(session, rounded(at_s), f"client-{client}")
    warnings = [
        f"synthetic: {sessions:,} agent sessions of {starts.count} clients, seed {seed}",
        f"arrivals of later calls assume {model.first_token_s:.3g} s and {model.token_s:.3g} s a token of"
        " service",
    ]
    if maker.cut_prompts:
        warnings.append(
            f"{maker.cut_prompts:,} prompts that begin a stretch did not fit the context limit: cut by"
            f" {maker.cut_tokens:,} tokens in all"
        )
    return laid_out(maker.calls, f"agent seed {seed}", warnings, block_tokens)


def with_limit(model: Agents, limit_tokens: int) -> Agents:
    """The model with one context limit for all sessions, which no prompt with its output exceeds; outputs end
    at a quarter of it. Raises ValueError where it has not twice the room of the shared system prompts.
    """
    system = max(model.system_tokens, model.subagents.system_tokens if model.subagents else 0)
    if limit_tokens < 2 * system:
        raise ValueError(f"the limit must be at least twice the system prompt of {system:,} tokens")
    limit, output = Quantiles.constant(limit_tokens), model.output_tokens.up_to(limit_tokens // 4)
    return replace(model, limit_tokens=limit, output_tokens=output)


@dataclass(slots=True)
class _Context:
    """The prompt of the next call, what all threads of its kind begin with, and the limit of this stretch."""

    system: Prompt
    prompt: Prompt
    limit_tokens: float


class _Maker:
    """Makes sessions one after another; each source of chance is a stream of its own."""

    def __init__(self, model: Agents, seed: int) -> None:
        self._model = model
        self._output = draws(model.output_tokens, seed, "output")
        self._start = uniforms(seed, "start")
        self._first = [draws(start.first_tokens, seed, "first", at) for at, start in enumerate(model.starts)]
        self._calls = [draws(start.calls, seed, "calls", at) for at, start in enumerate(model.starts)]
        self._first_steps = draws(model.first_steps, seed, "first steps")
        self._steps = draws(model.tool_steps, seed, "steps")
        self._limit = uniforms(seed, "limit")
        self._kept = draws(model.kept_share, seed, "kept")
        self._return = uniforms(seed, "return")
        self._spawn = uniforms(seed, "spawn")
        self._wait: dict[str, Iterator[float]] = {}
        self._added: dict[str, Iterator[float]] = {}
        for kind in (model.tool, *model.returns):
            self._wait[kind.kind] = draws(kind.wait_s, seed, "wait", kind.kind)
            self._added[kind.kind] = draws(kind.tokens, seed, "added", kind.kind)
        self._system = Prompt(model.system_tokens)
        if subagents := model.subagents:
            self._subagent_calls = draws(subagents.calls, seed, "subagent calls")
            self._subagent_wait = draws(subagents.wait_s, seed, "subagent wait")
            self._subagent_task = draws(subagents.task_tokens, seed, "subagent task")
            self._subagent_system = Prompt(subagents.system_tokens)
        self._session, self._tenant, self._agents, self._limit_share = -1, "", 0, 0.0
        self.calls: list[Call] = []
        self.cut_prompts = self.cut_tokens = 0

    def session(self, session: int, start_s: float, tenant: str) -> None:
        self._session, self._tenant, self._agents = session, tenant, 0
        self._limit_share = next(self._limit)
        start = chosen([start.share for start in self._model.starts], next(self._start))
        tokens = max(1, int(next(self._first[start])))
        own = tokens - self._model.system_tokens
        first = self._system.then(own) if own > 0 else Prompt(tokens)
        output = self._drawn_output()
        context = self._opened(self._system, first, output)
        call = self._call(0, start_s, context.prompt, output)
        steps = int(next(self._first_steps))
        for _ in range(max(1, round(next(self._calls[start]))) - 1):
            if steps > 0:
                steps -= 1
                call = self._tool_step(call, context)
            else:
                steps = int(next(self._steps))
                kind = self._model.returns[self._returning()].kind
                call = self._next(call, context, kind, next(self._wait[kind]))

    def _returning(self) -> int:
        return chosen([each.share for each in self._model.returns], next(self._return))

    def _tool_step(self, call: Call, context: _Context) -> Call:
        model = self._model.subagents
        if model is None or next(self._spawn) >= model.share:
            return self._next(call, context, "tool", next(self._wait["tool"]))
        last = self._subagent(call)
        joined = self._next(call, context, "tool", rounded(last.end_s - call.end_s))
        joined.parents = [(call, 0.0, "subagent"), (last, 0.0, "subagent")]
        return joined

    def _subagent(self, spawner: Call) -> Call:
        """The calls of one sub-agent; its last one."""
        self._agents += 1
        agent = self._agents
        output = self._drawn_output()
        system = self._subagent_system
        context = self._opened(system, system.then(next(self._subagent_task)), output)
        call = self._call(agent, spawner.end_s, context.prompt, output).follows(spawner, 0.0, "subagent")
        for _ in range(max(1, round(next(self._subagent_calls))) - 1):
            call = self._next(call, context, "tool", next(self._subagent_wait))
        return call

    def _next(self, call: Call, context: _Context, kind: str, wait_s: float) -> Call:
        wait_s = rounded(wait_s)
        output = self._drawn_output()
        prompt = call.prompt.then(call.output_tokens + next(self._added[kind]))
        if prompt.tokens + output > context.limit_tokens:
            own = max(1.0, next(self._kept) * call.prompt.tokens - context.system.tokens)
            opened = self._opened(context.system, context.system.then(own), output)
            context.prompt, context.limit_tokens = opened.prompt, opened.limit_tokens
        else:
            context.prompt = prompt
        child = self._call(call.agent, rounded(call.end_s + wait_s), context.prompt, output)
        return child.follows(call, wait_s, kind)

    def _opened(self, system: Prompt, prompt: Prompt, output: int) -> _Context:
        """A stretch of growth that begins with ``prompt``: at the session's share of the limits that have room."""
        table = self._model.limit_tokens
        below = table.share_of(prompt.tokens + output)
        limit = table.value(below + self._limit_share * (1 - below))
        over = prompt.tokens + output - int(limit)
        if over > 0:
            self.cut_prompts += 1
            self.cut_tokens += over
            tokens = max(1, prompt.tokens - over)
            prompt = Prompt(tokens, system if system.tokens < tokens else None)
        return _Context(system, prompt, limit)

    def _drawn_output(self) -> int:
        return max(1, int(next(self._output)))

    def _call(self, agent: int, arrival_s: float, prompt: Prompt, output_tokens: int) -> Call:
        service_s = rounded(self._model.first_token_s + self._model.token_s * output_tokens)
        call = Call(rounded(arrival_s), prompt, output_tokens, service_s, self._session, agent)
        call.tenant = self._tenant
        self.calls.append(call)
        return call
