"""A recorded run of a real engine, as LLMServingSim's bench writes it: a folder of four files.

`requests.jsonl` has two clocks: `arrival_time` is wall time, the others are the engine's. The engine takes a
request in between two steps, so the smallest `queued_ts - arrival_time` is the distance of the clocks plus the
shortest way through the front end; it is taken as the distance.
"""

from __future__ import annotations

import csv
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvfold.sim.errors import ConfigError
from kvfold.traces.decode import SomeTokens, decode_json
from kvfold.traces.table import Floats, Ints

FILES = ("requests.jsonl", "meta.json", "cluster_config.json")
#: vLLM schedules a step ahead by default from this version on (vllm PR#27614, v0.14.0).
FIRST_ASYNC_VERSION = (0, 14)
#: Columns that a log needs to be drawn: moments, and sequences that ran and waited then.
LOGGED = {"t", "running", "waiting"}
#: The largest step that vLLM captures CUDA graphs for: twice the batch cap, and no more than this.
LARGEST_GRAPH = 512


class Request(msgspec.Struct):
    """One row; times in seconds of two clocks."""

    input_toks: SomeTokens
    output_toks: SomeTokens
    arrival_time: float
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float


@dataclass(frozen=True, slots=True)
class EngineRun:
    """Requests in order of arrival, times in seconds from the first arrival; and the engine's settings.

    `num_gpu_blocks` is None where the engine's own count was not recorded; it is the sum over data-parallel ranks
    (vLLM adds up what its engines report). `log`: one row a second, the ranks' together.
    """

    name: str
    folder: Path
    model: str
    hardware: str
    tp: int
    data_parallel: int
    expert_parallel: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    block_size: int
    num_gpu_blocks: int | None
    gpu_memory_utilization: float
    prefix_caching: bool
    async_scheduling: bool
    vllm_version: str
    graph_sizes: tuple[int, ...]
    link_bytes_per_s: float | None
    link_latency_s: float | None
    dataset_hash: str
    arrival_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    log: dict[str, Floats]
    published: dict[tuple[str, str], float]  # (metric, statistic) -> relative error of its own simulator


def find_runs(folder: Path) -> list[Path]:
    """Folders of recorded runs at or below a folder, by name."""
    return sorted(
        path.parent for path in folder.rglob(FILES[0]) if all((path.parent / f).is_file() for f in FILES)
    )


def load_run(folder: Path) -> EngineRun:
    """Raises BadTraceError for a bad row, ConfigError for settings that are missing or not of this form."""
    requests = _requests(folder / FILES[0])
    meta, cluster = _object(folder / FILES[1]), _object(folder / FILES[2])
    try:
        settings = meta["engine_kwargs"]
        instances = [each for node in cluster["nodes"] for each in node["instances"]]
        memory = instances[0].get("npu_mem", {})
        kv = meta.get("kv_cache") or {}
        resolved = meta.get("resolved_config") or {}
        version = str(meta["vllm_version"])
        max_num_seqs = int(settings["max_num_seqs"])
        scheduler = resolved.get("scheduler_config", {})
        graphs = resolved.get("compilation_config", {}).get("cudagraph_capture_sizes")
        bandwidths, latencies = _numbers(cluster, "link_bw"), _numbers(cluster, "link_latency")
        clock_s = min(each.queued_ts - each.arrival_time for each in requests)
        start_s = requests[0].arrival_time + clock_s
        return EngineRun(
            name=folder.name,
            folder=folder,
            model=str(meta["model"]),
            hardware=str(instances[0]["hardware"]),
            tp=int(settings.get("tensor_parallel_size", 1)),
            data_parallel=int(settings.get("data_parallel_size", 1)),
            expert_parallel=bool(settings.get("enable_expert_parallel", False)),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=int(settings["max_num_batched_tokens"]),
            max_model_len=settings.get("max_model_len"),
            block_size=int(kv.get("block_size") or 16),
            num_gpu_blocks=kv.get("num_gpu_blocks"),
            gpu_memory_utilization=float(kv.get("gpu_memory_utilization") or memory.get("mem_util") or 0.9),
            prefix_caching=bool(kv.get("enable_prefix_caching", True)),
            async_scheduling=bool(
                scheduler.get("async_scheduling", _version(version) >= FIRST_ASYNC_VERSION)
            ),
            vllm_version=version,
            graph_sizes=tuple(graphs) if graphs else _graph_sizes(max_num_seqs),
            link_bytes_per_s=1e9 * min(bandwidths) if bandwidths else None,
            link_latency_s=max(latencies) / 1e9 if latencies else None,
            dataset_hash=str(meta.get("dataset_hash", "")),
            arrival_s=np.array([each.arrival_time + clock_s for each in requests]) - start_s,
            first_token_s=np.array([each.first_token_ts for each in requests]) - start_s,
            last_token_s=np.array([each.last_token_ts for each in requests]) - start_s,
            input_tokens=np.array([each.input_toks for each in requests], np.int64),
            output_tokens=np.array([each.output_toks for each in requests], np.int64),
            log=_log(folder / "timeseries.csv"),
            published=_published(folder / "summary.csv"),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder}: settings of the run are missing or malformed: {error!r}") from None


def _requests(path: Path) -> list[Request]:
    decoder = msgspec.json.Decoder(Request)
    rows = []
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                rows.append(decode_json(decoder, raw.strip(), str(path), number))
    if not rows:
        raise ConfigError(f"{path}: no requests")
    return sorted(rows, key=lambda row: row.arrival_time)


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: one JSON object is needed")
    return found


def _numbers(cluster: dict[str, Any], key: str) -> list[float]:
    """One number, or one for each dimension of the network; none where the configuration has none."""
    found = cluster.get(key)
    numbers = [float(each) for each in (found if isinstance(found, list) else [found]) if each is not None]
    if key == "link_bw" and numbers and min(numbers) <= 0:
        raise ValueError(f"link_bw must be above 0, got {found}")
    return numbers


def _log(path: Path) -> dict[str, Floats]:
    """Columns of numbers by name; rows of one moment, from several ranks, as one. Empty without a log."""
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    log = {}
    for name in rows[0] if rows else ():
        with suppress(TypeError, ValueError):  # a column of text
            log[name] = np.array([float(row[name]) for row in rows])
    if not log.keys() >= LOGGED:
        return {}
    moments, rank = np.unique(log["t"], return_inverse=True)
    rows_each = np.bincount(rank)
    together: dict[str, Floats] = {"t": moments}
    for name, values in log.items():
        if name != "t":
            each = rows_each if name.endswith("_pct") else 1.0
            together[name] = np.bincount(rank, values).astype(float) / each
    return together


def _published(path: Path) -> dict[tuple[str, str], float]:
    """What the run's own simulator reached, from its table."""
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {(row["metric"], row["stat"]): float(row["diff_pct"]) / 100 for row in csv.DictReader(file)}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """vLLM's default: 1, 2, 4, then every 8th, from 256 every 16th."""
    most = min(2 * max_num_seqs, LARGEST_GRAPH)
    return tuple(size for size in (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)) if size <= most)
