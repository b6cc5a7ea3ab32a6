"""Public kernel times of one system (NVIDIA AIConfigurator's performance database) as a cost table of ours.

Three CSV files a system: `SYSTEM_*_generation_attention_hd128.csv` (decode, context = isl + step), `..._context_
attention_hd128.csv` (isl new tokens after `step` in the cache) and `..._gemm_bf16.csv` (m tokens, n x k weights).
Latencies in ms, one layer, heads per GPU.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from kvfold.sim.costs import CostTable, attend_tables, linear_table, prefill_table
from kvfold.sim.errors import ConfigError

DECODE, PREFILL, GEMM = "_generation_attention_hd128.csv", "_context_attention_hd128.csv", "_gemm_bf16.csv"
SYSTEMS = {"h200_sxm": "h200", "h100_sxm": "h100", "a100_sxm": "a100-80g"}
FORMATS = {"bfloat16": "bf16", "fp8": "fp8-e4m3"}


def find_file(folder: Path, system: str, ending: str) -> Path | None:
    """The system's file with this ending at or below a folder; of several versions the last by name."""
    found = sorted(folder.rglob(f"{system}_*{ending}"))
    return found[-1] if found else None


def perfdb_costs(
    folder: Path, system: str, q_heads: int, kv_heads: int, head_dim: int = 128
) -> CostTable | None:
    """Attention of one head shape and all GEMMs; None where a file is missing.

    The GEMM table lacks some shapes of some models (for Llama-3.1-8B n = 28,672, k = 14,336 and the LM head): a
    product is looked up by its weight bytes, between the measured ones linearly.
    """
    files = [find_file(folder, system, ending) for ending in (DECODE, PREFILL, GEMM)]
    if any(path is None for path in files):
        return None
    decode, context, gemm = (path for path in files if path is not None)
    attend: dict[tuple[str, int, int, int], dict[int, dict[int, tuple[float, str]]]] = {}
    for row in _rows(decode):
        if (int(row["num_heads"]), int(row["num_key_value_heads"])) == (q_heads, kv_heads):
            shape = (FORMATS[row["kv_cache_dtype"]], q_heads, kv_heads, head_dim)
            points = attend.setdefault(shape, {}).setdefault(int(row["batch_size"]), {})
            tokens = int(row["isl"]) + int(row["step"])
            points[tokens] = (1e3 * float(row["latency"]), row["kernel_source"])
    linear: dict[int, dict[int, float]] = {}
    for row in _rows(gemm):
        weight_bytes = 2 * int(row["n"]) * int(row["k"])
        points_us = linear.setdefault(int(row["m"]), {})
        time_us = 1e3 * float(row["latency"])
        points_us[weight_bytes] = min(time_us, points_us.get(weight_bytes, time_us))
    prefill = prefill_table({(q_heads, head_dim): _prefill(context, q_heads, kv_heads)})
    return CostTable(gemm.name, attend_tables(attend), {"bf16": linear_table(linear)}, prefill)


def _prefill(path: Path, q_heads: int, kv_heads: int) -> dict[tuple[int, int], float]:
    """(tokens, history) -> us; what the history adds is the time less that of the chunk alone."""
    whole: dict[tuple[int, int], float] = {}
    for row in _rows(path):
        wanted = (str(q_heads), str(kv_heads), "bfloat16", "1")
        keys = ("num_heads", "num_key_value_heads", "kv_cache_dtype", "batch_size")
        if tuple(row[key] for key in keys) == wanted:
            whole[int(row["isl"]), int(row["step"])] = 1e3 * float(row["latency"])
    points = {}
    for (tokens, history), time_us in whole.items():
        alone_us = whole.get((tokens, 0))
        if history == 0:
            points[tokens, 0] = time_us
        elif alone_us is not None and time_us > alone_us:
            points[tokens, history] = time_us - alone_us
    return points


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        for row in reader:
            try:
                if not 0 < float(row["latency"]) < float("inf"):
                    raise ValueError(f"latency must be above 0, got {row['latency']!r}")
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{path}:{reader.line_num}: not a row of kernel times: {error}") from None
            yield row
