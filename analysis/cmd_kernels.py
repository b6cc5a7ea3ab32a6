"""`kvfold kernels`: time the kernels of this GPU, and search them for wrong bits. Both need an NVIDIA GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvfold.kernels.timing import Row

app = typer.Typer(help="Time the attention kernels on this GPU and check them.", no_args_is_help=True)
OPS = ("attend", "pack", "prefill", "linear")
FORMATS = ("bf16", "fixed4", "fixed3", "gaac", "fp8-e4m3", "fp8-e5m2")
EXIT_BITS_DIFFER = 6
GATE_CASES = 54
MOST_JOBS = 16  # each process holds a CUDA context
# Dense presets whose linear layers are timed; their shapes cover those of the others' attention.
LINEAR_MODELS = ("qwen3-0.6b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "llama-3.1-8b", "llama-3.1-70b")


@app.callback()
def kernels() -> None:
    """Time the attention kernels on this GPU and check them."""


@app.command()
def fuzz(
    cases: Annotated[int, typer.Option(min=1, help="Random cases.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same cases.")] = 0,
    jobs: Annotated[
        int, typer.Option(min=0, help=f"Processes side by side; 0: one per core, at most {MOST_JOBS}.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Random shapes and contents against the reference codec and reference attention; exits 6 on a mismatch."""
    _require_gpu()
    from kvfold.analysis.out import emit_json

    broken, by_check, compiled = _check(cases, seed, jobs)
    by_kernel = {name: compiled.count(name) for name in sorted(set(compiled))}
    if as_json:
        emit_json(
            {
                "cases": cases,
                "cases_by_check": by_check,
                "compiled_variants": len(compiled),
                "compiled_variants_by_kernel": by_kernel,
                "mismatches": len(broken),
                "seed": seed,
                "broken": broken,
                "origin": "measured",
            }
        )
    else:
        print(
            f"{cases:,} cases, {len(broken):,} mismatches, {len(compiled):,} compiled variants "
            f"(seed {seed}, measured)\n"
            f"cases: {', '.join(f'{name} {count:,}' for name, count in by_check.items())}\n"
            f"variants: {', '.join(f'{name} {count:,}' for name, count in by_kernel.items())}"
        )
    if broken:
        raise typer.Exit(EXIT_BITS_DIFFER)


def _jobs(asked: int) -> int:
    import os

    return asked or min(MOST_JOBS, len(os.sched_getaffinity(0)))


def _check(cases: int, seed: int, jobs: int) -> tuple[list[dict[str, Any]], dict[str, int], list[str]]:
    """The broken cases, how many cases each check saw, and the name of each variant that was compiled."""
    from kvfold.analysis.out import note
    from kvfold.kernels.fuzz import fuzz as run

    broken: list[dict[str, Any]] = []
    by_check: dict[str, int] = {}
    compiled: frozenset[str] = frozenset()
    done = 0
    for result in run(cases, seed, "cuda", _jobs(jobs)):
        if isinstance(result, frozenset):
            compiled = result
            continue
        done += 1
        for check in result.checks:
            by_check[check] = by_check.get(check, 0) + 1
        if result.faults:
            broken.append({"case": str(result.case), "faults": result.faults})
            note(f"{result.case}: {'; '.join(result.faults)}")
        if done % 200 == 0:
            note(f"{done:,} of {cases:,} cases, {len(broken):,} broken")
    return broken, by_check, [kernel.split()[0] for kernel in compiled]


@app.command()
def bench(
    op: Annotated[str, typer.Option(help=f"What to time, comma-separated: {', '.join(OPS)}.")] = ",".join(
        OPS
    ),
    formats: Annotated[
        str, typer.Option(help=f"Formats to attend, comma-separated: {', '.join(FORMATS)}.")
    ] = ",".join(FORMATS),
    grid: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="CSV with columns batch,context_tokens; else the built-in grid.",
        ),
    ] = None,
    fa3: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="vLLM's _vllm_fa3_C.abi3.so: FlashAttention 3 as one more BF16 peer.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0, help="Start no point after so long, and count what is left; 0: no limit.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the cases that are checked first.")] = 0,
    out: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Folder for costs_<device>.csv.")
    ] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check the kernels, then time them beside torch's on this GPU and write the simulator's cost table."""
    ops, chosen = _split(op, OPS, "--op"), _split(formats, FORMATS, "--formats")
    points = None if grid is None else _read_grid(grid)
    _require_gpu()
    import csv
    from datetime import UTC, datetime
    from time import monotonic

    from kvfold.analysis.out import emit_json, note, written_whole
    from kvfold.kernels.timing import COLUMNS, BitsDifferError, Machine, as_columns

    start = monotonic()
    note(f"checking {GATE_CASES} cases before anything is timed")
    if _check(GATE_CASES, seed, 0)[0]:
        note("kvfold: a check failed; nothing is timed")
        raise typer.Exit(EXIT_BITS_DIFFER)
    machine, commit, date = Machine(), _commit(), datetime.now(UTC).date().isoformat()
    rows: list[dict[str, object]] = []
    not_run: list[str] = []
    try:
        for name, timed in _tasks(ops, chosen, points, not_run, fa3):
            if seconds and monotonic() - start > seconds:
                not_run.append(f"{name} (time)")
                continue
            try:
                for row in timed:
                    rows.append(as_columns(row, machine, commit, date))
                    note(f"{name}: {row.format} {row.kernel}: {row.median_us:,.1f} us")
            except RuntimeError as error:  # what torch or the GPU refuses costs its own rows, not the table
                not_run.append(f"{name} ({error})")
                note(f"kvfold: {name}: {error}")
    except BitsDifferError as error:
        note(f"kvfold: {error}; no table is written")
        raise typer.Exit(EXIT_BITS_DIFFER) from None
    path = out / f"costs_{machine.device.removeprefix('NVIDIA ').lower().replace(' ', '-')}.csv"
    with written_whole(path) as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    if as_json:
        emit_json({"rows": rows, "not_run": not_run, "path": str(path), "origin": "measured"})
    else:
        print(
            f"{len(rows):,} rows (measured) in {path}; {len(not_run)} not run: {', '.join(not_run) or 'none'}"
        )


def _tasks(
    ops: list[str],
    formats: list[str],
    points: tuple[tuple[int, int], ...] | None,
    not_run: list[str],
    fa3: Path | None,
) -> Iterator[tuple[str, Iterator[Row]]]:
    """Names and rows of everything that is to be timed; points that do not fit go to ``not_run``."""
    from kvfold.analysis.out import note
    from kvfold.kernels import bench as attend
    from kvfold.kernels import bench_dense as dense
    from kvfold.kernels.bench_pages import TOKEN_BYTES

    if "attend" in ops:
        fitting = []
        for batch, context in points or attend.POINTS:
            if batch * context * TOKEN_BYTES <= attend.MOST_KV_BYTES:
                fitting.append((batch, context))
            else:
                not_run.append(f"attend {batch} x {context} (memory)")
        if fitting:
            note("compiling what is to be timed")
            attend.compile_kernels(fitting, formats, _jobs(0))
            yield from attend.attend_tasks(fitting, formats, "cuda", note, fa3)
    if "pack" in ops:
        yield from attend.pack_tasks("cuda")
    if "prefill" in ops:
        yield from dense.prefill_tasks("cuda")
    if "linear" in ops:
        yield from dense.linear_tasks(_linear_shapes(), "cuda")


def _linear_shapes() -> list[tuple[int, int]]:
    """(in_features, out_features) of QKV, output, gate and up, down and LM head of the dense presets."""
    from kvfold.sim.model_config import read_presets

    shapes: dict[tuple[int, int], None] = {}
    for name in LINEAR_MODELS:
        config = read_presets()[name]
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
        queries = config["num_attention_heads"] * head_dim
        keys = config["num_key_value_heads"] * head_dim
        layers = (
            (hidden, queries + 2 * keys),
            (queries, hidden),
            (hidden, 2 * inner),
            (inner, hidden),
            (hidden, config["vocab_size"]),
        )
        shapes.update(dict.fromkeys(layers))
    return list(shapes)


def _require_gpu() -> None:
    """Exit 2 with one line where there is nothing to measure."""
    from kvfold.analysis.out import note

    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        note(
            f"kvfold: kernels need torch and triton ({error.name} is missing): pip install 'kvfold[kernels]'"
        )
        raise typer.Exit(2) from None
    if not torch.cuda.is_available():
        note(
            "kvfold: kernels need an NVIDIA GPU, and torch sees none here; `make test` checks them without one"
        )
        raise typer.Exit(2)


def _split(text: str, known: tuple[str, ...], option: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"must be some of {', '.join(known)}, got {name!r}", param_hint=option)
    return names


def _read_grid(path: Path) -> tuple[tuple[int, int], ...]:
    import csv

    from kvfold.sim.errors import ConfigError

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the grid must be a CSV in UTF-8") from None
    points = []
    reader = csv.DictReader(lines)
    for row in reader:
        try:
            batch, context = int(row["batch"]), int(row["context_tokens"])
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                f"{path}:{reader.line_num}: needs whole numbers batch and context_tokens, got {row}"
            ) from None
        if batch < 1 or context < 256 or context % 256:
            raise ConfigError(
                f"{path}:{reader.line_num}: batch must be at least 1 and context_tokens a multiple of 256, "
                f"got {batch:,} and {context:,}"
            )
        points.append((batch, context))
    if not points:
        raise ConfigError(f"{path}: the grid has no points")
    return tuple(points)


def _commit() -> str:
    """The commit of the code that is measured, with `-dirty` where files differ; `unknown` outside a clone."""
    import subprocess

    found = subprocess.run(
        [
            "git",
            "-C",
            str(Path(__file__).parent),
            "describe",
            "--always",
            "--dirty",
            "--abbrev=12",
            "--exclude=*",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"
