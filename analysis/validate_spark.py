"""Other people's measurements on a DGX Spark: the step of a mixture of experts, and how its experts are shared.

They tell what our step leaves out and how far uniform routing is from real one, apart from the GAAC preprint.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvfold.analysis.deployment import deploy, format_sizes
from kvfold.analysis.steptable import step_s
from kvfold.analysis.validate import Check, compared
from kvfold.sim.step import expected_experts

if TYPE_CHECKING:
    from kvfold.sim.step import StepCost

MODEL = "qwen3.5-35b-a3b"
BF16_RUN = "adadrag/qwen3.5-dgx-spark, vLLM, 25 February 2026"
INT4_RUN = "yunusshin/DGX_Spark_Qwen3.5-35B-A3B-Optimized, vLLM, April 2026, as oc013/llabench lists it"
#: Tokens per second of one user in BF16, over an output of 3,831 tokens after a prompt of 32.
BF16_TOK_S, BF16_CONTEXT = 31.6, 32 + 3831 // 2
#: The same with Intel's AutoRound int4 weights (shared experts in BF16), 512 tokens in and 256 out.
INT4_TOK_S, INT4_CONTEXT = 64.1, 512 + 256 // 2
#: Share of a layer's experts that take 90 % of the routed tokens, Qwen3-30B-A3B over prose, code and mathematics
#: (mcp-tool-shop-org/gpu-container, routing de-risk: 65 of 128; 1 - normalized entropy 0.111).
COVERING, COVERED = 65 / 128, 0.90


def popularity(experts: int) -> list[float]:
    """Shares of the routed tokens, falling exponentially so that COVERING of the experts take COVERED of them.

    An assumption of form with one measured figure; the measured entropy and largest share were not used for it.
    """
    low, high = 1e-6, 100.0
    for _ in range(200):
        middle = (low + high) / 2
        covered = math.expm1(-middle * COVERING) / math.expm1(-middle)
        low, high = (middle, high) if covered < COVERED else (low, middle)
    weights = [math.exp(-low * rank / experts) for rank in range(experts)]
    total = sum(weights)
    return [weight / total for weight in weights]


def routed_step_s(cost: StepCost, sequences: int, context_tokens: int) -> float:
    """The decode step with experts as unequally popular as `popularity` says; uniform routing is the default."""
    model = cost.model
    uniform_s = step_s(cost, sequences, context_tokens)
    if not model.moe_layers:
        return uniform_s
    window_tokens = min(context_tokens, model.window_tokens)
    terms = cost.terms(sequences, sequences * context_tokens, sequences * window_tokens)
    experts_s = next(term.s for term in terms if term.name == "experts")
    counts = (model.experts, model.experts_per_token, sequences)
    share = expected_experts(*counts, popularity(model.experts)) / expected_experts(*counts)
    return uniform_s - experts_s * (1 - share)


def rest_s() -> float:
    """What a step of vLLM takes beyond ours, from the rate of one user in BF16."""
    cost = deploy(MODEL, "dgx-spark").cost(format_sizes("bf16"))
    return 1 / BF16_TOK_S - step_s(cost, 1, BF16_CONTEXT)


def spark_checks() -> list[Check]:
    """One user, in BF16 and in int4: measured rates beside ours."""
    bf16 = deploy(MODEL, "dgx-spark").cost(format_sizes("bf16"))
    int4 = deploy(MODEL, "dgx-spark", weights="w4a16").cost(format_sizes("bf16"))
    int4_s = step_s(int4, 1, INT4_CONTEXT)
    return [
        compared(
            "gaac",
            f"{MODEL} in BF16, one user",
            BF16_RUN,
            BF16_TOK_S,
            1 / step_s(bf16, 1, BF16_CONTEXT),
            unit="tok/s",
            note=f"{rest_s() * 1e3:.1f} ms of a step are not in our model",
        ),
        compared(
            "gaac",
            f"{MODEL} in int4, one user",
            INT4_RUN,
            INT4_TOK_S,
            1 / int4_s,
            unit="tok/s",
            note=f"{(1 / INT4_TOK_S - int4_s) * 1e3:.1f} ms of a step are not in our model (shared experts: BF16)",
        ),
    ]
