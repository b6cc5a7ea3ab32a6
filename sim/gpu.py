"""A GPU as the simulator sees it: datasheet figures with their sources, and one efficiency for all."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvfold.sim.errors import ConfigError, near_names

PRESETS_FILE = Path(__file__).with_name("data") / "gpus.toml"
#: Share of datasheet bandwidth and FLOP/s that kernels reach (modelled): the same for every GPU, never fitted
#: to a run. Public performance tables use 0.80 of the bandwidth; BF16 GEMM on an H200 reaches 790 / 989.
EFFICIENCY = 0.80


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU. None is unknown, never 0: `require` refuses it. FLOP/s are dense, links one direction per GPU.

    `shared_memory`: the memory is the CPU's too, so there is no host to swap to. `unchecked` names the fields
    whose figure was derived or read at second hand. `sources` maps fields to "origin: where from".
    """

    name: str
    memory_bytes: int  # what a process can allocate from
    bandwidth_bytes_per_s: float
    bf16_flops_per_s: float | None = None
    fp8_flops_per_s: float | None = None
    power_limit_w: float | None = None
    idle_w: float | None = None
    sm_count: int | None = None
    int_lanes_per_sm: int | None = None  # 32-bit integer operations per clock
    clock_hz: float | None = None
    link_bytes_per_s: float | None = None  # to the other GPUs of its group
    host_link_bytes_per_s: float | None = None
    shared_memory: bool = False
    bandwidth_efficiency: float = EFFICIENCY
    compute_efficiency: float = EFFICIENCY
    unchecked: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def int_ops_per_bf16_element(self) -> float | None:
        """Integer operations that fit into the time in which one BF16 element is read at datasheet bandwidth.

        lanes * SMs * clock / (bandwidth / 2), an estimate at full clock; None where one of them is unknown. A
        format whose decoding takes more per element than this is bound by decoding, not by memory.
        """
        if self.int_lanes_per_sm is None or self.sm_count is None or self.clock_hz is None:
            return None
        return self.int_lanes_per_sm * self.sm_count * self.clock_hz / (self.bandwidth_bytes_per_s / 2)

    def source(self, name: str) -> str:
        """Where a field's figure comes from."""
        if name in EFFICIENCIES and getattr(self, name) == EFFICIENCY:
            return "modelled: one figure for all GPUs"
        return self.sources.get(name) or self.sources.get("all") or "given: GPU file"


FIGURES = tuple(
    f.name for f in fields(GpuSpec) if f.name not in ("name", "shared_memory", "unchecked", "sources")
)
COUNTS = ("memory_bytes", "sm_count", "int_lanes_per_sm")
EFFICIENCIES = ("bandwidth_efficiency", "compute_efficiency")


def require(gpu: GpuSpec, name: str) -> float:
    """A figure that a computation needs; raises ConfigError where the profile does not know it."""
    value = getattr(gpu, name)
    if value is None:
        raise ConfigError(
            f"{name} of GPU {gpu.name} is unknown; give it in a GPU file (kvfold list gpus shows the fields)"
        )
    return float(value)


def preset_names() -> list[str]:
    """Names that `load_gpu` knows without a file, in the order of the presets file."""
    return list(_presets())


def load_gpu(name_or_path: str) -> GpuSpec:
    """A preset by name, or a TOML file of the same fields for one GPU.

    Raises ConfigError for an unknown name (with close matches), and for a file with unknown, missing or
    impossible fields, which it names.
    """
    path = Path(name_or_path)
    if path.suffix == ".toml" or path.is_file():
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); give a GPU file") from error
        except ValueError as error:
            raise ConfigError(
                f"{path}: not a TOML file ({error}); kvfold list gpus shows the fields"
            ) from error
        return _spec(path.stem, table, str(path))
    presets = _presets()
    key = name_or_path.lower()
    if key not in presets:
        near = near_names(key, presets)
        hint = f"did you mean {', '.join(near)}?" if near else "give a preset or a path to a GPU file"
        raise ConfigError(f"unknown GPU {name_or_path!r}; {hint} (kvfold list gpus shows the presets)")
    return _spec(key, presets[key], f"preset {key}")


def _presets() -> dict[str, dict[str, Any]]:
    with PRESETS_FILE.open("rb") as file:
        return tomllib.load(file)


def _spec(name: str, table: dict[str, Any], where: str) -> GpuSpec:
    known = [f.name for f in fields(GpuSpec)]
    for key in table:
        if key not in known:
            near = near_names(key, known)
            hint = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(known)}"
            raise ConfigError(f"{where}: unknown field {key}; {hint}")
    for key in ("memory_bytes", "bandwidth_bytes_per_s"):
        if key not in table:
            raise ConfigError(f"{where}: field {key} is missing; add it")
    for key in FIGURES:
        if key in table:
            _check_figure(where, key, table[key])
    if not isinstance(table.get("shared_memory", False), bool):
        raise ConfigError(
            f"{where}: field shared_memory must be true or false, got {table['shared_memory']!r}"
        )
    unchecked, sources = table.get("unchecked", []), table.get("sources", {})
    if not isinstance(unchecked, list) or not all(item in FIGURES for item in unchecked):
        raise ConfigError(f"{where}: field unchecked must be a list of field names, got {unchecked!r}")
    if not isinstance(sources, dict) or not all(isinstance(text, str) for text in sources.values()):
        raise ConfigError(f"{where}: field sources must be a table of texts, got {sources!r}")
    named = table.get("name", name)
    if not isinstance(named, str):
        raise ConfigError(f"{where}: field name must be a text, got {named!r}")
    return GpuSpec(**{**table, "name": named, "unchecked": tuple(unchecked)})


def _check_figure(where: str, key: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise ConfigError(f"{where}: field {key} must be a positive number, got {value!r}")
    if key in COUNTS and not isinstance(value, int):
        raise ConfigError(f"{where}: field {key} must be a whole number, got {value!r}")
    if key in EFFICIENCIES and value > 1:
        raise ConfigError(f"{where}: field {key} must be at most 1, got {value!r}")
