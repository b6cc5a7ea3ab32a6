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
from kvfold.analysis.metrics import cdf, goodput_rps, itl, makespan_s, sessions, timeline
from kvfold.analysis.rows import compare_runs, row
from kvfold.analysis.search import Outcome
from kvfold.analysis.slo import describe
from kvfold.analysis.steptable import break_even, compare, heatmap
from kvfold.analysis.study import Answers, Question, replays, sessions_of, span_s
from kvfold.analysis.trust import assumed, energy_note, not_validated
from kvfold.analysis.verdict import verdict
from kvfold.sim.errors import ConfigError
from kvfold.sim.memory import max_sequences

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfold.codec.sizes import FormatSizes
    from kvfold.sim.run import Run


#: At its highest load a trace is a burst when its replay lasts this many times as long as its arrivals.
BURST = 1.5
#: A closed loop that serves this many times the highest load is worth a word.
LOOP = 2.0


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
            "note": "; ".join(filter(None, (_burst_note(question, answers), _loop_note(question, answers)))),
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
        "energy_note": energy_note(question),
        "rejected": _rejected(question, answers),
        "ci_method": f"{bootstrap.METHOD}; {_capacity_method(question, answers)}",
        "notes": [*answers.equal[base].run.notes, *assumed(question)],
        "limits": not_validated(question, answers),
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
        cap = question.limits.max_num_seqs
        run = f" ({cap:,} run at once)" if max(fit) > cap else ""
        lines.append(row(f"sequences of {context:,} tokens that fit{run}", sizes.name, "", *fit, n=1))
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
    found = [each for searches in answers.highest.values() for each in searches if each.is_limit]
    resolved = ""
    if found:
        resolved = f", which resolves {100 * max(each.resolution for each in found):.0f} %"
    how = f"none from one search{resolved}: --seeds draws more"
    if question.seeds > 1:
        how = f"a 95 % t interval over {question.seeds} rotations of the sessions against their starts"
    return (
        f"for the highest load {how} (served: at least {100 * answers.gate:.3g} % of the requests that fit the "
        "context must meet the SLO)"
    )


def _burst_note(question: Question, answers: Answers) -> str:
    """Where the requests of a short trace, at the highest load, arrive long before the last one ends."""
    if not question.has_clock:
        return ""
    parts = []
    for name, found in answers.highest.items():
        if found[0].best is None or found[0].exhausted:
            continue
        calls = found[0].best.run.calls
        arriving_s, whole_s = float(np.ptp(calls.arrival_s[~np.isnan(calls.arrival_s)])), makespan_s(calls)
        if whole_s > BURST * arriving_s:
            load = found[0].best.load * question.unit_load
            parts.append(
                f"{name} at {load:.3g} {question.load_unit}: all arrive within {arriving_s:.3g} s, the last ends "
                f"after {whole_s:.3g} s"
            )
    if not parts:
        return ""
    return (
        f"a burst that drains afterwards, no load that could go on ({'; '.join(parts)}); a longer trace tells"
    )


def _loop_note(question: Question, answers: Answers) -> str:
    """Where a closed loop serves far more than the highest load: most of what is missed is missed in bursts."""
    base = question.baseline.name
    best = answers.highest[base][0].best
    if not question.has_clock or best is None:
        return ""
    highest = best.load * question.unit_load
    in_loop = len(sessions_of(question.trace)) / makespan_s(answers.equal[base].run.calls)
    if not in_loop > LOOP * highest:
        return ""
    return (
        f"{base} serves {answers.concurrency:,} live in a closed loop at {in_loop:.3g} {question.load_unit}, but "
        f"only {highest:.3g} by the clock of the trace: there requests meet by chance, and few may miss the SLO"
    )


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
    for name, outcomes in answers.by_load.items():
        for outcome in sorted(outcomes, key=lambda outcome: outcome.load):
            ttft_s = call_latency(outcome.run.calls).ttft_s
            known = ttft_s[~np.isnan(ttft_s)]
            lines.append(
                {
                    "format": name,
                    "load": outcome.load * question.unit_load,
                    "attainment": outcome.attainment,
                    "goodput_rps": goodput_rps(outcome.run, question.slo),
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
