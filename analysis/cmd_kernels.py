"""`kvfold kernels`: time the kernels of this GPU, and search them for wrong bits. Both need an NVIDIA GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvfold.kernels.bench import Row

app = typer.Typer(help="Time the attention kernels on this GPU and check them.", no_args_is_help=True)
OPS = ("attend", "pack", "prefill", "linear")
EXIT_BITS_DIFFER = 6
GATE_CASES = 18
# Dense presets whose linear layers are timed; their shapes cover those of the others' attention.
LINEAR_MODELS = ("qwen3-0.6b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "llama-3.1-8b", "llama-3.1-70b")


@app.callback()
def kernels() -> None:
    """Time the attention kernels on this GPU and check them."""


@app.command()
def fuzz(
    cases: Annotated[int, typer.Option(min=1, help="Random cases.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same cases.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Random shapes and contents against the reference codec and reference attention; exits 6 on a mismatch."""
    _require_gpu()
    from kvfold.analysis.out import emit_json, note
    from kvfold.kernels.fuzz import fuzz as run

    broken: list[dict[str, Any]] = []
    for number, (case, faults) in enumerate(run(cases, seed, "cuda"), 1):
        if faults:
            broken.append({"case": str(case), "faults": faults})
            note(f"{case}: {'; '.join(faults)}")
        if number % 100 == 0:
            note(f"{number} of {cases} cases, {len(broken)} broken")
    if as_json:
        emit_json(
            {"cases": cases, "mismatches": len(broken), "seed": seed, "broken": broken, "origin": "measured"}
        )
    else:
        print(f"{cases} cases, {len(broken)} mismatches (seed {seed}, measured)")
    if broken:
        raise typer.Exit(EXIT_BITS_DIFFER)


@app.command()
def bench(
    op: Annotated[str, typer.Option(help=f"What to time, comma-separated: {', '.join(OPS)}.")] = ",".join(
        OPS
    ),
    formats: Annotated[str, typer.Option(help="Formats, comma-separated: bf16, fixed4.")] = "bf16,fixed4",
    grid: Annotated[
        Path | None, typer.Option(help="CSV with columns batch,context_tokens; else the built-in grid.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for costs_<device>.csv.")] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check the kernels, then time them beside torch's on this GPU and write the simulator's cost table."""
    ops, chosen = _split(op, OPS, "--op"), _split(formats, ("bf16", "fixed4"), "--formats")
    _require_gpu()
    import csv
    from datetime import UTC, datetime

    from kvfold.analysis.out import emit_json, note, written_whole
    from kvfold.kernels.bench import COLUMNS, POINTS, Machine, as_columns
    from kvfold.kernels.fuzz import fuzz as check

    points = POINTS if grid is None else _read_grid(grid)
    note(f"checking {GATE_CASES} cases before anything is timed")
    for case, faults in check(GATE_CASES, 0, "cuda"):
        if faults:
            note(f"kvfold: {case}: {'; '.join(faults)}; nothing is timed")
            raise typer.Exit(EXIT_BITS_DIFFER)
    machine, commit, date = Machine(), _commit(), datetime.now(UTC).date().isoformat()
    rows = []
    for row in _rows(ops, points):
        if row.format in chosen or row.op in ("linear", "prefill"):
            rows.append(as_columns(row, machine, commit, date))
            note(f"{row.op} {row.format} {row.kernel}: {row.median_us:.1f} us")
    path = out / f"costs_{machine.device.removeprefix('NVIDIA ').lower().replace(' ', '-')}.csv"
    with written_whole(path) as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    if as_json:
        emit_json({"rows": rows, "path": str(path), "origin": "measured"})
    else:
        print(f"{len(rows)} rows (measured) in {path}")


def _rows(ops: list[str], points: tuple[tuple[int, int], ...]) -> Iterator[Row]:
    from kvfold.kernels.bench import attend_rows, linear_rows, pack_rows, prefill_rows

    if "attend" in ops:
        yield from attend_rows(points, "cuda")
    if "pack" in ops:
        yield from pack_rows("cuda")
    if "prefill" in ops:
        yield from prefill_rows("cuda")
    if "linear" in ops:
        yield from linear_rows(_linear_shapes(), "cuda")


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

    points = []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
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
                    f"got {batch} and {context}"
                )
            points.append((batch, context))
    if not points:
        raise ConfigError(f"{path}: the grid has no points")
    return tuple(points)


def _commit() -> str:
    """The commit of the code that is measured, `unknown` outside a clone."""
    import subprocess

    found = subprocess.run(
        ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short=12", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"
