"""`kvfold list`: what the names are that other commands take, and where each value behind them comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvfold.analysis import options

if TYPE_CHECKING:
    from collections.abc import Sequence

Topic = Literal["models", "gpus", "formats", "slos"]
TOPICS: tuple[Topic, ...] = ("models", "gpus", "formats", "slos")


def list_(
    topic: Annotated[Topic | None, typer.Argument(help="What to list; all four when left out.")] = None,
    as_json: options.Json = False,
) -> None:
    """List the presets: models, GPUs, KV formats and SLOs, a line each."""
    from kvfold.analysis.out import emit_json

    found = {"models": _models, "gpus": _gpus, "formats": _formats, "slos": _slos}
    printers = {"models": _print_models, "gpus": _print_gpus, "formats": _print_formats, "slos": _print_slos}
    chosen = TOPICS if topic is None else (topic,)
    if as_json:
        emit_json({name: found[name]() for name in chosen})
        return
    for name in chosen:
        printers[name](found[name]())


def _models() -> list[dict[str, Any]]:
    from kvfold.sim.memory import BF16_BYTES
    from kvfold.sim.model import load_model, preset_names

    rows = []
    for name in preset_names():
        model = load_model(name)
        window = BF16_BYTES * model.window_kv_elements_per_token() * model.window_tokens
        rows.append(
            {
                "name": name,
                "total_params": model.total_params,
                "active_params": model.active_params,
                "full_layers": model.full_layers,
                "sliding_layers": model.sliding_layers,
                "linear_layers": model.linear_layers,
                "mla_layers": model.mla_layers,
                "kv_bytes_per_token": model.kv_bytes_per_token(),
                "kv_bytes_per_sequence": model.state_bytes_per_sequence() + window,
                "native_context_tokens": model.native_context_tokens,
                "max_context_tokens": model.max_context_tokens,
                "source": model.source,
                "verified": model.verified,
            }
        )
    return rows


def _print_models(models: list[dict[str, Any]]) -> None:
    from kvfold.analysis.out import human_bytes, print_table, say

    print_table(
        "Models",
        ("name", "params", "active", "KV/token", "KV/sequence", "context"),
        [
            (
                row["name"],
                f"{row['total_params'] / 1e9:.1f}B",
                f"{row['active_params'] / 1e9:.1f}B",
                human_bytes(row["kv_bytes_per_token"]),
                human_bytes(row["kv_bytes_per_sequence"]) if row["kv_bytes_per_sequence"] else "-",
                f"{row['max_context_tokens']:,}",
            )
            for row in models
        ],
    )
    say(
        "params and active count embeddings and LM head, without norms, biases and layers for multi-token "
        "prediction. KV is BF16; per sequence: recurrent state (FP32) and full sliding windows. All modelled from "
        "the fields of configuration files; --json has each model's source. Other models: --model PATH of a "
        "Hugging Face config.json."
    )


def _gpus() -> list[dict[str, Any]]:
    from dataclasses import asdict

    from kvfold.sim.gpu import load_gpu, preset_names

    rows = []
    for name in preset_names():
        gpu = load_gpu(name)
        rows.append(asdict(gpu) | {"int_ops_per_bf16_element": gpu.int_ops_per_bf16_element})
    return rows


def _print_gpus(gpus: list[dict[str, Any]]) -> None:
    from kvfold.analysis.out import print_table, say
    from kvfold.sim.gpu import EFFICIENCY, FIGURES, PRESETS_FILE

    lanes = ("sm_count", "int_lanes_per_sm", "clock_hz")

    def cell(row: dict[str, Any], key: str, unit: float, digits: int, made_of: Sequence[str] = ()) -> str:
        if row[key] is None:
            return "?"
        unchecked = {key, *made_of} & {*row["unchecked"]}
        return f"{row[key] / unit:.{digits}f}" + ("?" if unchecked else "")

    print_table(
        "GPUs",
        ("name", "GiB", "TB/s", "TFLOP/s", "W", "link GB/s", "int ops"),
        [
            (
                row["name"],
                cell(row, "memory_bytes", 2**30, 1),
                cell(row, "bandwidth_bytes_per_s", 1e12, 3),
                cell(row, "bf16_flops_per_s", 1e12, 0),
                cell(row, "power_limit_w", 1, 0),
                cell(row, "link_bytes_per_s", 1e9, 0),
                cell(row, "int_ops_per_bf16_element", 1, 0, lanes),
            )
            for row in gpus
        ],
    )
    say(
        "?: unknown, or derived and not checked. TFLOP/s: dense BF16. int ops: integer operations that fit into "
        "the time to read one BF16 element, modelled at full clock; a format that takes more to decode is bound "
        f"by that. Efficiency {EFFICIENCY:g} of bandwidth and of FLOP/s for all of them, modelled."
    )
    for row in gpus:
        shared = ["memory shared with the CPU"] if row["shared_memory"] else []
        texts = [text if key == "all" else f"{key} {text}" for key, text in row["sources"].items()]
        say(f"{row['name']}: {'; '.join(texts + shared)}")
    say(
        "Add one: --gpu FILE.toml with these fields, of which the first two must be there: "
        f"{', '.join(FIGURES)}, shared_memory, unchecked, sources. Examples:"
    )
    print(f"  {PRESETS_FILE}")


def _formats() -> list[dict[str, Any]]:
    from dataclasses import asdict

    from kvfold.codec.sizes import load_sizes

    return [
        asdict(sizes) | {"resident_bits": sizes.resident_bits, "resident_saving": sizes.resident_saving}
        for sizes in load_sizes().values()
    ]


def _print_formats(formats: list[dict[str, Any]]) -> None:
    from kvfold.analysis.out import print_table, say

    print_table(
        "KV formats",
        ("name", "block", "encoded", "resident", "saving", "raw", "int ops", "origin"),
        [
            (
                row["name"],
                str(row["block_tokens"]),
                f"{row['encoded_bits']:.3f}",
                f"{row['resident_bits']:.3f}",
                f"{row['resident_saving']:.1%}",
                f"{row['raw_block_share']:.1%}",
                f"{row['decode_int_ops_per_element']:g}",
                row["origin"],
            )
            for row in formats
        ],
    )
    say(
        "block: tokens packed at once. encoded, resident: bits per element; resident counts slots, the block "
        "table and the share of blocks that stay raw. int ops: to decode one element, modelled."
    )
    for row in formats:
        say(f"{row['name']}: {row['source']}")


def _slos() -> list[dict[str, Any]]:
    from dataclasses import asdict

    from kvfold.analysis.slo import PRESETS, describe

    return [asdict(slo) | {"limits": describe(slo)} for slo in PRESETS.values()]


def _print_slos(slos: list[dict[str, Any]]) -> None:
    from kvfold.analysis.out import print_table, say

    print_table("SLOs", ("name", "limits"), [(row["name"], row["limits"]) for row in slos])
    say(
        "A request is good when it meets all its limits. chat and interactive are those of MLPerf Inference for "
        "llama3.1-8b, published; agent is ours. Own limits: --slo ttft=2s,tpot=100ms."
    )
