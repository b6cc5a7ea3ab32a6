"""`kvfold codec`: what the KV formats do with real K/V arrays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvfold.codec.formats import Format
    from kvfold.codec.ratio import Measured

app = typer.Typer(help="KV formats on real K/V arrays.", no_args_is_help=True)

EXIT_BITS_DIFFER = 6


@app.callback()
def codec() -> None:
    """KV formats on real K/V arrays."""


@app.command("ratio")
def ratio(
    files: Annotated[
        list[Path], typer.Argument(help="BF16 patterns: .npy, uint16, [kv_head, token, head_dim].")
    ],
    format_name: Annotated[str, typer.Option("--format", help="KV format: bf16 or gaac.")] = "gaac",
    calibrate_on: Annotated[
        list[Path] | None,
        typer.Option(
            help="Array that gives windows and slot; repeat for more, which together give one set. "
            "Without it every file is calibrated on itself, and the output says so."
        ),
    ] = None,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens packed at once.")] = 64,
    head_axis: Annotated[int, typer.Option(min=0, max=2, help="Axis of the heads in the files.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Pack K/V arrays, check that every bit comes back, print what the format saves: encoded and resident.

    With --calibrate-on, give K and V in separate calls: each wants its own windows. Exits 6 if bits differ.
    """
    from kvfold.codec.arrays import load_patterns
    from kvfold.codec.formats import FORMATS
    from kvfold.codec.ratio import calibrate_format, measure
    from kvfold.codec.verify import find_mismatches

    if format_name not in FORMATS:
        known = ", ".join(FORMATS)
        raise typer.BadParameter(f"must be one of {known}, got {format_name!r}", param_hint="'--format'")
    kv_format = FORMATS[format_name]
    calibration = [load_patterns(path, head_axis) for path in calibrate_on or ()]
    for path, patterns in zip(calibrate_on or (), calibration, strict=True):
        _check_fits(path, patterns, kv_format, block_tokens, calibration[0])
    shared = calibrate_format(calibration, kv_format, block_tokens) if calibration else None

    rows: list[Measured] = []
    slots: list[int] = []
    for path in files:
        patterns = load_patterns(path, head_axis)
        _check_fits(path, patterns, kv_format, block_tokens, calibration[0] if calibration else patterns)
        windows, slot = shared or calibrate_format([patterns], kv_format, block_tokens)
        packed = kv_format.encode(patterns, windows, block_tokens)
        if mismatches := find_mismatches(patterns, kv_format.decode(packed)):
            typer.echo(
                f"kvfold: {path}: {mismatches.count} of {patterns.size} values differ after {format_name}; "
                f"first at [kv_head, token, channel]: {'; '.join(mismatches.first)}",
                err=True,
            )
            raise typer.Exit(EXIT_BITS_DIFFER)
        rows.append(measure(patterns, packed, windows, kv_format, slot))
        slots.append(slot)
    report = _report(format_name, files, rows, slots, calibrate_on or [], block_tokens)
    _print(report, as_json)


def _check_fits(
    path: Path, patterns: NDArray[np.uint16], kv_format: Format, block_tokens: int, like: NDArray[np.uint16]
) -> None:
    """The rules that depend on format and options; the file itself is already known to be good."""
    from kvfold.codec.errors import BadArrayError

    kv_heads, tokens, head_dim = patterns.shape
    if head_dim % kv_format.channel_multiple:
        raise BadArrayError(
            f"{path}: head_dim must be a multiple of {kv_format.channel_multiple}, got {head_dim}"
        )
    if tokens < block_tokens:
        raise BadArrayError(
            f"{path}: must hold one full block of {block_tokens} tokens, got {tokens} tokens "
            f"(--block-tokens sets the block, --head-axis the order of axes)"
        )
    if (kv_heads, head_dim) != (like.shape[0], like.shape[2]):
        raise BadArrayError(
            f"{path}: kv_heads and head_dim must be those of the calibration, "
            f"{[like.shape[0], like.shape[2]]}, got {[kv_heads, head_dim]}"
        )


def _report(
    format_name: str,
    files: Sequence[Path],
    rows: Sequence[Measured],
    slots: Sequence[int],
    calibrate_on: Sequence[Path],
    block_tokens: int,
) -> dict[str, Any]:
    from kvfold.codec.ratio import SLOT_SLACK, total

    per_file = [
        {
            "file": str(path),
            "in_sample": not calibrate_on or path in calibrate_on,
            "values": row.elements + row.tail_elements,
            "blocks": len(row.page_bits),
            "slot_bytes": slot,
            **_figures(row),
            "worst_block": _worst_block(path, row, block_tokens),
        }
        for path, row, slot in zip(files, rows, slots, strict=True)
    ]
    return {
        "format": format_name,
        "origin": "measured",
        "block_tokens": block_tokens,
        "calibrated_on": [str(path) for path in calibrate_on],
        "slot_slack": SLOT_SLACK,
        "mismatches": 0,
        **_figures(total(rows)),
        "worst_block": max(
            (row["worst_block"] for row in per_file), key=lambda block: block["bits_per_element"]
        ),
        "files": per_file,
    }


def _figures(row: Measured) -> dict[str, Any]:
    return {
        "encoded_ratio": row.encoded_ratio,
        "bits_per_element": row.bits_per_element,
        "resident_saving": row.resident_saving,
        "entropy_bound_ratio": row.entropy_bound_ratio,
        "mode_shares": row.mode_shares,
        "exception_share": row.exception_share,
        "raw_block_share": row.raw_block_share,
        "raw_tail_share": row.raw_tail_share,
    }


def _worst_block(path: Path, row: Measured, block_tokens: int) -> dict[str, Any]:
    block = int(row.page_bits.argmax())
    return {
        "file": str(path),
        "block": block,
        "first_token": block * block_tokens,
        "bits_per_element": float(row.page_bits[block]),
    }


def _print(report: dict[str, Any], as_json: bool) -> None:
    from kvfold.analysis.out import emit_json, print_table

    if as_json:
        emit_json(report)
        return
    worst = report["worst_block"]
    print_table(
        f"{report['format']}, blocks of {report['block_tokens']} tokens: every bit comes back",
        ("", "measured"),
        [
            ("encoded ratio", f"{report['encoded_ratio']:.4f}"),
            ("bound of a static exponent code", f"{report['entropy_bound_ratio']:.4f}"),
            ("bits per element", f"{report['bits_per_element']:.3f}"),
            ("worst block, bits per element", f"{worst['bits_per_element']:.3f}"),
            *((f"groups in {mode} mode", f"{share:.2%}") for mode, share in report["mode_shares"].items()),
            ("elements outside their narrow window", f"{report['exception_share']:.2%}"),
            ("resident saving", f"{report['resident_saving']:.2%}"),
            ("blocks left raw, over their slot", f"{report['raw_block_share']:.2%}"),
            ("tokens after the last full block", f"{report['raw_tail_share']:.2%}"),
        ],
        f"Worst block: {worst['file']}, tokens from {worst['first_token']}. Windows and slot from "
        f"{', '.join(report['calibrated_on']) or 'each file itself (in-sample)'}; slot = largest "
        f"calibration block + {report['slot_slack']:.1%}. The bound is the order-0 entropy per head-channel "
        f"of these very files.",
    )
    if len(report["files"]) > 1:
        print_table(
            "By file, measured",
            ("file", "encoded ratio", "bits/element", "resident saving"),
            [
                (
                    Path(row["file"]).stem,
                    f"{row['encoded_ratio']:.4f}",
                    f"{row['bits_per_element']:.3f}",
                    f"{row['resident_saving']:.2%}",
                )
                for row in report["files"]
            ],
        )
