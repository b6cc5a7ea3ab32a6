"""The one line that a plan ends in: what the format buys, what it costs, and what binds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfold.analysis.capacity import capacity
from kvfold.analysis.latency import COMPLETED, call_latency
from kvfold.analysis.search import ATTAINMENT
from kvfold.analysis.trust import measured_text
from kvfold.sim.run import FS_PER_S

if TYPE_CHECKING:
    from kvfold.analysis.search import Outcome
    from kvfold.analysis.slo import Slo
    from kvfold.analysis.study import Answers, Question

#: Live sequences that have held this share of the pool filled it; with less, it was cached prefixes that did.
FULL_POOL = 0.95
#: Nothing binds at the recorded load when the baseline could serve this many times as much.
ROOM = 1.1


def verdict(question: Question, answers: Answers, plan: dict[str, Any]) -> dict[str, Any]:
    """`slo_met`: some format meets the SLO at the recorded load (without one: at the fixed concurrency)."""
    base = question.baseline.name
    judged = answers.recorded or answers.equal
    slo_met = any(outcome.attainment >= ATTAINMENT for outcome in judged.values())
    name, change = _best_format(question, answers, plan)
    speedup = _speedups(plan).get(name)
    limit = _binding_at(answers, base)
    binding = "none" if _has_room(answers, base) else limit
    return {
        "slo_met": slo_met,
        "format": name,
        "capacity_change": change,
        "step_speedup": speedup,
        "binding": binding,
        "binding_at_highest_load": limit,
        "text": _text(question, answers, plan, name, change, speedup, slo_met, binding, limit),
    }


def _best_format(question: Question, answers: Answers, plan: dict[str, Any]) -> tuple[str, float | None]:
    """The format with the largest change of the highest load, the baseline itself if there is no other.

    Changes that the searches cannot tell apart are a tie: the shorter decode step wins it, then the goodput at
    fixed concurrency. A lossy format is taken only where no lossless one was asked for: what it does to answers
    is not known here.
    """
    base = answers.highest[question.baseline.name]
    others = [sizes for sizes in question.formats[1:] if sizes.lossless] or question.formats[1:]
    found = {sizes.name: capacity(base, answers.highest[sizes.name]) for sizes in others}
    if not found:
        return question.baseline.name, None
    changes = {name: float("-inf") if each.change is None else each.change for name, each in found.items()}
    best = max(changes, key=lambda name: changes[name])
    told_apart = 0.0 if found[best].change is None else found[best].resolution
    tied = [name for name in changes if changes[name] >= changes[best] - told_apart]
    speedups = _speedups(plan)
    goodput = {
        line["format"]: line["value"] or 0.0
        for line in plan["fixed_concurrency"]["rows"]
        if line["metric"] == "goodput"
    }
    name = max(tied, key=lambda name: (speedups[name], goodput[name]))
    return name, found[name].change


def _speedups(plan: dict[str, Any]) -> dict[str, float]:
    return {line["format"]: line["speedup"] for line in plan["step"]["formats"]}


def _has_room(answers: Answers, name: str) -> bool:
    """Whether the recorded load is well below the highest one."""
    best = answers.highest[name][0].best
    return bool(answers.recorded) and best is not None and best.load >= ROOM


def _binding_at(answers: Answers, name: str) -> str:
    """What stops the baseline from serving more: memory, if a pool without a limit would serve clearly more.

    Else what the steps of the first replay above its highest load spend their time on.
    """
    failed, unlimited = answers.highest[name][0].failed, answers.unlimited
    if failed is None or unlimited is None:
        return "none"
    if unlimited.attainment >= answers.gate:
        return "memory"
    stretches = failed.run.stretches
    prefill_s = (
        float((stretches.steps * stretches.first_step_fs)[stretches.prefill_tokens > 0].sum()) / FS_PER_S
    )
    return "compute" if prefill_s > failed.run.busy_s / 2 else "bandwidth"


def _binding_text(question: Question, failed: Outcome, limit: str) -> str:
    """What binds, and which limits of the SLO the requests miss there."""
    kv = failed.run.kv
    full = kv["peak_bytes"] / kv["capacity_bytes"]
    why = ""
    if limit == "memory" and full < FULL_POOL:
        why = f" for cached prefixes (live KV peaks at {100 * full:.0f} % of the pool)"
    return (
        f"; what binds there is {limit}{why}: at {failed.load * question.unit_load:.3g} {question.load_unit}, the "
        f"first load not served, {_misses(question.slo, failed)}"
    )


def _misses(slo: Slo, outcome: Outcome) -> str:
    """Shares of all offered requests: 3.2 % miss TTFT and 0.4 % TPOT."""
    calls = outcome.run.calls
    times = call_latency(calls)
    limits = (
        ("TTFT", times.ttft_s, slo.ttft_s),
        ("TPOT", times.tpot_s, slo.tpot_s),
        ("E2E", times.e2e_s, slo.e2e_s),
    )
    shares = {
        name: float((of_call_s > limit_s).mean())
        for name, of_call_s, limit_s in limits
        if limit_s is not None
    }
    parts = [f"{100 * share:.1f} % miss {name}" for name, share in shares.items() if share]
    lost = float((calls.outcome != COMPLETED).mean())
    if lost:
        parts.append(f"{100 * lost:.1f} % do not complete")
    return " and ".join(parts)


def _text(
    question: Question,
    answers: Answers,
    plan: dict[str, Any],
    name: str,
    change: float | None,
    speedup: float | None,
    slo_met: bool,
    binding: str,
    limit: str,
) -> str:
    deployment, base = question.deployment, question.baseline.name
    gpus = f"{deployment.tp} x {deployment.gpu.name}"
    parts = [f"{deployment.model.name} on {gpus}, SLO {question.slo.name}: "]
    if name == base:
        parts.append(f"{base} alone was asked for; name a second format to compare")
    elif change is None:
        parts.append(_no_capacity_text(question, answers, name))
    else:
        parts.append(_capacity_text(question, answers, name, change))
    if speedup is not None:
        parts.append(f"; at equal concurrency a decode step runs {speedup:.2f}x as fast")
        share = plan["step"]["formats"][0]["attention_share"]
        parts.append(f" (attention is {100 * share:.0f} % of it)")
    failed = answers.highest[base][0].failed
    if limit != "none" and failed is not None:
        parts.append(_binding_text(question, failed, limit))
    if binding == "none" and answers.recorded:
        parts.append("; at the recorded load nothing binds, so no format changes what is served there")
    parts.append(_harm_text(name, base, change, speedup))
    if answers.gate < ATTAINMENT:
        missed = 100 * (1 - answers.alone)
        parts.append(f"; {missed:.1f} % of requests miss the SLO even alone, loads are judged by the others")
    rejected = plan["rejected"]["reasons"].get("longer_than_model_context", 0)
    if rejected:
        share = 100 * rejected / plan["rejected"]["offered"]
        tokens = f"{deployment.max_context_tokens:,}"
        parts.append(
            f"; {rejected:,} requests ({share:.1f} %) are longer than {tokens} tokens and were rejected"
        )
    lossy = [sizes.name for sizes in question.formats if not sizes.lossless]
    if lossy:
        parts.append(
            f"; {', '.join(lossy)} is lossy" + ("" if name in lossy else " and left out of this line")
        )
    if not slo_met:
        where = "the recorded load" if answers.recorded else f"{answers.concurrency:,} live"
        parts.append(f"; NO format meets the SLO at {where} (below {100 * ATTAINMENT:g} % of requests)")
    return f"{''.join(parts)}. {_origin_text(question, answers)}"


def _origin_text(question: Question, answers: Answers) -> str:
    """Which step times rest on measurements, and whether most of decode attention lies inside them."""
    measured = measured_text(question)
    if not measured:
        return "All step times modelled."
    origins = [answers.equal[sizes.name].run.attention_origin_s for sizes in question.formats]
    inside = sum(by_origin.get("interpolated", 0.0) for by_origin in origins)
    outside = sum(by_origin.get("extrapolated", 0.0) for by_origin in origins)
    how = "interpolated" if inside >= outside else "extrapolated"
    return f"{measured[0].upper()}{measured[1:]} {how} from measurements, all other terms modelled."


def _capacity_text(question: Question, answers: Answers, name: str, change: float) -> str:
    found = capacity(answers.highest[question.baseline.name], answers.highest[name])
    assert found.baseline is not None
    assert found.value is not None
    before, after = found.baseline * question.unit_load, found.value * question.unit_load
    loads = f"{before:.3g} -> {after:.3g} {question.load_unit}"
    if found.ci95 is not None:
        low, high = (100 * bound for bound in found.ci95)
        loads += f", 95 % CI {low:+.0f} to {high:+.0f} %"
    if abs(change) <= found.resolution:
        base = question.baseline.name
        return (
            f"{name} and {base} differ in load served on the same KV budget by no more than the search resolves, "
            f"{100 * found.resolution:.0f} % ({loads})"
        )
    more = "more" if change > 0 else "less"
    return f"{name} serves {100 * abs(change):.0f} % {more} load on the same KV budget ({loads})"


def _no_capacity_text(question: Question, answers: Answers, name: str) -> str:
    base = question.baseline.name
    easy = [each for each in (base, name) if any(found.exhausted for found in answers.highest[each])]
    if easy:
        return f"the trace holds too little work to load {' and '.join(easy)} to the limit"
    tried = [found.lowest for each in (base, name) for found in answers.highest[each] if found.best is None]
    lowest = min(tried, key=lambda outcome: outcome.load)
    return (
        f"no load was found that both {base} and {name} serve within the SLO: of the lowest tried, "
        f"{lowest.load * question.unit_load:.2g} {question.load_unit}, {100 * lowest.attainment:.1f} % of "
        "requests meet it"
    )


def _harm_text(name: str, base: str, change: float | None, speedup: float | None) -> str:
    if name == base:
        return ""
    slower = speedup is not None and speedup < 0.995
    if slower and (change is None or change < 0.03):
        return f"; {name} does not help here, stay with {base}"
    if slower:
        return "; each user's own tokens come more slowly"
    return ""
