"""The one line that a plan ends in: what the format buys, what it costs, and what binds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfold.analysis.capacity import capacity
from kvfold.analysis.search import ATTAINMENT
from kvfold.sim.run import FS_PER_S

if TYPE_CHECKING:
    from kvfold.analysis.study import Answers, Question

#: The pool binds when live sequences have held this share of it, or when it lost so much (in shares of all prompt
#: tokens) of the prefix hits that an unlimited cache would have.
FULL_POOL, LOST_HITS = 0.95, 0.02
#: Nothing binds at the recorded load when the baseline could serve this many times as much.
ROOM = 1.1


def verdict(question: Question, answers: Answers, plan: dict[str, Any]) -> dict[str, Any]:
    """`slo_met`: some format meets the SLO at the recorded load (without one: at the fixed concurrency)."""
    base = question.baseline.name
    judged = answers.recorded or answers.equal
    slo_met = any(outcome.attainment >= ATTAINMENT for outcome in judged.values())
    name, change = _best_format(question, answers)
    speedup = next((line["speedup"] for line in plan["step"]["formats"] if line["format"] == name), None)
    limit = _binding_at(answers, base, plan["trace"].get("prefix_hit_token_share"))
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


def _best_format(question: Question, answers: Answers) -> tuple[str, float | None]:
    """The format with the largest change of the highest load, the baseline itself if there is no other.

    A lossy format is taken only where no lossless one was asked for: what it does to answers is not known here.
    """
    base = answers.highest[question.baseline.name]
    others = [sizes for sizes in question.formats[1:] if sizes.lossless] or question.formats[1:]
    changes = {sizes.name: capacity(base, answers.highest[sizes.name]).change for sizes in others}
    if not changes:
        return question.baseline.name, None
    name = max(changes, key=lambda each: float("-inf") if (known := changes[each]) is None else known)
    return name, changes[name]


def _has_room(answers: Answers, name: str) -> bool:
    """Whether the recorded load is well below the highest one."""
    best = answers.highest[name][0].best
    return bool(answers.recorded) and best is not None and best.load >= ROOM


def _binding_at(answers: Answers, name: str, unlimited_hits: float | None) -> str:
    """What stops the format from serving more: looked up in the first replay above its highest load.

    `unlimited_hits`: share of prompt tokens that a prefix cache without a limit would hit, None if unknown.
    """
    found = answers.highest[name][0]
    failed = [outcome for outcome in found.tried if outcome.attainment < answers.gate]
    if not failed:
        return "none"
    run = min(failed, key=lambda outcome: outcome.load).run
    if run.kv["peak_bytes"] >= FULL_POOL * run.kv["capacity_bytes"]:
        return "memory"
    if unlimited_hits is not None and unlimited_hits - run.kv["prefix_hit_token_share"] > LOST_HITS:
        return "memory"
    stretches = run.stretches
    prefill_s = (
        float((stretches.steps * stretches.first_step_fs)[stretches.prefill_tokens > 0].sum()) / FS_PER_S
    )
    return "compute" if prefill_s > run.busy_s / 2 else "bandwidth"


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
    if limit != "none":
        parts.append(f"; what binds there is {limit}")
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
    """Which step times rest on measurements, and whether most of them lie inside what was measured."""
    origins = {sizes.name: answers.equal[sizes.name].run.attention_origin_s for sizes in question.formats}
    measured = [name for name, by_origin in origins.items() if set(by_origin) - {"modelled"}]
    if not measured:
        return "All step times modelled."
    inside = sum(origins[name].get("interpolated", 0.0) for name in measured)
    outside = sum(origins[name].get("extrapolated", 0.0) for name in measured)
    how = "interpolated" if inside >= outside else "extrapolated"
    modelled = [sizes.name for sizes in question.formats if sizes.name not in measured]
    rest = f", of {', '.join(modelled)} and all other terms" if modelled else ", all other terms"
    return f"Attention of {', '.join(measured)} {how} from measurements{rest} modelled."


def _capacity_text(question: Question, answers: Answers, name: str, change: float) -> str:
    found = capacity(answers.highest[question.baseline.name], answers.highest[name])
    assert found.baseline is not None
    assert found.value is not None
    before, after = found.baseline * question.unit_load, found.value * question.unit_load
    loads = f"{before:.3g} -> {after:.3g} {question.load_unit}"
    if found.ci95 is not None:
        low, high = (100 * bound for bound in found.ci95)
        loads += f", 95 % CI {low:+.0f} to {high:+.0f} %"
    if abs(change) < 0.03:
        return f"{name} serves the same load on the same KV budget ({loads})"
    more = "more" if change > 0 else "less"
    return f"{name} serves {100 * abs(change):.0f} % {more} load on the same KV budget ({loads})"


def _no_capacity_text(question: Question, answers: Answers, name: str) -> str:
    base = question.baseline.name
    easy = [each for each in (base, name) if any(found.exhausted for found in answers.highest[each])]
    if easy:
        return f"the trace holds too little work to load {' and '.join(easy)} to the limit"
    return f"no load was found that both {base} and {name} serve within the SLO"


def _harm_text(name: str, base: str, change: float | None, speedup: float | None) -> str:
    if name == base:
        return ""
    slower = speedup is not None and speedup < 0.995
    if slower and (change is None or change < 0.03):
        return f"; {name} does not help here, stay with {base}"
    if slower:
        return "; each user's own tokens come more slowly"
    return ""
