"""What a command simulates: a model with its weights on a GPU (or group), and what follows for each KV format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path

from kvfold.codec.sizes import FormatSizes, load_sizes
from kvfold.sim.costs import CostTable, load_costs
from kvfold.sim.errors import ConfigError
from kvfold.sim.gpu import GpuSpec, load_gpu
from kvfold.sim.memory import MemoryBudget, kv_budget
from kvfold.sim.model import ModelSpec, load_model
from kvfold.sim.power import Power, power_of
from kvfold.sim.step import StepCost, step_cost


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
    strict_costs: bool

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
        with _cost_file(self.gpu.name) as path:
            return power_of(self.gpu, path)

    def cost(self, sizes: FormatSizes) -> StepCost:
        return step_cost(self.model, self.gpu, sizes, self.weights, self.tp, self.costs, self.strict_costs)


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
    strict_costs: bool = False,
) -> Deployment:
    """Look up model and GPU by name or path; raises ConfigError for what does not exist or breaks a rule.

    `strict_costs` accepts measured and interpolated attention (of prompts too) and linear layers alone, and so
    refuses a GPU without a cost table.
    """
    found_gpu = load_gpu(gpu)
    costs = cost_table(found_gpu.name)
    if strict_costs and costs is None:
        raise ConfigError(
            f"--strict-costs needs a measured cost table for {found_gpu.name}, and there is none: "
            "its step costs are modelled from datasheet figures; leave --strict-costs out to use them"
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
        costs=costs,
        strict_costs=strict_costs,
    )


def cost_table(gpu_name: str, attention: str = "") -> CostTable | None:
    """The measured costs that come with the program for this GPU, None where it was not measured.

    `attention`: of decode attention, only kernels with this in their names.
    """
    with _cost_file(gpu_name) as path:
        return load_costs(path, attention) if path is not None else None


@contextmanager
def _cost_file(gpu_name: str) -> Iterator[Path | None]:
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
        near = get_close_matches(name, sizes, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sizes)}"
        raise ConfigError(f"unknown KV format {name!r}; {hint}")
    return sizes[name]
