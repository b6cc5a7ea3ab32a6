"""Generators with the figures of public traces.

Agents: WEKA / kv-cache-tester, 710 Claude Code sessions (github.com/callanjfox/kv-cache-tester, Apache-2.0).
Chat: Azure LLM inference trace 2023, conversation, 19,366 calls (CC BY 4.0). RAG: RAGPulse, 7,106 questions to a
university's service (github.com/flashserve/RAGPulse, MIT). Figures were measured on these files; a few, marked
so, are choices. The upper ends of the agents' tables are set so that the means are the recorded ones.
"""

from __future__ import annotations

from kvfold.traces.arrivals import Clients
from kvfold.traces.draws import Quantiles
from kvfold.traces.synth import HUMAN_WAIT_S, TOOL_WAIT_S
from kvfold.traces.synth_agent import Agents, Arrival, Start, Subagents
from kvfold.traces.synth_chat import Requests, Size
from kvfold.traces.synth_rag import Rag

_WEKA_FRESH = Start(
    share=0.737,
    first_tokens=Quantiles(
        (
            *((0, 6_343), (0.1, 13_929), (0.25, 17_682), (0.5, 20_181), (0.75, 38_694), (0.9, 71_469)),
            *((1, 108_100),),
        )
    ),
    calls=Quantiles(
        ((0, 3), (0.1, 12), (0.25, 26), (0.5, 64), (0.75, 116), (0.9, 196), (0.95, 234), (1, 514))
    ),
)
_WEKA_RESUMED = Start(
    share=0.263,
    first_tokens=Quantiles(
        ((0, 100_720), (0.25, 128_386), (0.5, 208_858), (0.75, 322_784), (0.9, 483_819), (1, 777_000))
    ),
    calls=Quantiles(((0, 3), (0.25, 6.5), (0.5, 19), (0.75, 37), (0.9, 56), (0.99, 121), (1, 152))),
)
_TOOL_TOKENS = Quantiles(
    (
        *((0, 0), (0.1, 0), (0.25, 47), (0.5, 292), (0.75, 991), (0.9, 2_913), (0.95, 5_539)),
        *((0.99, 15_597), (1, 38_100)),
    )
)
_HUMAN_TOKENS = Quantiles(
    (
        *((0, 0), (0.1, 4), (0.25, 53), (0.5, 191), (0.75, 653), (0.9, 2_015), (0.95, 4_296)),
        *((0.99, 13_268), (1, 45_000)),
    )
)
#: Text and tool results at once: mostly someone who comes back after long.
_MIXED_WAIT_S = Quantiles(
    ((0, 0), (0.1, 6), (0.25, 18), (0.5, 230), (0.75, 1_674), (0.9, 9_894), (0.95, 39_529), (1, 51_600))
)
_MIXED_TOKENS = Quantiles(
    ((0, 0), (0.25, 0), (0.5, 221), (0.75, 1_741), (0.9, 17_112), (0.95, 45_137), (1, 459_000))
)

AGENT = Agents(
    starts=(_WEKA_FRESH, _WEKA_RESUMED),
    system_tokens=15_034,  # tools P50 12,262 and system prompt P50 2,772
    output_tokens=Quantiles(
        (
            *((0, 1), (0.05, 89), (0.25, 137), (0.5, 216), (0.75, 426), (0.9, 898), (0.95, 1_554)),
            *((0.99, 3_686), (1, 4_870)),
        )
    ),
    first_steps=Quantiles(
        (
            *((0, 0), (0.15, 0), (0.25, 1), (0.4, 3), (0.5, 8), (0.6, 16), (0.75, 35), (0.9, 66)),
            *((0.99, 127), (1, 163)),
        )
    ),
    tool_steps=Quantiles(
        (
            *((0, 0), (0.45, 0), (0.5, 1), (0.6, 1), (0.75, 3), (0.85, 9), (0.9, 17), (0.95, 30)),
            *((0.99, 69), (1, 123)),
        )
    ),
    tool=Arrival("tool", 1.0, Quantiles(tuple(TOOL_WAIT_S)), _TOOL_TOKENS),
    returns=(
        Arrival("human", 0.907, Quantiles(tuple(HUMAN_WAIT_S)), _HUMAN_TOKENS),
        Arrival("mixed", 0.093, _MIXED_WAIT_S, _MIXED_TOKENS),
    ),
    limit_tokens=Quantiles(
        (
            *((0, 52_000), (0.05, 91_000), (0.1, 134_000), (0.25, 146_000), (0.5, 162_000), (0.65, 170_000)),
            *((0.7, 244_000), (0.75, 436_000), (1, 895_000)),
        )
    ),
    kept_share=Quantiles(
        ((0, 0.03), (0.1, 0.16), (0.25, 0.21), (0.5, 0.35), (0.75, 0.67), (0.9, 0.84), (1, 0.95))
    ),
    first_token_s=2.99,
    token_s=0.0152,
    subagents=Subagents(
        share=0.0015,
        calls=Quantiles(((0, 2), (0.25, 7), (0.5, 11), (0.75, 13), (0.9, 17), (1, 24))),
        wait_s=Quantiles(((0, 1), (0.1, 2), (0.25, 3), (0.5, 4), (0.75, 6), (0.9, 29), (0.95, 45), (1, 133))),
        system_tokens=8_512,
        task_tokens=Quantiles(
            ((0, 356), (0.25, 1_335), (0.5, 1_823), (0.75, 3_183), (0.9, 3_662), (1, 9_747))
        ),
    ),
)
#: A choice, since WEKA's sessions have no common clock: 20 users at work a third of an eight-hour day.
AGENT_STARTS = Clients(rate_per_s=1 / 60, active_share=0.33, memory_s=7_200.0)

_AZURE_INPUT = Quantiles(
    (
        *((0, 2), (0.01, 29), (0.025, 120), (0.05, 181), (0.1, 207), (0.15, 372), (0.25, 396)),
        *((0.35, 414), (0.4, 703), (0.45, 984), (0.5, 1_020), (0.6, 1_071), (0.7, 1_130)),
        *((0.75, 1_189), (0.8, 1_315), (0.85, 1_876), (0.9, 2_734.5), (0.925, 4_075), (0.95, 4_083)),
        *((0.98, 4_098), (0.99, 4_142), (0.995, 4_831), (0.999, 6_179), (1, 14_050)),
    )
)
_AZURE_OUTPUT = Quantiles(
    (
        *((0, 7), (0.01, 16), (0.025, 28), (0.05, 41), (0.1, 54), (0.2, 77), (0.3, 91), (0.4, 103)),
        *((0.45, 113), (0.5, 129), (0.55, 151), (0.6, 177), (0.65, 217), (0.7, 384), (0.8, 400)),
        *((0.9, 424), (0.95, 451), (0.965, 490), (0.98, 540), (0.99, 601), (0.999, 954), (1, 1_000)),
    )
)

CHAT = Requests((Size(1.0, _AZURE_INPUT, _AZURE_OUTPUT),))
#: Fitted to the file's dispersion in windows of 1 s and 60 s, 1.4 and 20.6; 20 clients are a choice.
CHAT_ARRIVALS = Clients(rate_per_s=5.53, active_share=0.63, memory_s=92.0)

RAG = Rag(
    fixed_tokens=512,
    changing_tokens=512,
    changes=0.37,
    own_tokens=437,
    own_new=0.77,
    retrieves=0.794,
    passages=6,
    passage_rank=Quantiles(((0, 1), (0.0756, 10), (0.345, 100), (0.837, 1_000), (0.993, 3_000), (1, 3_235))),
    passage_tokens=Quantiles(
        ((0, 3), (0.05, 118), (0.1, 141), (0.25, 191), (0.5, 266), (0.75, 318), (0.9, 345), (1, 512))
    ),
    searches=0.036,
    web_tokens=Quantiles(((0, 143), (0.5, 1_024), (1, 2_496))),
    history_tokens=Quantiles(
        (
            *((0, 10), (0.5, 11), (0.6, 121), (0.7, 256), (0.8, 441), (0.9, 820), (0.95, 1_292)),
            *((0.99, 2_149), (1, 4_628)),
        )
    ),
    question_tokens=Quantiles(((0, 1), (0.5, 6), (0.9, 12), (0.99, 28), (1, 178))),
    output_tokens=Quantiles(
        (
            *((0, 7), (0.05, 66), (0.25, 131), (0.5, 234), (0.75, 385), (0.9, 563), (0.95, 670)),
            *((0.99, 891), (0.995, 994), (0.999, 1_182), (1, 2_183)),
        )
    ),
)
#: The file's rate, one request in 85 s; burstiness within its days is not fitted.
RAG_ARRIVALS = Clients(rate_per_s=0.0118)
