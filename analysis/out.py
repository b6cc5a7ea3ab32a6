"""What every command prints with: strict JSON for machines, tables for people."""

from __future__ import annotations

import json
import math
import sys
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


def plain(value: Any) -> Any:
    """NumPy scalars and arrays, tuples and NaN turned into what strict JSON can hold (NaN becomes null).

    An infinite number has no honest JSON form and raises ValueError.
    """
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        if math.isinf(value):
            raise ValueError("an infinite number cannot be printed as JSON")
        return None if math.isnan(value) else value
    return value


def emit_json(value: Any) -> None:
    """Print one strict JSON object on stdout: sorted keys, no NaN, the same bytes for the same value."""
    sys.stdout.write(json.dumps(plain(value), sort_keys=True, indent=2, allow_nan=False) + "\n")


def note(text: str) -> None:
    """Progress and log lines: stderr, never stdout."""
    print(text, file=sys.stderr)


def say(text: str) -> None:
    """One paragraph on stdout, wrapped at 80 columns so that no word is cut."""
    from textwrap import fill

    print(fill(text, width=80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
    """A table on stdout; the first column is left-aligned, the others right-aligned."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title,
        title_justify="left",
        caption=caption or None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(highlight=False).print(table)


def human_bytes(count: float) -> str:
    """Bytes in binary units with the unit spelled out: ``20.0 GiB``."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:,.0f} B"


@contextmanager
def written_whole(path: Path) -> Iterator[IO[str]]:
    """A text file that appears under its name only when everything is written; on an error nothing is left."""
    partial = path.with_name(path.name + ".part")
    try:
        with partial.open("w", encoding="utf-8", newline="") as file:
            yield file
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
