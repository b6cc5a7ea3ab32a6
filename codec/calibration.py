"""Calibration files: the windows of each (layer, K/V), what they were measured on, and slots, as checked JSON.

FORMAT.md states every field. The file is text, so that it can be read and compared; bases are base64 of one
byte per head and channel. A CRC-32 over the tables catches every changed character of them, and nothing in a
file is executed.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvfold.codec.errors import CorruptDataError
from kvfold.codec.rope import rotate
from kvfold.codec.windows import (
    INNER_WIDTHS,
    NARROW_WIDTH,
    WIDE_WIDTH,
    Windows,
    exponent_histogram,
    windows_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvfold.codec.rope import Rope

VERSION = "0.1"
WIDTHS = (NARROW_WIDTH, WIDE_WIDTH, *INNER_WIDTHS)
LARGEST_CHANNELS = 1 << 24
Per = Literal["channel", "layer"]


@dataclass(frozen=True, slots=True)
class Slot:
    """The slot that calibration pages of one format ask for."""

    format_name: str
    block_tokens: int
    slot_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The calibration of one layer's K or V."""

    windows: Windows  # [kv_head, head_dim]
    layer: int | None
    kind: Literal["k", "v"] | None
    cast: str  # `fp8-e4m3`, with its parameters, for windows of FP8 exponents; empty for BF16
    per: Per  # windows per head and channel, or one for all of them
    tokens: int  # of all arrays, before rotation
    rotated_by_tokens: tuple[int, ...] = ()
    rope: dict[str, Any] | None = None
    slots: tuple[Slot, ...] = field(default=())

    @property
    def name(self) -> str:
        layer = "any layer" if self.layer is None else f"layer {self.layer}"
        return f"{layer}, {self.kind or 'k or v'}, {self.cast or 'bf16'}"

    def slot_bytes(self, format_name: str, block_tokens: int) -> int | None:
        """The slot of a format's blocks, or None where it was not measured."""
        for slot in self.slots:
            if (slot.format_name, slot.block_tokens) == (format_name, block_tokens):
                return slot.slot_bytes
        return None


def rotated_copies(
    arrays: Sequence[NDArray[np.uint16]], rope: Rope | None, by_tokens: Sequence[int]
) -> list[NDArray[np.uint16]]:
    """The arrays and, for each rotation, their copies at later positions."""
    copies = list(arrays)
    if rope is not None:
        copies += [rotate(array, tokens, rope) for tokens in by_tokens for array in arrays]
    return copies


def windows_from(arrays: Sequence[NDArray[np.uint16]], per: Per = "channel") -> Windows:
    """Windows ``[kv_head, head_dim]`` from BF16 patterns ``[kv_head, token, head_dim]``, alike but for tokens.

    ``per="layer"`` counts all heads and channels together and gives every channel the same windows.
    Raises ValueError when there is no array, no value, or when the shapes disagree.
    """
    shapes = sorted({(array.shape[0], array.shape[2]) for array in arrays})
    if len(shapes) != 1:
        raise ValueError(f"calibration arrays must agree in kv_heads and head_dim, got {shapes}")
    histogram = sum((exponent_histogram(array) for array in arrays[1:]), exponent_histogram(arrays[0]))
    if per == "layer":
        histogram = np.broadcast_to(histogram.sum(axis=(0, 1)), histogram.shape)
    return windows_of(histogram)


def dump(tables: Sequence[Table]) -> str:
    """The text of a calibration file; the same tables give the same text. ValueError for two of one name."""
    names = [table.name for table in tables]
    if len(set(names)) != len(names):
        raise ValueError(f"a calibration must have one table per layer and kind, got {', '.join(names)}")
    rows = [_to_row(table) for table in tables]
    file = {"kvfold_calibration": VERSION, "crc32": _crc(rows), "tables": rows}
    return json.dumps(file, indent=1, sort_keys=True, allow_nan=False) + "\n"


def load(text: str) -> list[Table]:
    """The tables of a calibration file. Raises CorruptDataError with rule, value and, where known, the offset."""
    try:
        file = json.loads(text, parse_constant=_no_constant)
    except (json.JSONDecodeError, RecursionError) as error:
        at = error.pos if isinstance(error, json.JSONDecodeError) else 0
        raise CorruptDataError(f"a calibration file must be JSON: {error.__class__.__name__}", at) from None
    if not isinstance(file, dict) or "kvfold_calibration" not in file:
        raise CorruptDataError('a calibration file must be a JSON object with "kvfold_calibration"', 0)
    if file["kvfold_calibration"] != VERSION:
        raise CorruptDataError(f"this program reads version {VERSION}, got {file['kvfold_calibration']!r}")
    if set(file) != {"kvfold_calibration", "crc32", "tables"} or not isinstance(file["tables"], list):
        raise CorruptDataError(f"a calibration file must have crc32 and a list of tables, got {sorted(file)}")
    rows = file["tables"]
    if file["crc32"] != _crc(rows):
        raise CorruptDataError(f"crc32 of the tables must be {_crc(rows)}, got {file['crc32']!r}")
    try:
        tables = [_to_table(row) for row in rows]
        dump(tables)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"a table breaks a rule: {error}") from None
    return tables


def choose(tables: Sequence[Table], layer: int | None, kind: str | None, cast: str) -> Table:
    """The one table of this cast, and of this layer and kind where given; ValueError that names what there is."""
    fitting = [
        table
        for table in tables
        if table.cast == cast and layer in (None, table.layer) and kind in (None, table.kind)
    ]
    if len(fitting) != 1:
        wanted = ", ".join(
            (f"layer {layer}" if layer is not None else "any layer", kind or "k or v", cast or "bf16")
        )
        raise ValueError(
            f"one table must be of {wanted}, got {len(fitting)} of {'; '.join(table.name for table in tables)}"
        )
    return fitting[0]


def _to_row(table: Table) -> dict[str, Any]:
    row = asdict(table) | {"shape": list(table.windows.narrow_base.shape)}
    inner = () if table.windows.inner_bases is None else table.windows.inner_bases
    bases = (table.windows.narrow_base, table.windows.wide_base, *inner)
    row["windows"] = {
        str(width): base64.b64encode(base.tobytes()).decode()
        for width, base in zip(WIDTHS, bases, strict=False)
    }
    return json.loads(json.dumps(row))


def _to_table(row: dict[str, Any]) -> Table:
    row = dict(row)
    kv_heads, head_dim = row.pop("shape")
    widths = [str(width) for width in WIDTHS]
    encoded = row.pop("windows")
    if not 1 <= kv_heads * head_dim <= LARGEST_CHANNELS:
        raise ValueError(f"shape must have 1 to {LARGEST_CHANNELS} channels, got {[kv_heads, head_dim]}")
    if set(encoded) not in ({*widths[:2]}, {*widths}):
        raise ValueError(f"windows must be of {', '.join(widths)} exponents, got {sorted(encoded)}")
    bases = [
        np.frombuffer(base64.b64decode(encoded[width], validate=True), np.uint8).reshape(kv_heads, head_dim)
        for width in widths
        if width in encoded
    ]
    return Table(
        windows=Windows(bases[0], bases[1], np.stack(bases[2:]) if bases[2:] else None),
        rotated_by_tokens=tuple(row.pop("rotated_by_tokens")),
        slots=tuple(Slot(**slot) for slot in row.pop("slots")),
        **row,
    )


def _crc(rows: Any) -> int:
    return zlib.crc32(json.dumps(rows, sort_keys=True).encode())


def _no_constant(name: str) -> None:
    raise CorruptDataError(f"a calibration file must hold finite numbers, got {name}")
