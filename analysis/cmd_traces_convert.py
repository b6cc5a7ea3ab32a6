"""`kvfold traces convert`: a trace in another format, and what that format cannot hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvfold.analysis.options import Json
from kvfold.analysis.summary import print_summary
from kvfold.analysis.trace_input import CharsPerToken, Columns, TraceFormat, TracePath, checked, progress


def convert(
    file: TracePath,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="File to write: .jsonl, .csv or .parquet.", dir_okay=False)
    ],
    to: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help="canonical; or mooncake, vllm-bench (.jsonl).")
    ] = "canonical",
    format: TraceFormat = None,
    columns: Columns = "",
    chars_per_token: CharsPerToken = None,
    json: Json = False,
) -> None:
    """Write a trace as the canonical table, or as the load that other programs replay.

    The canonical table holds everything and reads back exactly. What another format leaves out is counted.
    """
    stated = checked(format, columns, chars_per_token)
    from kvfold.analysis.out import note, print_table, say
    from kvfold.traces.convert import convert as write

    if not out.parent.is_dir():
        raise typer.BadParameter(f"the folder {out.parent} must exist", param_hint="OUT")
    try:
        with progress() as report:
            summary = write(file, out, to, format, report, stated)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="OUT") from None
    note(f"wrote {out}: {out.stat().st_size:,} bytes")
    print_summary(summary, json)
    if json:
        return
    if summary["not_held"]:
        rows = [(name, f"{count:,}") for name, count in summary["not_held"].items()]
        print_table(f"What {to} does not hold", ("", "calls"), rows)
    if summary["replay_command"]:
        say(summary["replay_command"])
