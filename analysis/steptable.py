"""The time table of one decode step: where the time goes, and what a format changes in it."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvfold.analysis.deployment import Deployment
    from kvfold.codec.sizes import FormatSizes
    from kvfold.sim.step import StepCost

#: Rows of the step table that are attention; the raw tails are read by it too.
ATTENTION = (
    "attention: kernel",
    "attention: KV read",
    "attention: decode work",
    "attention: windows",
    "raw tails",
)
BATCHES = (1, 4, 8, 32, 128, 256)
CONTEXTS = tuple(1024 * 2**power for power in range(8))  # 1K .. 128K


@dataclass(frozen=True, slots=True)
class Published:
    """A figure from somebody's write-up for a decode step at a fixed KV budget."""

    model: str
    gpu: str
    weights: str
    context_tokens: int
    kv_budget_bytes: int
    format: str
    sequences: int
    tok_s: float
    source: str


def step_s(cost: StepCost, batch: int, context_tokens: int) -> float:
    """Duration of a decode step of `batch` sequences that each hold `context_tokens` tokens."""
    return sum(term.s for term in _terms(cost, batch, context_tokens).values())


def compare(cost: StepCost, baseline: StepCost, batch: int, context_tokens: int) -> dict[str, Any]:
    """The JSON of `kvfold step`: totals, Amdahl, and one row per term of either format.

    amdahl_speedup = 1 / (1 - p + p / s) with the attention share p of the baseline's step and the attention
    speed-up s; the step's own speed-up also pays for what a format adds outside attention (packing).
    """
    terms, before = _terms(cost, batch, context_tokens), _terms(baseline, batch, context_tokens)
    total_s, before_s = sum(t.s for t in terms.values()), sum(t.s for t in before.values())
    attention_s = sum(terms[name].s for name in ATTENTION if name in terms)
    attention_before_s = sum(before[name].s for name in ATTENTION if name in before)
    share = attention_before_s / before_s
    speedup = attention_before_s / attention_s if attention_s else 1.0
    rows = []
    for name in [*before, *(name for name in terms if name not in before)]:
        term = terms.get(name)
        rows.append(
            {
                "name": name,
                "baseline_s": before[name].s if name in before else 0.0,
                "s": term.s if term else 0.0,
                "speed_of_light_s": term.speed_of_light_s if term else 0.0,
                "origin": (term or before[name]).origin,
            }
        )
    return {
        "format": cost.sizes.name,
        "baseline": baseline.sizes.name,
        "batch": batch,
        "context_tokens": context_tokens,
        "step_s": total_s,
        "baseline_step_s": before_s,
        "speedup": before_s / total_s,
        "attention_share": share,
        "attention_speedup": speedup,
        "amdahl_speedup": 1 / (1 - share + share / speedup),
        "output_tok_s": batch / total_s,
        "baseline_output_tok_s": batch / before_s,
        "rows": rows,
    }


def break_even(cost: StepCost, baseline: StepCost, max_context_tokens: int) -> list[dict[str, Any]]:
    """The smallest context at each batch from which a step with the format is shorter; None if at none."""
    contexts = [context for context in CONTEXTS if context <= max_context_tokens] or [max_context_tokens]
    rows = []
    for batch in BATCHES:
        pays = [step_s(cost, batch, context) < step_s(baseline, batch, context) for context in contexts]
        first = next((i for i in range(len(pays)) if all(pays[i:])), None)
        rows.append(
            {
                "format": cost.sizes.name,
                "batch": batch,
                "context_tokens": None if first is None else contexts[first],
                "origin": "modelled",
            }
        )
    return rows


def break_even_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """The break-even of one format in words, batches with the same context together."""
    batches_of: dict[int | None, list[int]] = {}
    for line in lines:
        batches_of.setdefault(line["context_tokens"], []).append(line["batch"])
    parts = []
    for context, batches in batches_of.items():
        where = f"batch {', '.join(f'{batch:,}' for batch in batches)}"
        if len(batches_of) == 1:
            where = f"{'no' if context is None else 'every'} batch from {batches[0]:,} to {batches[-1]:,}"
        elif context is None:
            where += " never"
        parts.append(
            f"at {where}" if context is None else f"from {context:,} tokens of context on at {where}"
        )
    return "; ".join(parts)


def heatmap(cost: StepCost, baseline: StepCost, max_context_tokens: int) -> dict[str, Any]:
    """Step speed-up over batch and context."""
    contexts = [context for context in CONTEXTS if context <= max_context_tokens] or [max_context_tokens]
    return {
        "format": cost.sizes.name,
        "batches": list(BATCHES),
        "contexts": contexts,
        "speedup": [
            [step_s(baseline, batch, context) / step_s(cost, batch, context) for context in contexts]
            for batch in BATCHES
        ],
    }


def fixed_budget(
    deployment: Deployment, formats: list[FormatSizes], context_tokens: int
) -> list[dict[str, Any]]:
    """Per format: sequences of one context that the KV budget holds, tokens they can grow, and their step."""
    from kvfold.sim.memory import max_sequences, output_tokens_left

    rows = []
    for sizes in formats:
        budget, cost = deployment.budget(sizes), deployment.cost(sizes)
        sequences = max_sequences(budget, context_tokens)
        row: dict[str, Any] = {"format": sizes.name, "sequences": sequences, "origin": "modelled"}
        row["kv_budget_bytes"] = budget.kv_budget_bytes
        if sequences:
            duration_s = step_s(cost, sequences, context_tokens)
            row |= {
                "output_tokens_left": output_tokens_left(budget, context_tokens, sequences),
                "step_s": duration_s,
                "output_tok_s": sequences / duration_s,
                "output_tok_s_per_sequence": 1 / duration_s,
                "bytes_only_output_tok_s": sequences / _bytes_only_s(cost, sequences, context_tokens),
            }
        published = _published(deployment, sizes.name, context_tokens, budget.kv_budget_bytes)
        row["published"] = asdict(published) if published else None
        rows.append(row)
    return rows


def _terms(cost: StepCost, batch: int, context_tokens: int) -> dict[str, Any]:
    window_tokens = min(context_tokens, cost.model.window_tokens)
    return {term.name: term for term in cost.terms(batch, batch * context_tokens, batch * window_tokens)}


def _bytes_only_s(cost: StepCost, batch: int, context_tokens: int) -> float:
    """The step from bytes and bandwidth alone: weights and KV at encoded size, no decode work, no overhead."""
    terms = _terms(cost, batch, context_tokens)
    names = (
        "attention: KV read",
        "attention: windows",
        "linear layers",
        "experts",
        "LM head",
        "recurrent state",
    )
    return sum(terms[name].s for name in names if name in terms)


def _published(
    deployment: Deployment, format_name: str, context_tokens: int, kv_budget_bytes: int
) -> Published | None:
    text = resources.files("kvfold.analysis").joinpath("data/published.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        figure = Published(
            model=row["model"],
            gpu=row["gpu"],
            weights=row["weights"],
            context_tokens=int(row["context_tokens"]),
            kv_budget_bytes=int(row["kv_budget_bytes"]),
            format=row["format"],
            sequences=int(row["sequences"]),
            tok_s=float(row["tok_s"]),
            source=row["source"],
        )
        wanted = (
            deployment.model.name,
            deployment.gpu.name,
            deployment.weights,
            context_tokens,
            kv_budget_bytes,
        )
        found = (figure.model, figure.gpu, figure.weights, figure.context_tokens, figure.kv_budget_bytes)
        if found == wanted and figure.format == format_name:
            return figure
    return None
