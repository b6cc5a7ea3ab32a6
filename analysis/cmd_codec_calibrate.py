"""`kvfold codec calibrate`: windows of exponents from K/V arrays, for positions that the arrays do not reach."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvfold.codec.calibration import Slot, Table
    from kvfold.codec.rope import Rope
    from kvfold.codec.windows import Windows


def calibrate(
    files: Annotated[
        list[Path],
        typer.Argument(help="Arrays of one layer's K or V from position 0 on, together one table."),
    ],
    out: Annotated[Path, typer.Option(help="Calibration file to write.", dir_okay=False)],
    layer: Annotated[int | None, typer.Option(min=0, help="The layer, kept in the file.")] = None,
    kind: Annotated[Literal["k", "v"] | None, typer.Option(help="K or V, kept in the file.")] = None,
    per: Annotated[
        Literal["channel", "layer"], typer.Option(help="Windows of each head and channel, or one for all.")
    ] = "channel",
    rotate_to: Annotated[
        int | None,
        typer.Option(min=1, help="Add the keys rotated to later positions, up to this many tokens; K only."),
    ] = None,
    rotate_every: Annotated[
        int | None, typer.Option(min=1, help="Tokens between rotated copies; the array's own if left out.")
    ] = None,
    rope_theta: Annotated[float | None, typer.Option(help="RoPE's base.")] = None,
    rope_config: Annotated[Path | None, typer.Option(help="A model's config.json, for RoPE's base.")] = None,
    rope_layout: Annotated[
        Literal["half", "interleaved"],
        typer.Option(
            help="Channels that turn together: (i, i + head_dim/2) as in Hugging Face, or (2i, 2i+1)."
        ),
    ] = "half",
    formats: Annotated[str, typer.Option(help="Formats to measure slots for, comma-separated.")] = "gaac",
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens packed at once; each format's own if left out.")
    ] = None,
    head_axis: Annotated[int, typer.Option(min=0, max=2, help="Axis of the heads in the files.")] = 0,
    add: Annotated[bool, typer.Option(help="Keep the other tables of a file that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write windows and slots of a layer's K or V to a small checked file, which ratio and pack take.

    RoPE moves the exponents of keys with position. Keys of 0..2047 rotated to later positions show where they
    will lie there, so that no long text is needed.
    """
    from kvfold.analysis.cmd_codec_pack import writing
    from kvfold.codec.arrays import load_patterns, save_bytes
    from kvfold.codec.calibration import Table, dump, rotated_copies, windows_from
    from kvfold.codec.errors import BadArrayError
    from kvfold.codec.names import find_format
    from kvfold.codec.rope import rotations

    rope = _rope(rotate_to, rope_theta, rope_config, rope_layout, kind)
    groups = _by_cast(formats)
    arrays = [load_patterns(path, head_axis) for path in files]
    longest = max(array.shape[1] for array in arrays)
    tables = []
    try:
        by_tokens = rotations(longest, rotate_to, rotate_every) if rotate_to else ()
        copies = rotated_copies(arrays, rope, by_tokens)
        for cast, names in groups.items():
            windows = windows_from([find_format(names[0]).coded(copy) for copy in copies], per)
            tables.append(
                Table(
                    windows=windows,
                    layer=layer,
                    kind=kind,
                    cast=cast,
                    per=per,
                    tokens=sum(array.shape[1] for array in arrays),
                    rotated_by_tokens=by_tokens,
                    rope=asdict(rope) if rope else None,
                    slots=_slots(names, copies, windows, block_tokens),
                )
            )
    except ValueError as error:
        raise BadArrayError(f"{', '.join(map(str, files))}: {error}") from None
    written = {table.name for table in tables}
    kept = [other for other in load_tables(out) if other.name not in written] if add and out.exists() else []
    held = sorted([*kept, *tables], key=lambda table: table.name)
    with writing(out):
        save_bytes(out, dump(held).encode())
    _print(out, tables, len(held), as_json)


def load_tables(path: Path) -> list[Table]:
    """The tables of a calibration file; its faults name the file."""
    from kvfold.codec.calibration import load
    from kvfold.codec.errors import BadArrayError, CorruptDataError

    try:
        return load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadArrayError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CorruptDataError(f"{path}: byte {error.start}: a calibration file must be UTF-8") from None
    except CorruptDataError as error:
        raise CorruptDataError(f"{path}: {error}") from None


def load_table(path: Path, layer: int | None, kind: str | None, format_name: str) -> Table:
    """The table of a calibration file for a layer, K or V, and a format's cast."""
    from kvfold.codec.calibration import choose
    from kvfold.codec.names import cast_of
    from kvfold.sim.errors import ConfigError

    try:
        return choose(load_tables(path), layer, kind, cast_of(format_name))
    except ValueError as error:
        raise ConfigError(f"{path}: {error} (--layer and --kind choose)") from None


def rope_of(config: dict[str, Any], layout: Literal["half", "interleaved"], where: str) -> Rope:
    """RoPE as a Hugging Face config.json has it; ConfigError where its rotation depends on the sequence."""
    from kvfold.codec.rope import Rope
    from kvfold.sim.errors import ConfigError

    fields = config.get("text_config", config)
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ConfigError(
            f"{where}: keys can be rotated only under plain RoPE, got rope type {kind!r}; give --rope-theta for "
            f"the part that is plain, or leave out --rotate-to"
        )
    theta = parameters.get("rope_theta", fields.get("rope_theta"))
    share = parameters.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    head_dim = fields.get("head_dim") or 0
    if not head_dim and share != 1.0:
        head_dim = fields.get("hidden_size", 0) // max(1, fields.get("num_attention_heads", 1))
    try:
        return Rope(float(theta), layout, int(head_dim * share) if share != 1.0 else None)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: field rope_theta must be a number above 1, got {theta!r} ({error})"
        ) from None


def _rope(
    rotate_to: int | None,
    theta: float | None,
    config: Path | None,
    layout: Literal["half", "interleaved"],
    kind: str | None,
) -> Rope | None:
    from kvfold.codec.rope import Rope

    given = (theta is not None) + (config is not None)
    if rotate_to is None:
        if given:
            raise typer.BadParameter("needs --rotate-to", param_hint="'--rope-theta' / '--rope-config'")
        return None
    if kind == "v":
        raise typer.BadParameter(
            "values have no position; leave it out for --kind v", param_hint="'--rotate-to'"
        )
    if given != 1:
        raise typer.BadParameter("needs one of --rope-theta and --rope-config", param_hint="'--rotate-to'")
    if config is not None:
        from kvfold.sim.model_config import read_config

        return rope_of(read_config(config), layout, str(config))
    try:
        return Rope(float(theta or 0), layout)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--rope-theta'") from None


def _by_cast(formats: str) -> dict[str, list[str]]:
    """Formats by the cast that their windows belong to: each cast is a table of its own."""
    from kvfold.codec.names import cast_of, find_format, split_names

    groups: dict[str, list[str]] = {}
    for name in split_names(formats):
        try:
            find_format(name)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="'--formats'") from None
        groups.setdefault(cast_of(name), []).append(name)
    return groups


def _slots(
    names: Sequence[str], copies: Sequence[NDArray[np.uint16]], windows: Windows, block_tokens: int | None
) -> tuple[Slot, ...]:
    from kvfold.codec.calibration import Slot
    from kvfold.codec.names import find_format
    from kvfold.codec.ratio import SLOT_SLACK, slot_bytes

    slots = []
    for name in names:
        kv_format = find_format(name)
        tokens = block_tokens or kv_format.block_tokens
        packed = [kv_format.encode(copy, windows, tokens) for copy in copies]
        slots.append(Slot(name, tokens, slot_bytes(packed, 0.0 if kv_format.fixed_size else SLOT_SLACK)))
    return tuple(slots)


def _print(out: Path, tables: Sequence[Table], held: int, as_json: bool) -> None:
    from kvfold.analysis.out import emit_json, say

    if as_json:
        rows = [
            {
                "layer": table.layer,
                "kind": table.kind,
                "cast": table.cast,
                "per": table.per,
                "tokens": table.tokens,
                "rotated_by_tokens": table.rotated_by_tokens,
                "slots": [
                    {
                        "format": slot.format_name,
                        "block_tokens": slot.block_tokens,
                        "slot_bytes": slot.slot_bytes,
                    }
                    for slot in table.slots
                ],
            }
            for table in tables
        ]
        emit_json({"out": str(out), "origin": "measured", "tables_in_file": held, "written": rows})
        return
    for table in tables:
        copies = ", ".join(f"{tokens:,}" for tokens in table.rotated_by_tokens)
        slots = ", ".join(
            f"{slot.format_name} {slot.slot_bytes:,} bytes per {slot.block_tokens} tokens"
            for slot in table.slots
        )
        say(
            f"{out}: {table.name}: windows per {table.per} from {table.tokens:,} tokens"
            f"{f' and copies rotated by {copies} tokens' if copies else ''}; slots, measured: {slots}."
        )
