"""Why a plan can be trusted, and how far: what it assumes, and what nobody has checked against an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvfold.analysis.search import ATTAINMENT

if TYPE_CHECKING:
    from kvfold.analysis.study import Answers, Question

#: Origins of what rests on measurements.
MEASURED = ("measured", "interpolated", "extrapolated")
#: The highest load hangs on single requests when no more than this many may miss the SLO.
FEW_MISSES = 5


def assumed(question: Question) -> list[str]:
    """Where the costs come from, and how the replays take what a trace does not say."""
    lines = [
        _costs_text(question),
        "blocks take their slot, or in formats with lists sizes drawn from the measured ones, by --seed",
        "KV of generated tokens is shared with a later call only as far as the trace's own hashes say so",
    ]
    if question.trace.meta.hash_scope == "none":
        lines.append("the trace has no prefix hashes, so no call shares a prefix with another")
    return lines


def not_validated(question: Question, answers: Answers) -> list[str]:
    """What no measurement backs."""
    lines = []
    gpu = question.deployment.gpu
    if question.deployment.costs is None:
        lines.append(f"no step of {gpu.name} was measured: every step time is modelled")
    lines += _outside_the_grid(answers)
    lines.append("differences below a few percent are finer than the cost model; compare signs and orders")
    may_miss = (1 - ATTAINMENT) * len(question.trace)
    if may_miss < FEW_MISSES:
        lines.append(
            f"of {len(question.trace):,} requests {may_miss:.1f} may miss the SLO: the highest load hangs on "
            "single requests, a longer trace makes it firmer"
        )
    lines += [
        f"{sizes.name} is lossy: it changes values, and what that does to answers is not in this plan"
        for sizes in question.formats
        if not sizes.lossless
    ]
    return lines


def measured_terms(question: Question) -> dict[str, list[str]]:
    """Terms of a step that rest on measurements, each with the formats it does so for (prompts: all alike)."""
    found: dict[str, list[str]] = {}
    for sizes in question.formats:
        cost = replace(question.deployment.cost(sizes), strict=False)  # asked for its origins
        for term in cost.terms(1, cost.model.max_context_tokens, 0):
            if term.origin in MEASURED:
                name = "decode attention" if term.name.startswith("attention") else term.name
                found.setdefault(name, []).append(sizes.name)
        if cost.measured_prefill:
            found.setdefault("prompt attention", []).append(sizes.name)
    return found


def measured_text(question: Question) -> str:
    """``decode attention of bf16, fixed4, linear layers and prompt attention``; empty if nothing was measured."""
    parts = []
    for name, formats in measured_terms(question).items():
        some = len(formats) < len(question.formats)
        parts.append(f"{name} of {', '.join(formats)}" if some or name == "decode attention" else name)
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _costs_text(question: Question) -> str:
    gpu, costs = question.deployment.gpu, question.deployment.costs
    modelled = (
        f"modelled from datasheet figures at {gpu.bandwidth_efficiency:g} of the bandwidth and "
        f"{gpu.compute_efficiency:g} of the FLOP/s"
    )
    measured = measured_text(question)
    if costs is None:
        return f"no cost table was measured for {gpu.name}: every step time is {modelled}"
    if not measured:
        return f"{costs.source} has no term of this plan: every step time is {modelled}"
    return f"{measured} come from {costs.source}; every other term is {modelled}"


def _outside_the_grid(answers: Answers) -> list[str]:
    """How much of the time with decoding rests on attention costs outside the measured grid."""
    lines = []
    for name, outcome in answers.equal.items():
        by_origin = outcome.run.attention_origin_s
        outside, total = by_origin.get("extrapolated", 0.0), sum(by_origin.values())
        if outside:
            share = f"{100 * outside / total:.0f} %"
            lines.append(
                f"{name}: {share} of its decoding time has batches or contexts outside the measured grid"
            )
    return lines


def energy_note(question: Question) -> str:
    """What stands behind the joules, or why there are none."""
    gpu = question.deployment.gpu
    if gpu.power_limit_w is None or gpu.idle_w is None:
        missing = "power limit" if gpu.power_limit_w is None else "idle power"
        return f"energy is not known: the profile of {gpu.name} states no {missing}"
    measured = ", ".join(
        sizes.name for sizes in question.formats if sizes.name in question.deployment.power().attend_w
    )
    but = f" (but for decode attention of {measured}, whose watts were measured)" if measured else ""
    return (
        f"energy is an upper bound: a GPU that computes is taken to draw its power limit{but}, which on A100s is "
        "36 % to 130 % more than was measured of an engine; compare formats, not joules"
    )
