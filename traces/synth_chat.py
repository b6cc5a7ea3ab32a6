"""Single-shot requests by their token counts, from few bursty clients; a prompt may begin like an earlier one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from kvfold.traces.arrivals import Clients
from kvfold.traces.draft import BLOCK_TOKENS, Call, Prompt, laid_out
from kvfold.traces.draws import Quantiles, chosen, draws, rounded, uniforms
from kvfold.traces.table import Trace

_NONE = Quantiles.constant(0.0)
#: Earlier prompts that are looked at for one that another continues.
_NEARBY = 256


@dataclass(frozen=True, slots=True)
class Size:
    """The requests of one range of prompts: their share of all, tokens, and how far they continue others.

    A share ``continued`` of them begins with a whole earlier prompt, which makes ``carried`` of its own.
    """

    share: float
    input_tokens: Quantiles
    output_tokens: Quantiles
    continued: float = 0.0
    carried: Quantiles = _NONE


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests by size; the shares of ``sizes`` sum to 1.

    All begin with the same ``system_tokens``. The prompt that another continues came about ``gap_s`` before.
    """

    sizes: tuple[Size, ...]
    system_tokens: int = 0
    gap_s: Quantiles = _NONE

    @property
    def shares_prefixes(self) -> bool:
        return self.system_tokens > 0 or any(size.continued > 0 for size in self.sizes)


def chat(
    model: Requests, requests: int, arrivals: Clients, seed: int, block_tokens: int = BLOCK_TOKENS
) -> Trace:
    """``requests`` single-shot calls of ``model``; ``arrivals`` spreads them over its clients (column tenant)."""
    arrival_s, clients = arrivals.arrivals(requests, seed)
    kind = uniforms(seed, "size")
    tables = [
        (
            draws(size.input_tokens, seed, "input", at),
            draws(size.output_tokens, seed, "output", at),
            draws(size.carried, seed, "carried", at),
        )
        for at, size in enumerate(model.sizes)
    ]
    continues, gaps = uniforms(seed, "continues"), draws(model.gap_s, seed, "gap")
    shares = [size.share for size in model.sizes]
    system = Prompt(model.system_tokens)
    calls: list[Call] = []
    times: list[float] = []
    for time_s, client in zip(arrival_s.tolist(), clients.tolist(), strict=True):
        size = chosen(shares, next(kind))
        drawn_input, drawn_output, drawn_carried = (next(table) for table in tables[size])
        gap_s, is_continued = next(gaps), next(continues) < model.sizes[size].continued
        tokens = max(1, round(drawn_input))
        before = system if tokens > system.tokens else None
        if is_continued:
            before = _nearest(calls, times, time_s - gap_s, drawn_carried * tokens, tokens) or before
        prompt = Prompt(tokens, before)
        calls.append(Call(rounded(time_s), prompt, max(1, round(drawn_output)), tenant=f"client-{client}"))
        times.append(time_s)
    text = f"synthetic: {requests:,} requests of {arrivals.count} clients, {arrivals.rate_per_s:.4g} a second"
    block_tokens = block_tokens if model.shares_prefixes else 0
    return laid_out(calls, f"chat seed {seed}", [f"{text}, seed {seed}"], block_tokens)


def _nearest(
    calls: Sequence[Call], times: Sequence[float], time_s: float, wanted: float, below: int
) -> Prompt | None:
    """Of the prompts around ``time_s`` that are shorter than ``below``, the one nearest to ``wanted`` tokens."""
    at = bisect_left(times, time_s)
    nearby = [
        call.prompt
        for call in calls[max(0, at - _NEARBY // 2) : at + _NEARBY // 2]
        if call.prompt.tokens < below
    ]
    return min(nearby, key=lambda prompt: abs(prompt.tokens - wanted)) if nearby else None
