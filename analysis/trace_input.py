"""How commands are told what a trace file is, and how far it was read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvfold.traces.readers import Stated
    from kvfold.traces.table import Trace

#: Reading that takes less is not worth a line.
_QUIET_S = 2.0
#: Seconds between lines where standard error is no terminal.
_LINE_S = 20.0

TracePath = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="A file, a folder, a pattern in quotes, a .tar, or - for stdin; plain, .gz, .xz or .zst.",
        show_default=False,
    ),
]
TraceFormat = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="NAME", help="A name of docs/traces.md; found from the content if left out."
    ),
]
LogFormat = Annotated[
    str | None,
    typer.Option(
        "--trace-format", metavar="NAME", help="A name of docs/traces.md; found from the content if left out."
    ),
]
Columns = Annotated[
    str,
    typer.Option(
        "--columns",
        metavar="MAP",
        help="Columns of a CSV, JSONL or Parquet of your own (docs/traces.md).",
    ),
]
CharsPerToken = Annotated[
    float | None,
    typer.Option("--chars-per-token", help="Estimate the tokens of texts that come without counts."),
]


def checked(
    format: str | None,
    columns: str = "",
    chars_per_token: float | None = None,
    option: str = "--format",
) -> Stated:
    """What was stated of a trace, or a usage error that names the option."""
    from kvfold.traces.readers import FORMATS, Stated

    if format not in (None, *FORMATS):
        raise typer.BadParameter(f"must be one of {', '.join(FORMATS)}, got {format}", param_hint=option)
    try:
        if columns:
            from kvfold.traces.column_map import parse

            parse(columns)
        return Stated(chars_per_token, columns)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--columns, --chars-per-token") from None


def read(path: str | Path, format: str | None) -> Trace:
    """The trace at ``path``, with its progress on stderr; ``format`` as ``--trace-format`` gives it."""
    from kvfold.traces.load import load

    checked(format, option="--trace-format")
    with progress() as report:
        return load(path, format, report)


@contextmanager
def progress() -> Iterator[Callable[[int, int], None]]:
    """A function that shows on stderr, after some seconds, how far a file was read and when it will be done."""
    import sys
    import time

    started = pass_started = shown = time.monotonic()
    last = 0
    bar: Any = None
    task: Any = None

    def report(done: int, total: int) -> None:
        nonlocal shown, bar, task, last, pass_started
        now = time.monotonic()
        if done < last:  # the file is read again
            pass_started = now
        last = done
        if now - started < _QUIET_S or not total:
            return
        if sys.stderr.isatty():
            if bar is None:
                from rich.console import Console
                from rich.progress import Progress

                bar = Progress(console=Console(stderr=True), transient=True)
                bar.start()
                task = bar.add_task("reading", total=total)
            bar.update(task, completed=done)
        elif now - max(shown, pass_started) > _LINE_S and done:
            from kvfold.analysis.out import note

            shown = now
            left_s = (now - pass_started) * (total - done) / done
            note(f"read {done / total:.0%} of {total:,} bytes, about {left_s:,.0f} s to go")

    try:
        yield report
    finally:
        if bar is not None:
            bar.stop()
