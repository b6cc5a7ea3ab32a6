"""How a launch is timed, and a measured point as a row of the cost table."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SUSTAINED_S = 2.0
OTHER_BYTES = 256 << 20  # read before each launch; five times the L2 of an H200
FEWEST_LAUNCHES = 10
REPLAYS, REPLAY_ROUNDS = 6, 11


class BitsDifferError(Exception):
    """Equal launches gave different results, or a result is wrong."""


Times = tuple[float, float, float]  # median, 10 % and 90 % quantile, microseconds


@dataclass(frozen=True, slots=True)
class Row:
    """One measured point of the cost table; None where a column does not apply."""

    op: str
    format: str
    kernel: str
    median_us: float
    p10_us: float | None
    p90_us: float | None
    bytes: int  # that must move, each once
    batch: int | None = None
    context_tokens: int | None = None
    q_heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    page_tokens: int | None = None
    tokens: int | None = None
    in_features: int | None = None
    out_features: int | None = None
    weights: str | None = None
    energy_mj: float | None = None
    sustained: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """What the figures were measured with."""

    device: str = field(default_factory=lambda: torch.cuda.get_device_name())
    torch: str = torch.__version__
    triton: str = triton.__version__
    driver: str = field(default_factory=lambda: _driver())


COLUMNS = (
    "device",
    *("op", "format", "batch", "context_tokens", "q_heads", "kv_heads", "head_dim", "page_tokens", "tokens"),
    *("in_features", "out_features", "weights", "median_us", "p10_us", "p90_us", "bytes", "energy_mj"),
    *("sustained", "kernel", "torch", "triton", "driver", "commit", "date"),
)


def as_columns(row: Row, machine: Machine, commit: str, date: str) -> dict[str, object]:
    """A row of the CSV: times to 0.01 microseconds, empty where a column does not apply."""
    values: dict[str, object] = {"commit": commit, "date": date}
    for source in (row, machine):
        for column in fields(source):
            value = getattr(source, column.name)
            if isinstance(value, float):
                value = f"{value:.2f}"
            values[column.name] = "" if value is None else value
    return {name: values[name] for name in COLUMNS}


def _driver() -> str:
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlSystemGetDriverVersion()


def graph(launch: Callable[[], object]) -> Callable[[], None]:
    """The launch as a CUDA graph; call it to replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            launch()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        launch()
    return captured.replay


def burst(launch: Callable[[], object], warmup_ms: int = 10, repeat_ms: int = 40) -> Times:
    """Times of one launch from a graph, nothing of its own in the cache."""
    return _quantiles(graph(launch), warmup_ms, repeat_ms)


def replayed(launch: Callable[[], object]) -> Times:
    """Mean times of six replays back to back behind three that do not count: quantiles of eleven such rounds.

    One such round is how AIConfigurator's public times were measured (its collector, `benchmark_with_power`). Each
    launch finds in the cache what the one before it left there.
    """
    replay = graph(launch)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times_us = []
    for _ in range(REPLAY_ROUNDS):
        for _ in range(REPLAYS // 2):
            replay()
        torch.cuda.synchronize()
        start.record()
        for _ in range(REPLAYS):
            replay()
        end.record()
        torch.cuda.synchronize()
        times_us.append(start.elapsed_time(end) / REPLAYS * 1e3)
    p10, median, p90 = np.quantile(times_us, (0.1, 0.5, 0.9))
    return float(median), float(p10), float(p90)


def fastest(
    launches: Mapping[str, Callable[[], torch.Tensor]], repeat_ms: int = 40
) -> tuple[str, Callable[[], torch.Tensor], Times]:
    """The launch with the smallest median, its label and its times.

    All are timed shortly, twice, so that none is the first after a change of clocks, and the best two again.
    """
    replays = {label: graph(launch) for label, launch in launches.items()}
    rounds = [{label: _quantiles(replay, 1, 5)[0] for label, replay in replays.items()} for _ in range(2)]
    short = {label: min(times[label] for times in rounds) for label in replays}
    long = {
        label: _quantiles(replays[label], repeat_ms // 4, repeat_ms)
        for label in sorted(short, key=short.__getitem__)[:2]
    }
    label = min(long, key=lambda name: long[name][0])
    return label, launches[label], long[label]


def _quantiles(replay: Callable[[], None], warmup_ms: int, repeat_ms: int) -> Times:
    """Times of as many replays as last so long, each behind a reading of other memory.

    A layer's attention finds the cache full of weights that were read. `triton.testing.do_bench` writes its buffer
    instead, and a launch pays for taking that back to memory: 8 to 10 us on an H200 (docs/kernels.md).
    """
    other = torch.empty(OTHER_BYTES // 4, dtype=torch.float32, device="cuda")
    most = torch.empty((), dtype=torch.float32, device="cuda")

    def timed(count: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in events:
            torch.amax(other, dim=0, out=most)
            start.record()
            replay()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    each_ms = sorted(timed(3))[1]
    for duration_ms in (warmup_ms, repeat_ms):
        times_ms = timed(max(FEWEST_LAUNCHES, round(duration_ms / each_ms)))
    p10, median, p90 = np.quantile(times_ms, (0.1, 0.5, 0.9)) * 1e3
    return float(median), float(p10), float(p90)


def sustained(launch: Callable[[], object], seconds: float = SUSTAINED_S) -> tuple[float, float]:
    """Mean microseconds and millijoules of one launch, back to back, from NVML's energy counter."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    replay = graph(launch)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds / 3:  # let the clock settle under the power cap
        replay()
        torch.cuda.synchronize()
    count, start, energy = 0, time.perf_counter(), pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    while time.perf_counter() - start < seconds:
        for _ in range(100):
            replay()
        torch.cuda.synchronize()
        count += 100
    elapsed = time.perf_counter() - start
    energy = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - energy
    return elapsed / count * 1e6, energy / count


def distinct_results(launch: Callable[[], torch.Tensor], launches: int = 100) -> int:
    """How many different results equal launches give; 1 is what must be."""
    results = {launch().cpu().numpy().tobytes() for _ in range(launches)}
    return len(results)
