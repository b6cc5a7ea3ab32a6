"""The tables of docs/synthetic.md: figures of synthetic traces over seeds.

A person starts it: `python tests/long_synth.py`. About a minute.
"""

import re
from collections.abc import Callable

import numpy as np

from kvfold.traces.burst import burst, gap_cv
from kvfold.traces.occupancy import LIMITS_S, occupancy
from kvfold.traces.prefix import prefix_hit_token_share
from kvfold.traces.published import AGENT, AGENT_STARTS, CHAT, CHAT_ARRIVALS, RAG, RAG_ARRIVALS
from kvfold.traces.synth_agent import agents
from kvfold.traces.synth_chat import chat
from kvfold.traces.synth_rag import rag

MARKS = (0.5, 0.9, 0.99)


def agent(seed: int) -> dict[str, float]:
    trace = agents(AGENT, 1_000, AGENT_STARTS, seed)
    ratios = {kind: np.array(each) for kind, each in occupancy(trace).ratios.items()}
    ratios["human and mixed"] = ratios["human"] + ratios["mixed"]
    found = {
        f"{kind}, {limit:g} s": float(ratio)
        for kind, each in ratios.items()
        for limit, ratio in zip(LIMITS_S, each, strict=True)
    }
    return found | named("input", np.quantile(trace.input_tokens, MARKS))


def conversation(seed: int) -> dict[str, float]:
    trace = chat(CHAT, 19_366, CHAT_ARRIVALS, seed)
    second, minute = (burst(trace.arrival_time_s, window_s) for window_s in (1.0, 60.0))
    return {
        "dispersion, 1 s": second.dispersion,
        "dispersion, 60 s": minute.dispersion,
        "peak over mean, 60 s": minute.peak_over_mean,
        "gap CV": gap_cv(trace.arrival_time_s),
        **named("input", np.quantile(trace.input_tokens, MARKS)),
        **named("output", np.quantile(trace.output_tokens, MARKS)),
    }


def retrieval(seed: int) -> dict[str, float]:
    trace = rag(RAG, 7_106, RAG_ARRIVALS, seed)
    seen = next(text for text in trace.meta.warnings if "came before" in text)
    return {
        "prefix hits": prefix_hit_token_share(trace),
        "set hits, %": float(re.findall(r"[\d.]+", seen)[0]),
        **named("input", np.quantile(trace.input_tokens, MARKS)),
        **named("output", np.quantile(trace.output_tokens, MARKS)),
    }


def named(name: str, values: np.ndarray) -> dict[str, float]:
    return {f"{name} P{100 * mark:g}": float(value) for mark, value in zip(MARKS, values, strict=True)}


def show(title: str, figures: Callable[[int], dict[str, float]], seeds: int) -> None:
    found = [figures(seed) for seed in range(seeds)]
    print(f"{title}, {seeds} seeds: mean, standard deviation, least, most")
    for name in found[0]:
        values = np.array([each[name] for each in found])
        spread = values.mean(), values.std(), values.min(), values.max()
        print(f"  {name:24}", *(f"{value:12.4g}" for value in spread))


if __name__ == "__main__":
    show("agent, 1,000 sessions", agent, 20)
    show("chat, 19,366 requests", conversation, 12)
    show("rag, 7,106 requests", retrieval, 10)
