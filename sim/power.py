"""Energy of a run: what the GPU draws in attention, in the rest of a step, and while it waits.

Decode attention draws what was measured of it, where the cost table of the GPU has joules of this format's kernel
run back to back. Everything else is modelled: the power limit while kernels run, idle power while the host
prepares a step (the step's launch and scheduling term) and between steps.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from kvfold.sim.run import FS_PER_S
from kvfold.sim.step import StepCost
from kvfold.sim.work import NO_OVERHEAD

if TYPE_CHECKING:
    from pathlib import Path

    from kvfold.sim.gpu import GpuSpec
    from kvfold.sim.run import Stretches
    from kvfold.sim.work import Cost


@dataclass(frozen=True, slots=True)
class Power:
    """Watts of one GPU; None where the profile does not know. `attend_w`: measured, by KV format."""

    busy_w: float | None
    idle_w: float | None
    attend_w: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules of all GPUs of a run, NaN where the profile does not know its power.

    `idle_j` is the part between steps, `attention_j` that of decode attention with measured watts (0: unmeasured).
    """

    total_j: float
    idle_j: float
    attention_j: float
    origin: str


def power_of(gpu: GpuSpec, costs: Path | None = None) -> Power:
    """The profile's figures, and the median watts of every format's sustained attention rows in a cost table."""
    watts: dict[str, list[float]] = {}
    if costs is not None:
        with costs.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(line for line in file if not line.startswith("#")):
                if row["op"] == "attend" and row["energy_mj"]:
                    mj_per_us = float(row["energy_mj"]) / float(row["median_us"])
                    watts.setdefault(row["format"], []).append(1e3 * mj_per_us)
    return Power(
        gpu.power_limit_w, gpu.idle_w, {name: median(values) for name, values in sorted(watts.items())}
    )


def energy_of(
    power: Power, cost: Cost, stretches: Stretches, prompts: int, busy_fs: int, span_s: float
) -> Energy:
    """Energy of the steps of a run and of the time between them, `cost.tp` GPUs a replica.

    `prompts` were ended, each of which was sampled from once; `busy_fs` and `span_s` add up over replicas.
    """
    gpus = cost.tp
    if power.busy_w is None or power.idle_w is None:
        return Energy(float("nan"), float("nan"), 0.0, "unknown")
    busy_s = busy_fs / FS_PER_S
    decoded, computed = (
        int((stretches.steps * column).sum()) for column in (stretches.decode_seqs, stretches.prefill_tokens)
    )
    overhead = cost.overhead if isinstance(cost, StepCost) else NO_OVERHEAD
    host_s = overhead.step_s * int(stretches.steps.sum()) + overhead.token_s * (decoded + computed)
    host_s = min(host_s + overhead.sequence_s * (decoded + prompts), busy_s)
    attend_s = attention_j = 0.0
    if isinstance(cost, StepCost) and cost.sizes.name in power.attend_w:
        attend_s = _attention_fs(cost, stretches) / FS_PER_S
        attention_j = gpus * power.attend_w[cost.sizes.name] * attend_s
    idle_j = gpus * power.idle_w * max(0.0, span_s - busy_s)
    step_j = gpus * (power.busy_w * (busy_s - host_s - attend_s) + power.idle_w * host_s)
    return Energy(idle_j + step_j + attention_j, idle_j, attention_j, "modelled")


def _attention_fs(cost: StepCost, stretches: Stretches) -> int:
    """Time of decode attention, exact however steps are put together."""
    total_fs = 0
    rows = (column.tolist() for column in (stretches.steps, stretches.decode_seqs, stretches.kv_tokens))
    for steps, sequences, kv_tokens in zip(*rows, strict=True):
        if sequences:
            part = cost.attention(sequences, kv_tokens)
            total_fs += steps * (part.base_fs + part.token_fs * kv_tokens)
            total_fs += part.token_fs * sequences * (steps * (steps - 1) // 2)
    return total_fs
