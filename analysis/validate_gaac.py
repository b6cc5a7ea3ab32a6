"""The GAAC preprint's figures beside ours: every sign and order, and each magnitude with its difference.

Guo, George and Joshi, 28 October 2026: DGX Spark, W4A16 weights, 64K contexts. What is not known to us (how
kernels were timed, which checkpoints ran, the counts behind two gains) is taken both ways, and said.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvfold.analysis.deployment import format_sizes
from kvfold.analysis.steptable import fixed_budget, step_s
from kvfold.analysis.validate import Check, Family, compared, holds
from kvfold.analysis.validate_kernel import (
    CONTEXT,
    DENSE,
    FEWER,
    GAAC,
    context_checks,
    kernel_checks,
    one_step,
    packed,
    printed,
    spark,
)
from kvfold.analysis.validate_spark import rest_s, routed_step_s, spark_checks
from kvfold.analysis.words import percent, quantity
from kvfold.sim.memory import bytes_of_sequence

if TYPE_CHECKING:
    from kvfold.codec.sizes import FormatSizes

#: Hybrid models, the second also a mixture of experts; a quarter of their layers is full attention.
HYBRIDS = ("qwen3.5-27b", "qwen3.5-35b-a3b")
#: Two readings of W4A16 for them: every linear layer, or what Qwen's own checkpoints quantise.
WEIGHTS = {"w4a16": "all linear layers in 4 bits", "w4a16-mlp": "MLPs and experts in 4 bits"}
_BUDGET_BYTES = 20 * 2**30


def gaac(_: Path | None) -> Family:
    """Kernel split, speed-up by context, step gains, 2 -> 3 sequences, fixed-budget gains."""
    checks = (*kernel_checks(), *context_checks(), *_steps(), *_rates(), *_gains(), *spark_checks())
    return Family(checks)


def _steps() -> list[Check]:
    """The whole step at one sequence of 64K, and Amdahl's relation."""
    dense = one_step(spark(DENSE))
    ours = {
        DENSE: (dense["speedup"], (1.04, 1.15)),
        f"{DENSE}, {FEWER}": (one_step(spark(DENSE), fewer=True)["speedup"], (1.04, 1.15)),
    }
    for model in HYBRIDS:
        for weights, words in WEIGHTS.items():
            ours[f"{model}, {words}"] = (one_step(spark(model, weights))["speedup"], (1.04, 1.06))
    checks = []
    for name, (speedup, (low, high)) in ours.items():
        seen = round(speedup, 2)  # as the range is given
        where = "below it" if seen < low else "above it" if seen > high else "inside"
        note = f"published {low:.2f} to {high:.2f}, the reference is the middle; ours is {where}"
        checks.append(
            compared("gaac", f"full step, {name}", GAAC, (low + high) / 2, speedup, unit="x", note=note)
        )
    hybrids = [speedup for name, (speedup, _) in ours.items() if not name.startswith(DENSE)]
    least = min(speedup for name, (speedup, _) in ours.items() if name.startswith(DENSE))
    checks.append(
        holds(
            "gaac",
            "full step: every model gains, the hybrids less than the dense model",
            GAAC,
            "1 < hybrid < dense",
            f"1 < {min(hybrids):.3f} to {max(hybrids):.3f} < {least:.3f}",
            min(hybrids) > 1 and max(hybrids) < least,
        )
    )
    checks.append(
        compared(
            "gaac",
            "Amdahl: 40 % attention at 1.22x",
            GAAC,
            1.078,
            1 / (1 - 0.4 + 0.4 / 1.22),
            0.001,
            unit="x",
            note=f"at batch 1 ours are {quantity(dense['attention_share'], 'share')} and "
            f"{dense['attention_speedup']:.2f}x",
        )
    )
    return checks


def _rates() -> list[Check]:
    """Qwen3-8B in 20 GiB: sequences, aggregate and per-sequence rate within the same bytes."""
    deployment = spark(DENSE, kv_budget_bytes=_BUDGET_BYTES)
    before, after = fixed_budget(deployment, [format_sizes("bf16"), packed()], CONTEXT)
    fewer = 3 / step_s(deployment.cost(packed(fewer=True)), 3, CONTEXT)
    each = "output_tok_s_per_sequence"
    return [
        holds(
            "gaac",
            "sequences of 64K in 20 GiB, bf16 -> gaac",
            GAAC,
            "2 -> 3",
            f"{before['sequences']} -> {after['sequences']}",
            (before["sequences"], after["sequences"]) == (2, 3),
        ),
        compared("gaac", "aggregate, bf16", GAAC, 19.0, before["output_tok_s"], unit="tok/s"),
        compared("gaac", "aggregate, gaac", GAAC, 22.8, after["output_tok_s"], unit="tok/s"),
        compared("gaac", f"aggregate, gaac, {FEWER}", GAAC, 22.8, fewer, unit="tok/s"),
        compared("gaac", "per sequence, bf16", GAAC, 9.5, before[each], unit="tok/s"),
        compared("gaac", "per sequence, gaac", GAAC, 7.6, after[each], unit="tok/s"),
        holds(
            "gaac",
            "fixed budget: more in all, less for each",
            GAAC,
            "+, -",
            ", ".join("+" if after[key] > before[key] else "-" for key in ("output_tok_s", each)),
            after["output_tok_s"] > before["output_tok_s"] and after[each] < before[each],
        ),
        compared(
            "gaac",
            "attention speed-up that 19.0 -> 22.8 tok/s leave, beside the kernel's",
            GAAC,
            1.27,
            left_speedup(),
            unit="x",
            origin="published",
            note=f"with our {_other_s() * 1e3:.1f} ms for the rest of a step, at most 1.20x whatever that takes: "
            "these rates gain less than the published kernel does, and ours follow the kernel",
        ),
    ]


def _other_s() -> float:
    """What is not attention in our BF16 step of Qwen3-8B."""
    found = one_step(spark(DENSE))
    return float(found["baseline_step_s"] * (1 - found["attention_share"]))


def left_speedup() -> float:
    """Attention's speed-up per sequence between the published rates of Qwen3-8B, the rest of a step being ours."""
    before_s, after_s = (2 / 19.0 - _other_s()) / 2, (3 / 22.8 - _other_s()) / 3
    return before_s / after_s


def _at_left_speedup() -> FormatSizes:
    """GAAC with attention `left_speedup` times as fast as BF16's."""
    bits = 16 / left_speedup()
    return replace(packed(), encoded_bits=bits, raw_block_share=0.0, decode_int_ops_per_element=0.0)


def _gains() -> list[Check]:
    """What a fixed budget gains in aggregate: the dense model, and the two that gain little per step."""
    dense, dense_fewer = gain(DENSE, "w4a16", (2, 3)), gain(DENSE, "w4a16", (2, 3), packed(fewer=True))
    name = f"gain of 2 -> 3 sequences, {DENSE}"
    checks = [
        compared("gaac", name, GAAC, 1.20, 1 + dense, unit="x"),
        compared("gaac", f"{name}, {FEWER}", GAAC, 1.20, 1 + dense_fewer, unit="x"),
    ]
    left, unknown = left_speedup(), "published without budget, counts or checkpoints"
    for model, published in zip(HYBRIDS, (1.27, 1.29), strict=True):
        for weights, words in WEIGHTS.items():
            for pair, where in (((2, 3), ""), (_counts(model, weights), ", 20 GiB")):
                name = f"gain of {pair[0]} -> {pair[1]} sequences{where}, {model}, {words}"
                ours, at_left = (
                    gain(model, weights, pair, sizes) for sizes in (packed(), _at_left_speedup())
                )
                note = f"{percent(at_left)} at the {left:.2f}x that the dense rates leave; {unknown}"
                checks.append(compared("gaac", name, GAAC, published, 1 + ours, unit="x", note=note))
    return [*checks, *_orders(dense)]


def _orders(dense: float) -> list[Check]:
    """Whether the models that gain less per step gain more than the dense one here."""
    hybrid, experts = HYBRIDS
    pair = (2, 3)
    least = min(gain(hybrid, weights, pair) for weights in WEIGHTS)
    one = min(gain(experts, weights, (1, 2)) for weights in WEIGHTS)
    dense_one = gain(DENSE, "w4a16", (1, 2))
    plain, own = gain(experts, "w4a16", pair), gain(experts, "w4a16-mlp", pair)
    skewed = gain(experts, "w4a16-mlp", pair, skewed=True)
    both = ((experts, "w4a16-mlp"), (DENSE, "w4a16"))
    rest, dense_rest = (gain(model, weights, pair, rest=True) for model, weights in both)
    at_left, dense_left = (gain(model, weights, pair, _at_left_speedup()) for model, weights in both)
    return [
        holds(
            "gaac",
            f"2 -> 3 sequences: {hybrid}, which gains less per step, gains more",
            GAAC,
            "> dense",
            f"{percent(least)} against {percent(dense)}",
            least > dense,
            "the smaller of both readings of W4A16",
        ),
        holds(
            "gaac",
            f"1 -> 2 sequences: {experts}, which gains less per step, gains more",
            GAAC,
            "> dense",
            f"{percent(one)} against {percent(dense_one)}",
            one > dense_one,
            "the smaller of both readings of W4A16",
        ),
        printed(
            f"2 -> 3 sequences: {experts}, from bytes",
            "> dense",
            f"{'more' if plain > dense else 'NOT reproduced'}: {percent(plain)} against {percent(dense)}",
            f"{percent(own)} with Qwen's weights, {percent(skewed)} if experts are also as unequally popular as "
            "measured: level with the dense model; experts touched grow with the sequences",
        ),
        holds(
            "gaac",
            f"2 -> 3 sequences: {experts}, with Qwen's weights and what vLLM takes beyond our step",
            GAAC,
            "> dense",
            f"{percent(rest)} against {percent(dense_rest)}",
            rest > dense_rest,
            f"{rest_s() * 1e3:.1f} ms a step for both models, from a rate in BF16 that others measured",
        ),
        holds(
            "gaac",
            f"2 -> 3 sequences: {experts}, with Qwen's weights at the speed-up that the dense rates leave",
            GAAC,
            "> dense",
            f"{percent(at_left)} against {percent(dense_left)}",
            at_left > dense_left,
            "the dense gain is given then; a faster kernel lifts the dense model more than this one",
        ),
    ]


def gain(
    model: str,
    weights: str,
    counts: tuple[int, int],
    sizes: FormatSizes | None = None,
    *,
    skewed: bool = False,
    rest: bool = False,
) -> float:
    """Change of the aggregate from `counts[0]` BF16 sequences of 64K to `counts[1]` packed ones, of `sizes`.

    `skewed`: experts as unequally popular as measured; `rest`: with the time that an engine takes beyond our step.
    """
    rates = []
    for each, count in zip((format_sizes("bf16"), sizes or packed()), counts, strict=True):
        cost = spark(model, weights).cost(each)
        duration_s = (routed_step_s if skewed else step_s)(cost, count, CONTEXT)
        rates.append(count / (duration_s + (rest_s() if rest else 0.0)))
    return rates[1] / rates[0] - 1


def _counts(model: str, weights: str) -> tuple[int, int]:
    """Sequences of 64K that 20 GiB hold in BF16 and packed."""
    deployment = spark(model, weights, _BUDGET_BYTES)
    bf16, gaac_ = (
        _BUDGET_BYTES // bytes_of_sequence(deployment.budget(sizes), CONTEXT)
        for sizes in (format_sizes("bf16"), packed())
    )
    return bf16, gaac_
