"""`kvfold codec ratio`: what a format saves on real K/V arrays, encoded and resident, beside the entropy bound."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvfold.codec.formats import Format
    from kvfold.codec.ratio import Measured
    from kvfold.codec.windows import Windows


def ratio(
    files: Annotated[
        list[Path],
        typer.Argument(help="BF16 (uint16) or FP8 (uint8) patterns: .npy, [kv_head, token, head_dim]."),
    ],
    format_name: Annotated[
        str,
        typer.Option("--format", help="KV format, as in gaac, esc3+fp8-e4m3 or gaac:group=16,axis=token."),
    ] = "gaac",
    calibrate_on: Annotated[
        list[Path] | None,
        typer.Option(
            help="Array that gives windows and slot; repeat for more, which together give one set. "
            "Without it every file is calibrated on itself, and the output says so."
        ),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="File of `kvfold codec calibrate` that gives windows and slot.")
    ] = None,
    layer: Annotated[int | None, typer.Option(min=0, help="Which table of the calibration file.")] = None,
    kind: Annotated[
        Literal["k", "v"] | None, typer.Option(help="Which table of the calibration file.")
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens packed at once; the format's own if left out.")
    ] = None,
    head_axis: Annotated[int, typer.Option(min=0, max=2, help="Axis of the heads in the files.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Pack K/V arrays, check that every bit comes back, print what the format saves: encoded and resident.

    Give K and V in separate calls: each wants its own windows. FP8 formats are checked against their cast.
    Exits 6 if bits differ.
    """
    from kvfold.analysis.cmd_codec_pack import check_same, format_like
    from kvfold.codec.arrays import load_values
    from kvfold.codec.ratio import calibrate_format, measure

    if calibration and calibrate_on:
        raise typer.BadParameter("excludes --calibrate-on", param_hint="'--calibration'")
    arrays = [load_values(path, head_axis) for path in (*(calibrate_on or ()), *files)]
    kv_format = format_like(format_name, arrays[0])
    tokens = block_tokens or kv_format.block_tokens
    for path, values in zip((*(calibrate_on or ()), *files), arrays, strict=True):
        _check_fits(path, values, kv_format, tokens, arrays[0])
    given = arrays[: len(calibrate_on or ())]
    shared = calibrate_format(given, kv_format, tokens) if given else None
    if calibration:
        shared = _calibrated(calibration, layer, kind, format_name, tokens, arrays[0])

    rows: list[Measured] = []
    slots: list[int] = []
    for path, values in zip(files, arrays[len(given) :], strict=True):
        windows, slot = shared or calibrate_format([values], kv_format, tokens)
        packed = kv_format.encode(values, windows, tokens)
        check_same(path, format_name, kv_format.stored(values), kv_format.decode(packed))
        rows.append(measure(values, packed, windows, kv_format, slot))
        slots.append(slot)
    origin = [calibration] if calibration else calibrate_on or []
    report = _report(format_name, kv_format, files, rows, slots, origin, tokens)
    _print(report, as_json)


def _check_fits(
    path: Path, values: NDArray[Any], kv_format: Format, block_tokens: int, like: NDArray[Any]
) -> None:
    """The rules that depend on format and options; the file itself is already known to be good."""
    from kvfold.codec.errors import BadArrayError

    kv_heads, tokens, head_dim = values.shape
    if values.dtype != like.dtype:
        raise BadArrayError(
            f"{path}: dtype must be that of the other arrays, {like.dtype}, got {values.dtype}"
        )
    if head_dim % kv_format.channel_multiple:
        raise BadArrayError(
            f"{path}: head_dim must be a multiple of {kv_format.channel_multiple}, got {head_dim}"
        )
    if block_tokens % kv_format.block_multiple:
        raise typer.BadParameter(
            f"must be a multiple of {kv_format.block_multiple}, got {block_tokens}",
            param_hint="'--block-tokens'",
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


def _calibrated(
    path: Path, layer: int | None, kind: str | None, format_name: str, block_tokens: int, like: NDArray[Any]
) -> tuple[Windows, int]:
    from kvfold.analysis.cmd_codec_calibrate import load_table
    from kvfold.codec.errors import BadArrayError
    from kvfold.sim.errors import ConfigError

    table = load_table(path, layer, kind, format_name)
    slot = table.slot_bytes(format_name, block_tokens)
    if slot is None:
        raise ConfigError(
            f"{path}: {table.name} has no slot of {format_name} in blocks of {block_tokens} tokens; "
            f"calibrate with --formats {format_name} --block-tokens {block_tokens}"
        )
    if table.windows.narrow_base.shape != (like.shape[0], like.shape[2]):
        raise BadArrayError(
            f"{path}: {table.name} is of {list(table.windows.narrow_base.shape)} heads and channels, "
            f"got arrays of {[like.shape[0], like.shape[2]]}"
        )
    return table.windows, slot


def _report(
    format_name: str,
    kv_format: Format,
    files: Sequence[Path],
    rows: Sequence[Measured],
    slots: Sequence[int],
    calibrated_on: Sequence[Path],
    block_tokens: int,
) -> dict[str, Any]:
    from kvfold.codec.ratio import SLOT_SLACK, total

    is_fp8 = kv_format.plain_bits < 8
    per_file = [
        {
            "file": str(path),
            "in_sample": not calibrated_on or path in calibrated_on,
            "values": row.elements + row.tail_elements,
            "blocks": len(row.page_bits),
            "slot_bytes": slot,
            **_figures(row, is_fp8),
            "worst_block": _worst_block(path, row, block_tokens),
        }
        for path, row, slot in zip(files, rows, slots, strict=True)
    ]
    return {
        "format": format_name,
        "origin": "measured",
        "block_tokens": block_tokens,
        "calibrated_on": [str(path) for path in calibrated_on],
        "slot_slack": 0.0 if kv_format.fixed_size else SLOT_SLACK,
        "mismatches": 0,
        **_figures(total(rows), is_fp8),
        "worst_block": max(
            (row["worst_block"] for row in per_file), key=lambda block: block["bits_per_element"]
        ),
        "files": per_file,
    }


def _figures(row: Measured, is_fp8: bool) -> dict[str, Any]:
    return {
        "encoded_ratio": row.encoded_ratio,
        "ratio_to_fp8": row.encoded_ratio / 2 if is_fp8 else None,
        "bits_per_element": row.bits_per_element,
        "resident_saving": row.resident_saving,
        "pooled_saving": row.pooled_saving,
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
        "ratio": 16 / float(row.page_bits[block]),
    }


def _print(report: dict[str, Any], as_json: bool) -> None:
    from kvfold.analysis.out import emit_json, print_table

    if as_json:
        emit_json(report)
        return
    worst = report["worst_block"]
    pooled = report["pooled_saving"]
    print_table(
        f"{report['format']}, blocks of {report['block_tokens']} tokens: every bit comes back"
        + (" as the cast left it" if report["ratio_to_fp8"] else ""),
        ("", "measured"),
        [
            ("encoded ratio, to BF16", f"{report['encoded_ratio']:.4f}"),
            *([("encoded ratio, to FP8", f"{report['ratio_to_fp8']:.4f}")] if report["ratio_to_fp8"] else []),
            ("bound of a static exponent code", f"{report['entropy_bound_ratio']:.4f}"),
            ("worst block's ratio", f"{worst['ratio']:.4f}"),
            ("bits per element", f"{report['bits_per_element']:.3f}"),
            ("worst block, bits per element", f"{worst['bits_per_element']:.3f}"),
            *((f"coded as {mode}", f"{share:.2%}") for mode, share in report["mode_shares"].items()),
            ("elements outside their window", f"{report['exception_share']:.2%}"),
            ("resident saving, in slots", f"{report['resident_saving']:.2%}"),
            *([("resident saving, planes and chunks", f"{pooled:.2%}")] if pooled is not None else []),
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
            ("file", "ratio", "bound", "worst block", "in slots", "in chunks"),
            [
                (
                    Path(row["file"]).stem,
                    f"{row['encoded_ratio']:.4f}",
                    f"{row['entropy_bound_ratio']:.4f}",
                    f"{row['worst_block']['ratio']:.4f}",
                    f"{row['resident_saving']:.2%}",
                    "" if row["pooled_saving"] is None else f"{row['pooled_saving']:.2%}",
                )
                for row in report["files"]
            ],
        )
