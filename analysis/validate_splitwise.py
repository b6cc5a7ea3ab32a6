"""Splitwise (ISCA 2024): prompt and token times of Llama-2-70B in FP16 on DGX A100 and H100, and power.

An engine of 2023 without CUDA graphs or asynchronous scheduling: its times bound ours from above, and what must
hold is how they move with batch and GPUs. Power is a share of the GPU's limit; rows with 0 have none.
"""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import median

from kvfold.analysis.deployment import format_sizes
from kvfold.analysis.steptable import step_s
from kvfold.analysis.validate import Check, Family, compared, holds
from kvfold.sim.errors import ConfigError
from kvfold.sim.gpu import load_gpu
from kvfold.sim.model import load_model
from kvfold.sim.step import StepCost, step_cost
from kvfold.sim.work import Chunk

SOURCE = "Splitwise, ISCA 2024, perf_model.csv"
FILE = "perf_model.csv"
#: The same shape as Llama-2-70B but for the vocabulary, which is 0.5 % of the parameters there.
MODEL = "llama-3.1-70b"
GPUS = {"a100-80gb": "a100-80g", "h100-80gb": "h100"}
PROMPT, OUTPUT = 512, 128


def splitwise(folder: Path | None) -> Family:
    """Token and prompt time by batch and tensor parallelism, and power while decoding."""
    found = sorted(folder.rglob(FILE)) if folder else []
    if not found:
        return Family((), (f"{FILE}: give --data DIR",))
    rows = _read(found[0])
    checks: list[Check] = []
    for hardware, gpu in GPUS.items():
        for tp in (2, 4, 8):
            cost = step_cost(load_model(MODEL), load_gpu(gpu), format_sizes("bf16"), "bf16", tp)
            checks += _times(rows, hardware, tp, cost)
    return Family((*checks, *_power(rows)))


def _times(
    rows: dict[tuple[str, int, int, int], list[tuple[float, ...]]], hardware: str, tp: int, cost: StepCost
) -> list[Check]:
    """Token time at batch 1 and 16, its growth between them, and prompt time at 512 and 2,048 tokens."""
    name = f"{hardware} x {tp}"
    real = {batch: _median(rows[hardware, tp, PROMPT, batch], 1) / 1e3 for batch in (1, 16)}
    ours = {batch: step_s(cost, batch, PROMPT + OUTPUT // 2) for batch in (1, 16)}
    checks = [
        compared(
            "splitwise", f"token time, {name}, batch {batch}", SOURCE, real[batch], ours[batch], unit="s"
        )
        for batch in (1, 16)
    ]
    checks.append(
        holds(
            "splitwise",
            f"token time grows with the batch, {name}",
            SOURCE,
            f"{real[16] / real[1]:.2f}x from 1 to 16",
            f"{ours[16] / ours[1]:.2f}x",
            real[16] > real[1] and ours[16] > ours[1],
        )
    )
    for prompt in (512, 2048):
        fs = cost.base_fs(0, prompt, 1) + cost.chunk_fs(Chunk(prompt, 0, True))
        reference = _median(rows[hardware, tp, prompt, 1], 0) / 1e3
        checks.append(
            compared(
                "splitwise", f"prompt time, {name}, {prompt:,} tokens", SOURCE, reference, fs / 1e15, unit="s"
            )
        )
    return checks


def _power(rows: dict[tuple[str, int, int, int], list[tuple[float, ...]]]) -> list[Check]:
    """Our energy model takes the power limit while a GPU computes: an upper bound."""
    checks = []
    for tp in (2, 4, 8):
        share = _median(rows["a100-80gb", tp, PROMPT, 1], 2)
        peak = _median(rows["a100-80gb", tp, PROMPT, 1], 3)
        checks.append(
            holds(
                "splitwise",
                f"power while decoding, a100-80gb x {tp}",
                SOURCE,
                f"{100 * share:.0f} % of the limit on average, {100 * peak:.0f} % at most",
                "100 % (upper bound)",
                share <= 1.0,
                f"energy per token is {100 * (1 / share - 1):.0f} % above the measured average",
            )
        )
    return checks


def _median(rows: list[tuple[float, ...]], column: int) -> float:
    return median(row[column] for row in rows if row[column] > 0)


def _read(path: Path) -> dict[tuple[str, int, int, int], list[tuple[float, ...]]]:
    """(hardware, GPUs, prompt, batch) -> rows of (prompt ms, token ms, mean power, peak power); 128 tokens out."""
    found: dict[tuple[str, int, int, int], list[tuple[float, ...]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        for row in reader:
            try:
                if row["model"] != "llama2-70b" or int(row["token_size"]) != OUTPUT:
                    continue
                key = (
                    row["hardware"],
                    int(row["tensor_parallel"]),
                    int(row["prompt_size"]),
                    int(row["batch_size"]),
                )
                columns = ("prompt_time", "token_time", "average_power", "peak_power")
                found.setdefault(key, []).append(tuple(float(row[name]) for name in columns))
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{path}:{reader.line_num}: not a row of times and power: {error}"
                ) from None
    return found
