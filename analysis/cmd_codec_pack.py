"""`kvfold codec pack` and `unpack`: K/V arrays to containers and back."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvfold.analysis.cmd_codec_verify import EXIT_BITS_DIFFER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvfold.codec.formats import Format
    from kvfold.codec.packed import Packed
    from kvfold.codec.windows import Windows

_Out = Annotated[Path, typer.Option(help="File to write, whole or not at all.", dir_okay=False)]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def pack(
    file: Annotated[
        Path, typer.Argument(help="BF16 (uint16) or FP8 (uint8) patterns: .npy, [kv_head, token, head_dim].")
    ],
    out: _Out,
    format_name: Annotated[
        str, typer.Option("--format", help="KV format; parameters after a colon.")
    ] = "gaac",
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration file; without it the array calibrates itself.")
    ] = None,
    layer: Annotated[int | None, typer.Option(min=0, help="Which table of the calibration.")] = None,
    kind: Annotated[Literal["k", "v"] | None, typer.Option(help="K or V; kept in the container.")] = None,
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens packed at once; the format's own if left out.")
    ] = None,
    head_axis: Annotated[int, typer.Option(min=0, max=2, help="Axis of the heads in the file.")] = 0,
    as_json: _Json = False,
) -> None:
    """Pack an array into a container: versioned, checksummed, described byte by byte in codec/FORMAT.md.

    The container is unpacked and compared before it is written; exits 6 if a bit differs.
    """
    from kvfold.analysis.cmd_codec_calibrate import load_table
    from kvfold.codec.arrays import load_values, save_bytes
    from kvfold.codec.container import read, write
    from kvfold.codec.names import name_for

    values = load_values(file, head_axis)
    kv_format = format_like(name_for(format_name, kind), values)
    windows = load_table(calibration, layer, kind, format_name).windows if calibration else None
    packed = _pack(file, values, kv_format, windows, block_tokens)
    data = write(packed, format_name, kind)
    check_same(file, format_name, kv_format.stored(values), kv_format.decode(read(data).packed))
    with writing(out):
        save_bytes(out, data)
    raw_bytes = values.nbytes
    _report(
        {
            "file": str(file),
            "out": str(out),
            "format": format_name,
            "block_tokens": packed.block_tokens,
            "kind": kind,
            "values": values.size,
            "bytes": len(data),
            "bits_per_element": 8 * len(data) / values.size,
            "ratio": raw_bytes / len(data),
            "scale": packed.scale,
            "origin": "measured",
        },
        f"{out}: {len(data):,} bytes, {raw_bytes / len(data):.4f} times smaller than {file} "
        f"(header, windows and the raw tail included); every bit comes back.",
        as_json,
    )


def unpack(
    file: Annotated[Path, typer.Argument(help="A container that `kvfold codec pack` wrote.")],
    out: _Out,
    widen: Annotated[bool, typer.Option(help="Write BF16 also where the container holds FP8.")] = False,
    as_json: _Json = False,
) -> None:
    """Unpack a container to .npy: BF16 as uint16, FP8 as uint8. Every checksum is verified first."""
    from kvfold.codec import container
    from kvfold.codec.arrays import save_values
    from kvfold.codec.errors import BadArrayError, CorruptDataError

    try:
        data = file.read_bytes()
    except OSError as error:
        raise BadArrayError(f"{file}: cannot be read: {error.strerror}") from None
    try:
        contents = container.read(data)
        values = container.decode(contents, widen)
    except CorruptDataError as error:
        raise CorruptDataError(f"{file}: {error}") from None
    with writing(out):
        save_values(out, values)
    _report(
        {
            "file": str(file),
            "out": str(out),
            "format": contents.format_name,
            "kind": contents.kind,
            "block_tokens": contents.packed.block_tokens,
            "scale": contents.packed.scale,
            "shape": list(values.shape),
            "values": values.size,
            "dtype": str(values.dtype),
        },
        f"{out}: {values.size:,} values {list(values.shape)} as {values.dtype} from {contents.format_name}; "
        f"every checksum is right.",
        as_json,
    )


def format_like(format_name: str, values: NDArray[Any]) -> Format:
    """The format that --format names, for arrays of this dtype; a usage error where there is none."""
    from kvfold.codec.names import format_of_values

    try:
        return format_of_values(format_name, values)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--format'") from None


def _pack(
    file: Path, values: NDArray[Any], kv_format: Format, windows: Windows | None, block_tokens: int | None
) -> Packed:
    from kvfold.codec.errors import BadArrayError
    from kvfold.codec.windows import calibrate

    try:
        windows = windows or calibrate([kv_format.coded(values)])
        return kv_format.encode(values, windows, block_tokens or kv_format.block_tokens)
    except ValueError as error:
        raise BadArrayError(f"{file}: {error}") from None


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """A file that cannot be written is a wrong --out."""
    from kvfold.sim.errors import ConfigError

    try:
        yield
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror}); give another --out") from None


def check_same(file: Path, format_name: str, expected: NDArray[Any], actual: NDArray[Any]) -> None:
    """Exit 6 with the first five differences unless every bit is the same."""
    from kvfold.codec.verify import find_mismatches

    if mismatches := find_mismatches(expected, actual):
        typer.echo(
            f"kvfold: {file}: {mismatches.count} of {expected.size} values differ after {format_name}; "
            f"first at [kv_head, token, channel]: {'; '.join(mismatches.first)}",
            err=True,
        )
        raise typer.Exit(EXIT_BITS_DIFFER)


def _report(report: dict[str, Any], text: str, as_json: bool) -> None:
    from kvfold.analysis.out import emit_json, say

    if as_json:
        emit_json(report)
    else:
        say(text)
