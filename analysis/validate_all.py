"""All families of checks: which of them run, on whose data, and what came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvfold.analysis.validate import FAMILIES, Check, Family, compared
from kvfold.analysis.validate_gaac import gaac
from kvfold.analysis.validate_published import fp8
from kvfold.analysis.validate_replay import (
    METRICS,
    Replay,
    checks_of,
    checks_without_prefixes,
    replay,
    timeline,
)
from kvfold.analysis.validate_run import find_runs, load_run
from kvfold.analysis.validate_splitwise import splitwise
from kvfold.analysis.validate_tables import tables
from kvfold.analysis.validate_theory import codec, memory, queueing
from kvfold.sim.errors import ConfigError, near_names


def engine(folder: Path | None, strict: bool = False) -> Family:
    """Every recorded engine run below the folder, replayed from the profile of its GPU."""
    runs = find_runs(folder) if folder else []
    if not runs:
        return Family((), ("recorded engine runs (requests.jsonl with meta.json): give --data DIR",))
    checks: list[Check] = []
    figures = []
    for path in runs:
        profiles = (
            next((each for each in path.parents if (each / "profiles").is_dir()), path.parent) / "profiles"
        )
        recorded = load_run(path)
        found = replay(recorded, profiles, strict=strict)
        checks += [*checks_of(found), *_occupancy(found)]
        if found.shared_prefixes:
            checks += checks_without_prefixes(replay(recorded, profiles, strict=strict, shared={}))
        figures.append(_figures(found))
    return Family(tuple(checks), (), tuple(figures))


RUNNERS: dict[str, Callable[[Path | None], Family]] = {
    "engine": engine,
    "tables": tables,
    "gaac": gaac,
    "fp8": fp8,
    "splitwise": splitwise,
    "memory": memory,
    "queueing": queueing,
    "codec": codec,
}
assert tuple(RUNNERS) == FAMILIES


def validate(
    folder: Path | None, only: Sequence[str], log: Callable[[str], None], strict: bool = False
) -> dict[str, Any]:
    """The JSON of `kvfold validate`; `only` names families, none: all. Raises ConfigError for another name."""
    for name in only:
        if name not in RUNNERS:
            near = near_names(name, RUNNERS)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(RUNNERS)}"
            raise ConfigError(f"--only {name!r} is no family of checks; {hint}")
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--data {folder}: no such folder")
    checks: list[Check] = []
    skipped: list[str] = []
    figures: list[dict[str, Any]] = []
    for name, runner in RUNNERS.items():
        if only and name not in only:
            continue
        log(f"{name} ...")
        found = engine(folder, strict) if name == "engine" else runner(folder)
        checks += found.checks
        skipped += [f"{name}: {reason}" for reason in found.skipped]
        figures += found.figures
    return result(checks, skipped, figures)


def result(
    checks: Sequence[Check], skipped: Sequence[str], figures: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Counts beside the checks: how many have a gate, how many of those are missed, what was skipped."""
    gated = [check for check in checks if check.passed is not None]
    missed = [check.name for check in gated if not check.passed]
    return {
        "checks": [check.plain() for check in checks],
        "counts": {
            "checks": len(checks),
            "gated": len(gated),
            "missed": len(missed),
            "skipped": len(skipped),
        },
        "missed": missed,
        "skipped": list(skipped),
        "runs": list(figures),
    }


def _occupancy(found: Replay) -> list[Check]:
    """Mean of the pool's occupancy while the run lasts, where the engine logged it."""
    lines = timeline(found)
    if "kv_share" not in lines["engine"]:
        return []
    real = float(lines["engine"]["kv_share"].mean())
    steps = found.simulated.stretches
    share = lines["ours"]["kv_share"]
    times = lines["ours"]["t_s"]
    span = float(found.simulated.calls.last_token_s.max())
    widths = (
        [*(times[1:] - times[:-1]).tolist(), max(0.0, span - float(times[-1]))] if len(steps.steps) else []
    )
    ours = float((share * widths).sum() / span)
    return [
        compared(
            "engine",
            f"{found.run.name} KV occupancy, mean",
            "the engine's log, a row a second",
            real,
            ours,
            unit="share",
            origin="modelled",
        )
    ]


def _figures(found: Replay) -> dict[str, Any]:
    """What the report draws of one run."""
    from kvfold.analysis.metrics import cdf

    return {
        "name": found.run.name,
        "model": found.run.model,
        "requests": len(found.run.input_tokens),
        "preemptions": int(found.simulated.calls.preemptions.sum()),
        "kv_pool": found.budget.kv_budget_origin,
        "num_blocks": found.budget.num_units,
        "extrapolated_share": found.extrapolated_share,
        "notes": list(found.notes),
        "cdf": {
            metric: {"engine": cdf(found.real[metric]), "simulated": cdf(found.ours[metric])}
            for metric in METRICS
        },
        "timeline": timeline(found),
    }
