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
    """One paragraph on stdout, wrapped at 80 columns so that no word is cut and no number loses its `%`."""
    from textwrap import fill

    kept = text.replace(" %", "\N{NO-BREAK SPACE}%")
    lines = fill(kept, width=80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    print(lines.replace("\N{NO-BREAK SPACE}%", " %"))


# On a narrow terminal names and sentences fold, values do not.
LEAST_NAME_WIDTH = 22
LONGEST_VALUE = 10


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
    """A table on stdout; the first column is left-aligned, the others right-aligned."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    console = Console(highlight=False)
    widths = _column_widths(columns, rows, console.width)
    for index, (column, width) in enumerate(zip(columns, widths, strict=True)):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold", width=width)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    say(title)
    console.print(table)
    if caption:
        say(caption)


def _column_widths(columns: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> list[int]:
    """Widths that fit: the widest column gives way first, names to LEAST_NAME_WIDTH, sentences to their words."""
    cells = [[column, *(row[index] for row in rows)] for index, column in enumerate(columns)]
    widths = [max(map(len, each)) for each in cells]
    least = []
    for each in cells:
        whole = [cell if len(cell) <= LONGEST_VALUE else max(cell.split(), key=len) for cell in each]
        least.append(max(map(len, whole)))
    least[0] = min(widths[0], LEAST_NAME_WIDTH)
    while sum(widths) + 2 * len(widths) + 1 > room:
        wide = [index for index, width in enumerate(widths) if width > least[index]]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def human_bytes(count: float) -> str:
    """Bytes in binary units with the unit spelled out: ``20.0 GiB``."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:,.0f} B"


@contextmanager
def written_whole(path: Path) -> Iterator[IO[str]]:
    """A text file that appears under its name only when everything is written; on an error nothing is left.

    Raises ConfigError where its folder does not let it be written.
    """
    from kvfold.sim.errors import ConfigError

    partial = path.with_name(path.name + ".part")
    try:
        file = partial.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
    try:
        with file:
            yield file
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def made(folder: Path) -> Path:
    """The folder, made with its parents where it is missing; raises ConfigError where it cannot be."""
    from kvfold.sim.errors import ConfigError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: no folder can be made there ({error.strerror})") from None
    return folder
