"""From device memory to KV: what is left for the pool, and how many sequences of a length live in it.

All figures are per GPU of a tensor-parallel group. A format changes what a token costs, never the budget.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING

from kvfold.sim.errors import ConfigError, DoesNotFitError
from kvfold.sim.model import BF16_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvfold.codec.sizes import FormatSizes
    from kvfold.sim.gpu import GpuSpec
    from kvfold.sim.model import ModelSpec

GIB = 2**30
PAGE_TOKENS = 16
#: vLLM's memory profile ends with a sampler run over FP32 logits [max_num_seqs, vocab] (vllm#13594), and in the
#: published logs of three models on an H100 (1,024 sequences) that peak is 38.5 to 39.6 bytes per logit:
#: Qwen3-32B 5.64 GiB, Llama-3.3-70B on two GPUs 4.84, gpt-oss-20b 7.38. It does not depend on the context.
ACTIVATION_BYTES_PER_LOGIT = 39
#: Sequences that an engine plans for, its batch cap; vLLM's default is 256, and 1,024 on H100 and H200.
MAX_NUM_SEQS = 256
#: The largest CUDA-graph memory in the published H100 logs (-0.88 to +1.03 GiB).
CUDA_GRAPH_BYTES = round(1.03 * GIB)
#: vLLM subtracts an estimate of the graphs from this version on.
FIRST_VERSION_WITH_GRAPHS = (0, 21)
ENGINE_VERSION = "0.24"
#: Memory outside PyTorch in the same logs: one GPU, and two GPUs (collectives' buffers).
NON_TORCH_BYTES_ALONE = round(0.13 * GIB)
NON_TORCH_BYTES_GROUP = round(0.55 * GIB)


@dataclass(frozen=True, slots=True)
class WaterfallRow:
    """A part of device memory. The first row is the whole, the rest add up to it; only `unassigned` may be < 0."""

    name: str
    bytes: int
    origin: str
    rule: str


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The KV pool of one GPU, and what one sequence takes of it."""

    kv_budget_bytes: int
    kv_budget_origin: str
    weights_bytes: int
    rows: tuple[WaterfallRow, ...]
    packed: bool  # tokens wait in a raw tail until a codec block is full
    unit_tokens: int  # a page, or a codec block
    unit_bytes: int  # resident bytes of a full unit, all layers that grow: slots, table, blocks kept raw
    tail_bytes: int  # per live sequence: one codec block of raw BF16 (packed formats only)
    sequence_bytes: int  # per live sequence: recurrent state (FP32), and full sliding windows, kept in BF16
    num_units: int  # units that the budget holds


def kv_pool_bytes(memory_bytes: int, gpu_memory_utilization: float, claims_bytes: Iterable[int]) -> int:
    """What an engine leaves for KV: utilization * memory - weights - activation peak - CUDA graphs - non-torch.

    The one place with this formula. Negative where the claims do not fit.
    """
    return int(Fraction(gpu_memory_utilization) * memory_bytes) - sum(claims_bytes)


def kv_budget(
    model: ModelSpec,
    gpu: GpuSpec,
    sizes: FormatSizes,
    *,
    weights: str = "bf16",
    tp: int = 1,
    gpu_memory_utilization: float = 0.9,
    kv_budget_bytes: int | None = None,
    num_gpu_blocks: int | None = None,
    page_tokens: int = PAGE_TOKENS,
    max_num_seqs: int = MAX_NUM_SEQS,
    engine_version: str = ENGINE_VERSION,
    expert_ranks: int = 1,
) -> MemoryBudget:
    """The KV pool: `kv_budget_bytes` beats `num_gpu_blocks` (16-token BF16 pages) beats the memory waterfall.

    `expert_ranks`: data-parallel ranks that the experts are spread over, each with its share of them.

    Raises ConfigError for values out of range, and DoesNotFitError where the weights, or one unit of KV and what
    a sequence holds besides, do not fit.
    """
    if not 0 < gpu_memory_utilization <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization must be above 0 and at most 1, got {gpu_memory_utilization}"
        )
    for option, value in (
        ("--kv-budget", kv_budget_bytes),
        ("--num-gpu-blocks", num_gpu_blocks),
        ("--max-num-seqs", max_num_seqs),
        ("page_tokens", page_tokens),
        ("expert_ranks", expert_ranks),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{option} must be at least 1, got {value}")

    parts = model.weights_bytes(weights, tp)
    weights_bytes = parts.total - parts.experts + -(-parts.experts // expert_ranks)
    claims = _claims(model, weights, weights_bytes, tp, max_num_seqs, engine_version)
    left_bytes = kv_pool_bytes(gpu.memory_bytes, gpu_memory_utilization, (row.bytes for row in claims))
    if kv_budget_bytes is not None:
        pool = WaterfallRow("KV pool", kv_budget_bytes, "given", "--kv-budget")
    elif num_gpu_blocks is not None:
        pool_bytes = num_gpu_blocks * PAGE_TOKENS * model.kv_bytes_per_token(tp=tp)
        pool = WaterfallRow("KV pool", pool_bytes, "given", f"--num-gpu-blocks {num_gpu_blocks}")
    else:
        pool = WaterfallRow("KV pool", left_bytes, "modelled", "left by the memory waterfall")
    if pool.bytes <= 0 or weights_bytes + pool.bytes > gpu.memory_bytes:
        asked = f"no room for a KV pool of {_gib(pool.bytes)}" if pool.bytes > 0 else "no room for KV"
        raise DoesNotFitError(
            f"{model.name} in {weights} at --tp {tp} has {_gib(weights_bytes)} of weights per GPU, which leaves "
            f"{_gib(left_bytes)} of {gpu.name}'s {_gib(gpu.memory_bytes)} at utilization "
            f"{gpu_memory_utilization:g}: {asked}; take smaller weights, a higher --tp, a larger GPU or less KV"
        )

    free_bytes = gpu.memory_bytes - kv_pool_bytes(gpu.memory_bytes, gpu_memory_utilization, ())
    origin, _, rule = gpu.source("memory_bytes").partition(": ")
    rows = [
        WaterfallRow("device memory", gpu.memory_bytes, origin, rule),
        WaterfallRow("kept free", free_bytes, "given", f"utilization {gpu_memory_utilization:g}"),
        *claims,
        pool,
    ]
    if pool.bytes != left_bytes:
        rest_bytes = left_bytes - pool.bytes
        rule = "left over" if rest_bytes > 0 else "the pool given is larger than what the rows above leave"
        rows.append(WaterfallRow("unassigned", rest_bytes, "modelled", rule))
    return _cut_into_units(model, sizes, tp, page_tokens, pool, weights_bytes, tuple(rows))


def bytes_of_sequence(budget: MemoryBudget, context_tokens: int) -> int:
    """Pool bytes of one sequence of `context_tokens` tokens: whole units, raw tail, state and windows.

    Units are pages begun, or codec blocks filled (the rest of a packed sequence is in its raw tail).
    """
    units = (
        context_tokens // budget.unit_tokens if budget.packed else -(-context_tokens // budget.unit_tokens)
    )
    return units * budget.unit_bytes + budget.tail_bytes + budget.sequence_bytes


def max_sequences(budget: MemoryBudget, context_tokens: int) -> int:
    """How many sequences of `context_tokens` tokens live in the pool together; 0 if not even one does."""
    return budget.kv_budget_bytes // bytes_of_sequence(budget, context_tokens)


def output_tokens_left(budget: MemoryBudget, context_tokens: int, sequences: int) -> int:
    """Tokens that each of `sequences` sequences of `context_tokens` can still grow, all by the same number.

    The inverse of `max_sequences`. Raises DoesNotFitError where they do not fit to begin with.
    """
    if sequences < 1 or sequences > max_sequences(budget, context_tokens):
        raise DoesNotFitError(
            f"{sequences} sequences of {context_tokens} tokens do not fit the KV pool of {budget.kv_budget_bytes} "
            f"bytes, one takes {bytes_of_sequence(budget, context_tokens)}; take fewer or raise --kv-budget"
        )
    share_bytes = budget.kv_budget_bytes // sequences - budget.tail_bytes - budget.sequence_bytes
    tail_tokens = budget.unit_tokens - 1 if budget.packed else 0
    return share_bytes // budget.unit_bytes * budget.unit_tokens + tail_tokens - context_tokens


def _claims(
    model: ModelSpec, weights: str, weights_bytes: int, tp: int, max_num_seqs: int, engine_version: str
) -> list[WaterfallRow]:
    """What an engine takes before it gives the rest to KV."""
    activation_bytes = ACTIVATION_BYTES_PER_LOGIT * max_num_seqs * model.vocab
    with_graphs = _version(engine_version) >= FIRST_VERSION_WITH_GRAPHS
    graph_rule = f"vLLM {engine_version} {'subtracts' if with_graphs else 'does not subtract'} an estimate"
    return [
        WaterfallRow("weights", weights_bytes, "modelled", f"parameters in {weights}, split over {tp}"),
        WaterfallRow(
            "activation peak",
            activation_bytes,
            "modelled",
            f"{ACTIVATION_BYTES_PER_LOGIT} B x {max_num_seqs} sequences x {model.vocab} logits",
        ),
        WaterfallRow("CUDA graphs", CUDA_GRAPH_BYTES if with_graphs else 0, "published", graph_rule),
        WaterfallRow(
            "non-torch",
            NON_TORCH_BYTES_ALONE if tp == 1 else NON_TORCH_BYTES_GROUP,
            "published" if tp <= 2 else "extrapolated",
            f"H100 logs, {'one GPU' if tp == 1 else 'two GPUs'}",
        ),
    ]


def _cut_into_units(
    model: ModelSpec,
    sizes: FormatSizes,
    tp: int,
    page_tokens: int,
    pool: WaterfallRow,
    weights_bytes: int,
    rows: tuple[WaterfallRow, ...],
) -> MemoryBudget:
    """What the pool's bytes mean for one format.

    Sliding windows are charged in full and in BF16 whatever the format: a packed block is written once and never
    again, while a window keeps dropping its oldest tokens.
    """
    packed = sizes.packed
    unit_tokens = sizes.block_tokens if packed else page_tokens
    growing_bytes = ceil(Fraction(sizes.resident_bits) * model.kv_elements_per_token(tp) * unit_tokens / 8)
    unit_bytes = max(1, growing_bytes)  # a model with windows only has nothing that grows; 0 would divide
    tail_bytes = unit_tokens * model.kv_bytes_per_token(tp=tp) if packed else 0
    window_bytes = BF16_BYTES * model.window_kv_elements_per_token(tp) * model.window_tokens
    sequence_bytes = model.state_bytes_per_sequence(tp) + window_bytes
    if unit_bytes + tail_bytes + sequence_bytes > pool.bytes:
        one_bytes = unit_bytes + tail_bytes + sequence_bytes
        raise DoesNotFitError(
            f"one sequence of {unit_tokens} tokens of {model.name} takes {one_bytes} bytes per GPU, "
            f"and the KV pool has {pool.bytes} ({pool.origin}: {pool.rule}); raise --kv-budget"
        )
    return MemoryBudget(
        kv_budget_bytes=pool.bytes,
        kv_budget_origin=f"{pool.origin}: {pool.rule}",
        weights_bytes=weights_bytes,
        rows=rows,
        packed=packed,
        unit_tokens=unit_tokens,
        unit_bytes=unit_bytes,
        tail_bytes=tail_bytes,
        sequence_bytes=sequence_bytes,
        num_units=pool.bytes // unit_bytes,
    )


def _version(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(\.\d+)+", text):
        raise ConfigError(f"--engine-version must be a vLLM version such as {ENGINE_VERSION}, got {text!r}")
    return tuple(int(part) for part in text.split("."))


def _gib(count_bytes: int) -> str:
    return f"{count_bytes / GIB:,.2f} GiB"
