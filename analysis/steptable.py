"""The time table of one decode step: where the time goes, and what a format changes in it."""

from __future__ import annotations

import csv
import math
from dataclasses import asdict, dataclass, replace
from importlib import resources
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvfold.analysis.origins import ORIGINS
from kvfold.sim.errors import ConfigError
from kvfold.sim.step import step_cost

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
#: Terms that are nothing but bytes read: weights, KV and state.
READ = (
    "attention: KV read",
    "attention: windows",
    "linear layers",
    "experts",
    "LM head",
    "recurrent state",
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


def heatmap(cost: StepCost, baseline: StepCost, max_context_tokens: int) -> dict[str, Any]:
    """Step speed-up over batch and context; None where strict costs lack a measurement."""
    contexts = [context for context in CONTEXTS if context <= max_context_tokens] or [max_context_tokens]
    return {
        "format": cost.sizes.name,
        "batches": list(BATCHES),
        "contexts": contexts,
        "speedup": [[_speedup(cost, baseline, batch, context) for context in contexts] for batch in BATCHES],
    }


def break_even(cost: StepCost, baseline: StepCost, max_context_tokens: int) -> list[dict[str, Any]]:
    """At each batch the contexts at which a step with the format is shorter, of those of the heatmap.

    `stretches` are their [first, last]; `context_tokens` is the first of the stretch that reaches the longest
    context, None where none does. Points that strict costs refuse are counted in `not_measured`,
    and `tried_tokens` spans the others.
    """
    grid = heatmap(cost, baseline, max_context_tokens)
    contexts = grid["contexts"]
    rows = []
    for batch, speedups in zip(grid["batches"], grid["speedup"], strict=True):
        known = {
            context: gain > 1 for context, gain in zip(contexts, speedups, strict=True) if gain is not None
        }
        runs = [list(run) for pays, run in groupby(known, key=known.__getitem__) if pays]
        last = runs[-1] if runs and runs[-1][-1] == max(known) else None
        origins = {
            each.sizes.name: sorted({each.attention(batch, batch * context).origin for context in known})
            for each in (baseline, cost)
        }
        rows.append(
            {
                "format": cost.sizes.name,
                "batch": batch,
                "context_tokens": last[0] if last else None,
                "stretches": [[run[0], run[-1]] for run in runs],
                "tried_tokens": [min(known), max(known)] if known else [],
                "tried": len(contexts),
                "not_measured": len(contexts) - len(known),
                "origin": _weakest(origins),
                "origins": origins,
            }
        )
    return rows


def break_even_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """The break-even of one format in words, batches with the same contexts together."""
    batches_of: dict[str, list[int]] = {}
    for line in lines:
        batches_of.setdefault(_where(line), []).append(line["batch"])
    parts = []
    for where, batches in batches_of.items():
        at = f"batch {', '.join(f'{batch:,}' for batch in batches)}"
        if len(batches_of) == 1:
            at = f"{'every' if where else 'no'} batch from {batches[0]:,} to {batches[-1]:,}"
        elif not where:
            at += " never"
        parts.append(f"{where} at {at}".lstrip())
    missing = sum(line["not_measured"] for line in lines)
    if missing:
        parts.append(f"{missing} of {sum(line['tried'] for line in lines)} points tried are not measured")
    merged = merged_origins(lines)
    modelled = [name for name, origins in merged.items() if "modelled" in origins]
    if len(modelled) == 1 and len(merged) == 2:
        (measured,) = set(merged) - set(modelled)
        parts.append(
            f"{measured} is measured, launches included, and {modelled[0]} is modelled without them: do not "
            "trust a small difference"
        )
    return "; ".join(parts)


def merged_origins(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """By format, the origins of its attention in all these lines."""
    merged: dict[str, set[str]] = {}
    for line in lines:
        for name, origins in line["origins"].items():
            merged.setdefault(name, set()).update(origins)
    return {name: sorted(origins) for name, origins in merged.items()}


def origins_text(origins: Mapping[str, Sequence[str]]) -> str:
    """`modelled`, or where the attention of each format comes from once any of it was measured."""
    texts = {name: " and ".join(each) for name, each in origins.items() if each}
    different = set(texts.values())
    if different <= {"modelled"}:
        return "modelled"
    if len(different) == 1:
        return f"with attention {different.pop()}"
    return "with attention " + ", ".join(f"of {name} {text}" for name, text in texts.items())


def fixed_budget(
    deployment: Deployment, formats: list[FormatSizes], context_tokens: int
) -> list[dict[str, Any]]:
    """Per format: sequences of one context that the KV budget holds, tokens they can grow, and their step."""
    from kvfold.sim.memory import max_sequences, output_tokens_left

    rows = []
    for sizes in formats:
        budget, cost = deployment.budget(sizes), deployment.cost(sizes)
        sequences = max_sequences(budget, context_tokens)
        row: dict[str, Any] = {"format": sizes.name, "sequences": sequences}
        row["kv_budget_bytes"] = budget.kv_budget_bytes
        if sequences:
            duration_s = step_s(cost, sequences, context_tokens)
            row |= {
                "origin": cost.attention(sequences, sequences * context_tokens).origin,
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


def _speedup(cost: StepCost, baseline: StepCost, batch: int, context_tokens: int) -> float | None:
    try:
        return step_s(baseline, batch, context_tokens) / step_s(cost, batch, context_tokens)
    except ConfigError:  # strict costs refuse a point that is not measured, and nobody asked for this one
        return None


def _weakest(origins: Mapping[str, Sequence[str]]) -> str:
    """The origin that says least about a measurement; without a point, that of the points strict costs take."""
    found = {origin for each in origins.values() for origin in each}
    return max(found, key=list(ORIGINS).index, default="interpolated")


def _where(line: Mapping[str, Any]) -> str:
    """The contexts at which a step is shorter; empty where it is at none of those tried."""
    if not line["tried_tokens"]:
        return "at contexts unknown"
    first, last = line["tried_tokens"]
    parts = []
    for start, end in line["stretches"]:
        if end == last:
            smallest = " (the smallest tried)" if start == first else ""
            on = f"to {end:,} (the largest measured)" if line["not_measured"] else "on"
            parts.append(f"from {start:,} tokens of context{smallest} {on}")
        elif start == first:
            parts.append(f"up to {end:,} tokens of context")
        else:
            parts.append(f"from {start:,} to {end:,} tokens of context")
    return " and ".join(parts)


def _bytes_only_s(cost: StepCost, batch: int, context_tokens: int) -> float:
    """The step from bytes and bandwidth alone: weights and KV at encoded size, no decode work, no overhead.

    No measurement enters, so that both sides are bytes wherever there is a cost table, and no arithmetic.
    """
    gpu = replace(cost.gpu, bf16_flops_per_s=math.inf)
    terms = _terms(step_cost(cost.model, gpu, cost.sizes, cost.weights, cost.tp), batch, context_tokens)
    return sum(terms[name].s for name in READ if name in terms)


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
