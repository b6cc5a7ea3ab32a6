"""What a command simulates: a model with its weights on a GPU (or group), and what follows for each KV format."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from kvfold.codec.sizes import FormatSizes, load_sizes
from kvfold.sim.costs import CostTable, load_costs
from kvfold.sim.errors import ConfigError, near_names
from kvfold.sim.gpu import GpuSpec, load_gpu
from kvfold.sim.memory import MemoryBudget, kv_budget
from kvfold.sim.model import ModelSpec, load_model
from kvfold.sim.power import Power, power_of
from kvfold.sim.step import StepCost, step_cost

#: Columns of a cost table that are read, of those that `kvfold kernels bench` writes.
_COST_COLUMNS = (
    *("device", "op", "format", "batch", "context_tokens", "q_heads", "kv_heads", "head_dim", "tokens"),
    *("in_features", "out_features", "weights", "median_us", "energy_mj", "sustained", "kernel"),
    *("commit", "date"),
)


@dataclass(frozen=True, slots=True)
class Deployment:
    """`kv_budget_bytes` beats `num_gpu_blocks` beats the memory waterfall; the same bytes for every format."""

    model: ModelSpec
    gpu: GpuSpec
    weights: str
    tp: int
    max_context_tokens: int
    gpu_memory_utilization: float
    kv_budget_bytes: int | None
    num_gpu_blocks: int | None
    max_num_seqs: int
    costs: CostTable | None
    costs_file: Path | None  # in place of the packaged table
    strict_costs: bool

    @property
    def cost_source(self) -> str | None:
        """Where measured step costs come from: file, device, commit and date; None where all are modelled."""
        return self.costs.source if self.costs else None

    def budget(self, sizes: FormatSizes) -> MemoryBudget:
        """Raises DoesNotFitError when the weights or one unit of KV do not fit."""
        return kv_budget(
            self.model,
            self.gpu,
            sizes,
            weights=self.weights,
            tp=self.tp,
            gpu_memory_utilization=self.gpu_memory_utilization,
            kv_budget_bytes=self.kv_budget_bytes,
            num_gpu_blocks=self.num_gpu_blocks,
            max_num_seqs=self.max_num_seqs,
        )

    def power(self) -> Power:
        """What the GPU draws, measured where its cost table has joules."""
        with _cost_file(self.gpu.name, self.costs_file) as path:
            return power_of(self.gpu, path)

    def cost(self, sizes: FormatSizes) -> StepCost:
        return step_cost(self.model, self.gpu, sizes, self.weights, self.tp, self.costs, self.strict_costs)

    def modelled_terms(self, sizes: FormatSizes) -> list[str]:
        """The terms of a step that no measurement enters, however well the cost table covers the run."""
        cost = replace(self.cost(sizes), strict=False)  # asked for its origins
        names = [term.name for term in cost.terms(1, 1, 1) if term.origin == "modelled" and term.s]
        return names if cost.measured_prefill else [*names, "prompt attention"]


def deploy(
    model: str,
    gpu: str,
    *,
    weights: str = "bf16",
    tp: int = 1,
    max_context_tokens: int | None = None,
    gpu_memory_utilization: float = 0.9,
    kv_budget_bytes: int | None = None,
    num_gpu_blocks: int | None = None,
    max_num_seqs: int = 256,
    costs: Path | None = None,
    strict_costs: bool = False,
) -> Deployment:
    """Look up model and GPU by name or path; raises ConfigError for what does not exist or breaks a rule.

    `costs` is a cost table in place of the packaged one. `strict_costs` accepts measured and interpolated
    attention (of prompts too) and linear layers alone, and so refuses a GPU without a cost table.
    """
    found_gpu = load_gpu(gpu)
    table = cost_table(found_gpu.name, own=costs)
    if strict_costs and table is None:
        raise ConfigError(
            f"--strict-costs needs a measured cost table for {found_gpu.name}, and there is none: "
            "its step costs are modelled from datasheet figures; leave --strict-costs out to use them, "
            "or give a table of kvfold kernels bench by --costs"
        )
    found_model = load_model(model)
    return Deployment(
        model=found_model,
        gpu=found_gpu,
        weights=weights,
        tp=tp,
        max_context_tokens=max_context_tokens or found_model.max_context_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_budget_bytes=kv_budget_bytes,
        num_gpu_blocks=num_gpu_blocks,
        max_num_seqs=max_num_seqs,
        costs=table,
        costs_file=costs,
        strict_costs=strict_costs,
    )


def cost_table(gpu_name: str, attention: str = "", own: Path | None = None) -> CostTable | None:
    """The measured costs in the user's own file, else those that come with the program for this GPU; None where
    it was not measured.

    `attention`: of decode attention, only kernels with this in their names.
    """
    with _cost_file(gpu_name, own) as path:
        if path is None:
            return None
        source = f"{own or path.name} ({_provenance(path)})"
        table = replace(load_costs(path, attention), source=source)
    if not (table.attend or table.linear or table.prefill):
        raise ConfigError(
            f"{path}: a cost table needs rows of attend, linear or prefill that are not sustained"
        )
    return table


def _provenance(path: Path) -> str:
    """Devices, commits and dates of a cost table; raises ConfigError, naming the line, if it is none."""
    seen: dict[str, set[str]] = {name: set() for name in ("device", "commit", "date")}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(line for line in file if not line.startswith("#"))
            absent = [name for name in _COST_COLUMNS if name not in (reader.fieldnames or ())]
            if absent:
                more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
                raise ConfigError(
                    f"{path}:1: not a cost table as kvfold kernels bench writes it: no column "
                    f"{', '.join(absent[:3])}{more}"
                )
            for row in reader:
                for name, values in seen.items():
                    values.add(row[name] or "unknown")
                if row["energy_mj"] and not float(row["energy_mj"]) / float(row["median_us"]) > 0:
                    raise ValueError(f"energy_mj must be positive, got {row['energy_mj']}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a cost table: {error}") from None
    except (csv.Error, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{path}:{reader.line_num}: not a row of a cost table: {error}") from None
    devices, commits, dates = (", ".join(sorted(values)) for values in seen.values())
    return f"{devices}; commit{'s' if len(seen['commit']) > 1 else ''} {commits}; {dates}"


@contextmanager
def _cost_file(gpu_name: str, own: Path | None) -> Iterator[Path | None]:
    if own is not None:
        yield own
        return
    file = resources.files("kvfold.kernels").joinpath(f"data/costs_{gpu_name}.csv")
    if not file.is_file():
        yield None
        return
    with resources.as_file(file) as path:
        yield path


def format_sizes(name: str) -> FormatSizes:
    """Sizes of one KV format; raises ConfigError for an unknown name, with close matches."""
    sizes = load_sizes()
    if name not in sizes:
        near = near_names(name, sizes)
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(sizes)}"
        raise ConfigError(f"unknown KV format {name!r}; {hint}")
    return sizes[name]
