"""A capacity plan: the recorded load as it is, then two comparisons, kept apart.

*Fixed concurrency*: N live sessions (or single calls) for every format; what changes is the step time.
*Fixed KV budget*: the same bytes for every format, each at the highest load at which it meets the SLO.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvfold.analysis import bootstrap
from kvfold.analysis.capacity import capacity
from kvfold.analysis.latency import call_latency
from kvfold.analysis.metrics import cdf, itl, sessions, timeline
from kvfold.analysis.rows import compare_runs, row
from kvfold.analysis.search import Outcome
from kvfold.analysis.slo import describe
from kvfold.analysis.steptable import break_even, compare, heatmap
from kvfold.analysis.study import Answers, Question, replays, span_s
from kvfold.analysis.verdict import verdict
from kvfold.sim.errors import ConfigError
from kvfold.sim.memory import max_sequences

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfold.codec.sizes import FormatSizes
    from kvfold.sim.run import Run


def make_plan(
    question: Question, trace_summary: dict[str, Any], config: dict[str, Any], progress: Callable[[str], None]
) -> dict[str, Any]:
    """The plan as CLI.md's JSON object, with what the report draws."""
    _check(question)
    answers = replays(question, progress)
    progress("comparing the runs")
    base = question.baseline.name
    others = [sizes.name for sizes in question.formats[1:]]
    budget = question.deployment.budget(question.baseline)
    step = _step(question, answers)
    plan: dict[str, Any] = {
        "config": config | {"slo_text": describe(question.slo), "baseline": base, "formats": [base, *others]},
        "trace": trace_summary,
        "fixed_concurrency": {
            "concurrency": answers.concurrency,
            "concurrency_origin": answers.concurrency_origin,
            "rows": _rows(question, answers.equal, others),
        },
        "fixed_budget": {
            "kv_budget_bytes": budget.kv_budget_bytes,
            "kv_budget_origin": budget.kv_budget_origin,
            "load_unit": question.load_unit,
            "rows": _budget_rows(question, answers),
        },
        "recorded_load": _recorded(question, answers, others),
        "memory": _memory(question),
        "step": step,
        "break_even": [
            line
            for sizes in question.formats[1:]
            for line in break_even(*_costs(question, sizes), question.deployment.max_context_tokens)
        ],
        "heatmap": [
            heatmap(*_costs(question, sizes), question.deployment.max_context_tokens)
            for sizes in question.formats[1:]
        ],
        "curves": _curves(answers),
        "timeline": {name: timeline(_highest_run(answers, name).stretches) for name in answers.equal},
        "load_curve": _load_curve(question, answers),
        "sessions": _sessions(question, answers),
        "energy": {
            name: {
                "j_per_output_token": _per_token(outcome.run),
                "idle_j": outcome.run.idle_energy_j,
                "origin": outcome.run.energy_origin,
            }
            for name, outcome in answers.equal.items()
        },
        "rejected": _rejected(question, answers),
        "ci_method": f"{bootstrap.METHOD}; {_capacity_method(question, answers)}",
        "notes": [*answers.equal[base].run.notes, *_origin_notes(answers)],
        "limits": _limits(question),
    }
    plan["verdict"] = verdict(question, answers, plan)
    return plan


def _check(question: Question) -> None:
    if not len(question.trace):
        raise ConfigError(f"{question.trace.meta.source} holds no request that could be replayed")
    if (question.trace.output_tokens < 0).any():
        unknown = int((question.trace.output_tokens < 0).sum())
        raise ConfigError(f"{unknown:,} requests of {question.trace.meta.source} have no known output length")


def _costs(question: Question, sizes: FormatSizes) -> tuple[Any, Any]:
    return question.deployment.cost(sizes), question.deployment.cost(question.baseline)


def _rows(question: Question, outcomes: dict[str, Outcome], others: list[str]) -> list[dict[str, Any]]:
    base = outcomes[question.baseline.name].run
    return [
        line
        for name in others
        for line in compare_runs(name, base, outcomes[name].run, question.slo, question.seed)
    ]


def _budget_rows(question: Question, answers: Answers) -> list[dict[str, Any]]:
    deployment, trace = question.deployment, question.trace
    base = question.baseline
    context = int(np.mean(trace.input_tokens + trace.output_tokens))
    lines = []
    for sizes in question.formats[1:]:
        before, after = answers.highest[base.name], answers.highest[sizes.name]
        found = capacity(before, after)
        loads = [load * question.unit_load if load else None for load in (found.baseline, found.value)]
        lines.append(
            row(
                "load served (trace exhausted)" if found.exhausted else "highest load within the SLO",
                sizes.name,
                question.load_unit,
                *loads,
                n=found.searches,
                ci95=found.ci95,
            )
            | {"change": found.change}
        )
        fit = [max_sequences(deployment.budget(each), context) for each in (base, sizes)]
        lines.append(
            row(f"sequences of {context:,} tokens that fit", sizes.name, "", *fit, n=1, origin="modelled")
        )
        first, second = before[0].best, after[0].best
        if first and second:
            lines.extend(compare_runs(sizes.name, first.run, second.run, question.slo, question.seed))
    return lines


def _recorded(question: Question, answers: Answers, others: list[str]) -> dict[str, Any]:
    if not question.has_clock:
        return {
            "note": "the trace's sessions share no clock, so there is no recorded load to replay",
            "rows": [],
        }
    base = answers.recorded[question.baseline.name].run
    peak = base.kv["peak_bytes"] / base.kv["capacity_bytes"]
    busy = base.busy_s / span_s(base)
    note = f"at the recorded load the GPU is busy {100 * busy:.0f} % of the time and live KV peaks at "
    note += f"{100 * peak:.0f} % of the budget"
    return {"note": note, "rows": _rows(question, answers.recorded, others)}


def _capacity_method(question: Question, answers: Answers) -> str:
    how = "none from one search, which resolves 3 %: --seeds draws more"
    if question.seeds > 1:
        how = f"a 95 % t interval over {question.seeds} rotations of the sessions against their starts"
    return (
        f"for the highest load {how} (served: at least {100 * answers.gate:.3g} % of the requests that fit the "
        "context must meet the SLO)"
    )


def _origin_notes(answers: Answers) -> list[str]:
    """How much of the time with decoding rests on attention costs outside the measured grid."""
    notes = []
    for name, outcome in answers.equal.items():
        by_origin = outcome.run.attention_origin_s
        outside, total = by_origin.get("extrapolated", 0.0), sum(by_origin.values())
        if outside:
            share = f"{100 * outside / total:.0f} %"
            notes.append(
                f"{name}: {share} of its decoding time has batches or contexts outside the measured grid"
            )
    return notes


def _memory(question: Question) -> dict[str, Any]:
    deployment = question.deployment
    formats = []
    for sizes in question.formats:
        budget = deployment.budget(sizes)
        formats.append(
            {
                "format": sizes.name,
                "waterfall": [{"name": r.name, "bytes": r.bytes, "origin": r.origin} for r in budget.rows],
                "num_blocks": budget.num_units,
                "unit_tokens": budget.unit_tokens,
                "unit_bytes": budget.unit_bytes,
                "encoded_bits": sizes.encoded_bits,
                "slot_bits": sizes.slot_bits,
                "raw_block_share": sizes.raw_block_share,
                "origin": sizes.origin,
                "source": sizes.source,
            }
        )
    return {
        "kv_bytes_per_token": deployment.model.kv_bytes_per_token(16, deployment.tp),
        "kv_bytes_per_sequence": deployment.budget(question.baseline).sequence_bytes,
        "formats": formats,
    }


def _step(question: Question, answers: Answers) -> dict[str, Any]:
    """The step table at the mean operating point of the baseline at fixed concurrency."""
    stretches = answers.equal[question.baseline.name].run.stretches
    steps = stretches.steps * (stretches.decode_seqs > 0)
    total = max(1, int(steps.sum()))
    sequences = float((steps * stretches.decode_seqs).sum()) / total
    batch = max(1, round(sequences))
    # each sequence has one token more in every further step of a stretch
    kv_tokens = stretches.kv_tokens + stretches.decode_seqs * (stretches.steps - 1) / 2
    context = max(1, round(float((steps * kv_tokens).sum()) / total / max(sequences, 1.0)))
    return {
        "batch": batch,
        "context_tokens": context,
        "formats": [compare(*_costs(question, sizes), batch, context) for sizes in question.formats[1:]],
    }


def _curves(answers: Answers) -> dict[str, Any]:
    best = {name: found[0].best for name, found in answers.highest.items() if found[0].best}
    studies = {"recorded_load": answers.recorded, "fixed_concurrency": answers.equal, "fixed_budget": best}
    result: dict[str, Any] = {}
    for study, outcomes in studies.items():
        if outcomes:
            result[study] = {name: _distributions(outcome.run) for name, outcome in outcomes.items()}
    return result


def _distributions(of: Run) -> dict[str, Any]:
    times = call_latency(of.calls)
    return {"ttft_s": cdf(times.ttft_s), "tpot_s": cdf(times.tpot_s), "itl_s": cdf(*itl(of))}


def _highest_run(answers: Answers, name: str) -> Run:
    best = answers.highest[name][0].best
    return best.run if best else answers.equal[name].run


def _load_curve(question: Question, answers: Answers) -> list[dict[str, Any]]:
    lines = []
    for name, found in answers.highest.items():
        for outcome in sorted(found[0].tried, key=lambda outcome: outcome.load):
            ttft_s = call_latency(outcome.run.calls).ttft_s
            known = ttft_s[~np.isnan(ttft_s)]
            lines.append(
                {
                    "format": name,
                    "load": outcome.load * question.unit_load,
                    "attainment": outcome.attainment,
                    "ttft_p99_s": float(np.quantile(known, 0.99)) if len(known) >= 100 else None,
                }
            )
    return lines


def _sessions(question: Question, answers: Answers) -> dict[str, Any] | None:
    if not (question.trace.session_id >= 0).any():
        return None
    return {
        name: sessions(outcome.run.calls, call_latency(outcome.run.calls))
        for name, outcome in answers.equal.items()
    }


def _rejected(question: Question, answers: Answers) -> dict[str, Any]:
    calls = answers.equal[question.baseline.name].run
    count = sum(calls.reject_reasons.values())
    total = len(question.trace)
    return {"count": count, "share": count / total, "offered": total, "reasons": calls.reject_reasons}


def _per_token(of: Run) -> float | None:
    tokens = int(of.calls.output_tokens.sum())
    return of.energy_j / tokens if tokens and np.isfinite(of.energy_j) else None


def _limits(question: Question) -> list[str]:
    gpu, costs = question.deployment.gpu, question.deployment.costs
    modelled = (
        f"modelled from datasheet figures at {gpu.bandwidth_efficiency:g} of the bandwidth and "
        f"{gpu.compute_efficiency:g} of the FLOP/s"
    )
    planned = dict.fromkeys(sizes.name for sizes in (question.baseline, *question.formats))
    measured = ", ".join(name for name in planned if costs and name in costs.attend) or "no format"
    limits = [
        f"no cost table was measured for {gpu.name}: every step time is {modelled}"
        if costs is None
        else f"attention of {measured} and linear layers in {', '.join(costs.linear)} come from {costs.source}; "
        f"every other term is {modelled}",
        "blocks take their slot, or in formats with lists sizes drawn from the measured ones, by --seed",
        "KV of generated tokens is shared with a later call only as far as the trace's own hashes say so",
        "differences below a few percent are finer than the cost model; compare signs and orders",
    ]
    limits += [
        f"{sizes.name} is lossy: it changes values, and what that does to answers is not in this plan"
        for sizes in question.formats
        if not sizes.lossless
    ]
    if question.trace.meta.hash_scope == "none":
        limits.append("the trace has no prefix hashes, so no call shares a prefix with another")
    return limits
