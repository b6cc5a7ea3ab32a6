"""`kvfold mem`: where the memory of a GPU goes, and how many sequences live in what is left for KV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.analysis import options

if TYPE_CHECKING:
    from kvfold.codec.sizes import FormatSizes
    from kvfold.sim.memory import MemoryBudget
    from kvfold.sim.model import ModelSpec

#: Tokens per sequence where --context does not say.
DEFAULT_CONTEXT_TOKENS = 8192
#: What a live sequence holds besides its blocks, by JSON key.
CONSTANTS = {
    "tail_bytes": "raw BF16 tail",
    "state_bytes": "recurrent state, FP32",
    "window_bytes": "sliding windows, BF16",
}


def mem(
    model: options.Model,
    gpu: options.Gpu,
    format_name: options.Format = "bf16",
    tp: options.Tp = 1,
    weights: options.Weights = "bf16",
    context: options.Context = None,
    max_context: options.MaxContext = None,
    kv_budget: options.KvBudget = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    num_gpu_blocks: options.NumGpuBlocks = None,
    max_num_seqs: options.MaxNumSeqs = 256,
    engine_version: Annotated[str, typer.Option(help="vLLM version whose accounting to follow.")] = "0.24",
    strict_costs: Annotated[
        bool, typer.Option("--strict-costs", help="Refuse a modelled KV pool: one must be given.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Memory waterfall, KV bytes, and sequences that fit together.

    Per GPU of a tensor-parallel group.

    --kv-budget beats --num-gpu-blocks beats the waterfall; a sequence has 8,192 tokens where --context does not
    say. Exits 4 when not even one sequence fits.
    """
    from dataclasses import replace

    from kvfold.analysis.deployment import format_sizes
    from kvfold.analysis.out import emit_json
    from kvfold.sim.errors import ConfigError, DoesNotFitError
    from kvfold.sim.gpu import load_gpu
    from kvfold.sim.memory import bytes_of_sequence
    from kvfold.sim.memory import kv_budget as budget_of
    from kvfold.sim.model import load_model

    spec, device = load_model(model), load_gpu(gpu)
    if max_context:
        spec = replace(spec, max_context_tokens=max_context)
    context_tokens = context or min(DEFAULT_CONTEXT_TOKENS, spec.max_context_tokens)
    if strict_costs and kv_budget is None and num_gpu_blocks is None:
        raise ConfigError(
            "--strict-costs needs --kv-budget or --num-gpu-blocks: the memory waterfall is modelled"
        )

    def budget(sizes: FormatSizes) -> MemoryBudget:
        return budget_of(
            spec,
            device,
            sizes,
            weights=weights,
            tp=tp,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_budget_bytes=kv_budget,
            num_gpu_blocks=num_gpu_blocks,
            max_num_seqs=max_num_seqs,
            engine_version=engine_version,
        )

    sizes = format_sizes(format_name)
    pool = budget(sizes)
    found = {
        "model": spec.name,
        "gpu": device.name,
        "weights": weights,
        "tp": tp,
        **_findings(spec, sizes, pool, context_tokens, tp),
        "baseline": _capacity(budget(format_sizes("bf16")), context_tokens),
    }
    if as_json:
        emit_json(found)
    else:
        _print(found)
    if not found["max_sequences"]:
        raise DoesNotFitError(
            f"one sequence of {context_tokens} tokens takes {bytes_of_sequence(pool, context_tokens)} bytes per "
            f"GPU, and the KV pool has {pool.kv_budget_bytes}; raise --kv-budget or --tp, or lower --context"
        )


def _capacity(budget: MemoryBudget, context_tokens: int) -> dict[str, int | None]:
    """How many sequences fit, and by how many tokens each can still grow when that many live."""
    from kvfold.sim.memory import max_sequences, output_tokens_left

    sequences = max_sequences(budget, context_tokens)
    left = output_tokens_left(budget, context_tokens, sequences) if sequences else None
    return {"max_sequences": sequences, "output_tokens_left": left}


def _findings(
    model: ModelSpec, sizes: FormatSizes, budget: MemoryBudget, context_tokens: int, tp: int
) -> dict[str, Any]:
    from dataclasses import asdict
    from math import ceil

    from kvfold.sim.memory import bytes_of_sequence, output_tokens_left

    minimum, reserved = model.kv_bytes_bounds(context_tokens, tp)
    per_gpu = {
        "weights_bytes": budget.weights_bytes,
        "kv_budget_bytes": budget.kv_budget_bytes,
        "kv_bytes_per_token": ceil(budget.unit_bytes / budget.unit_tokens),
        "kv_bytes_per_sequence": budget.tail_bytes + budget.sequence_bytes,
        "bytes_of_sequence": bytes_of_sequence(budget, context_tokens),
    }
    warnings = []
    if context_tokens > model.max_context_tokens:
        warnings.append(
            f"{context_tokens:,} tokens exceed the {model.max_context_tokens:,} that {model.name} takes at most"
        )
    elif context_tokens > model.native_context_tokens:
        warnings.append(f"beyond the native {model.native_context_tokens:,} tokens the model needs YaRN")
    return {
        **per_gpu,
        **{f"{name}_total": tp * value for name, value in per_gpu.items()},
        **_capacity(budget, context_tokens),
        "format": sizes.name,
        "format_origin": sizes.origin,
        "format_source": sizes.source,
        "context_tokens": context_tokens,
        "kv_budget_origin": budget.kv_budget_origin,
        "longest_sequence_tokens": 1 + output_tokens_left(budget, 1, 1),
        "num_blocks": budget.num_units,
        "block_tokens": budget.unit_tokens,
        "block_bytes": budget.unit_bytes,
        "tail_bytes": budget.tail_bytes,
        "state_bytes": model.state_bytes_per_sequence(tp),
        "window_bytes": budget.sequence_bytes - model.state_bytes_per_sequence(tp),
        "bf16_bytes_min": minimum,
        "bf16_bytes_reserved": reserved,
        "waterfall": [asdict(row) for row in budget.rows],
        "warnings": warnings,
    }


def _print(found: dict[str, Any]) -> None:
    from kvfold.analysis.out import human_bytes, print_table, say

    tp, tokens, name = found["tp"], f"{found['context_tokens']:,}", found["format"]
    print_table(
        f"Memory of one GPU: {found['model']} on {found['gpu']}",
        ("part", "size", "origin"),
        [(f"{r['name']}: {r['rule']}", human_bytes(r["bytes"]), r["origin"]) for r in found["waterfall"]],
    )
    pool_origin = found["kv_budget_origin"].split(":")[0]
    rows = (
        ("weights", "weights_bytes", "modelled"),
        ("KV pool", "kv_budget_bytes", pool_origin),
        ("KV per token of context", "kv_bytes_per_token", found["format_origin"]),
        ("constant per sequence", "kv_bytes_per_sequence", "modelled"),
        (f"a sequence of {tokens} tokens", "bytes_of_sequence", found["format_origin"]),
    )
    print_table(
        f"KV cache in {name}",
        ("", "per GPU", *([f"{tp} GPUs"] if tp > 1 else []), "origin"),
        [
            (
                label,
                human_bytes(found[key]),
                *([human_bytes(found[f"{key}_total"])] if tp > 1 else []),
                origin,
            )
            for label, key, origin in rows
        ],
    )
    blocks = f"{found['num_blocks']:,} blocks of {found['block_tokens']} tokens"
    print(f"pool: {blocks}; one sequence alone may have {found['longest_sequence_tokens']:,} tokens")
    for key, what in CONSTANTS.items():
        if found[key]:
            print(f"constant per sequence: {what}, {human_bytes(found[key])}")
    if found["window_bytes"]:
        print(
            f"a sequence in BF16: min {human_bytes(found['bf16_bytes_min'])}, sliding layers keep their window"
        )
        print(
            f"  (charged here); reserved {human_bytes(found['bf16_bytes_reserved'])}, all layers keep all tokens"
        )
    if name != "bf16":
        source = f"sizes of {name} ({found['format_origin']}): {found['format_source']}"
        say(source)
    for warning in found["warnings"]:
        print(f"note: {warning}")
    print(f"{name}: {_sentence(found, tokens)}")
    if name != "bf16":
        print(f"bf16: {_sentence(found['baseline'], tokens)}")


def _sentence(capacity: dict[str, int | None], tokens: str) -> str:
    sequences, left = capacity["max_sequences"], capacity["output_tokens_left"]
    if not sequences:
        return f"no sequence of {tokens} tokens fits"
    plural = "s" if sequences > 1 else ""
    return f"{sequences:,} sequence{plural} of {tokens} tokens, room for {left:,} more tokens each"
