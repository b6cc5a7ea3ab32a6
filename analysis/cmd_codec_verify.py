"""`kvfold codec verify`: does every bit come back, and is every broken file noticed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvfold.codec.corruption import Outcomes
    from kvfold.codec.verify import Verified

EXIT_BITS_DIFFER = 6
PROGRESS_EVERY_S = 10.0


def verify(
    values: Annotated[str, typer.Option(help="Values to send through each format, as in 1e7.")] = "1e7",
    formats: Annotated[str, typer.Option(help="Formats, comma-separated, or all.")] = "all",
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same values.")] = 0,
    mutations: Annotated[
        int, typer.Option(min=0, help="Broken containers to read, per format; half with checksums repaired.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Send all 65,536 patterns, planted and random values through the formats and compare every bit.

    FP8 formats must give back what the cast keeps, and every bit of FP8 values. Memory does not grow with
    --values. With --mutations, broken containers must be refused or give the right data. Exits 6 otherwise.
    """
    from kvfold.analysis.out import emit_json

    wanted = _count(values)
    rows = [_verify(name, wanted, seed, mutations) for name in _chosen(formats)]
    failures = sum(row["mismatches"] + row["undetected_mutations"] for row in rows)
    report = {
        "origin": "measured",
        "seed": seed,
        "values": sum(row["values"] for row in rows),
        "mismatches": sum(row["mismatches"] for row in rows),
        "undetected_mutations": sum(row["undetected_mutations"] for row in rows),
        "formats": rows,
    }
    if as_json:
        emit_json(report)
    else:
        _print(report)
    if failures:
        raise typer.Exit(EXIT_BITS_DIFFER)


def _count(text: str) -> int:
    try:
        count = float(text)
    except ValueError:
        count = 0.0
    if not 1 <= count <= 1e15 or count != int(count):
        raise typer.BadParameter(
            f"must be a whole number from 1 to 1e15, got {text!r}", param_hint="'--values'"
        )
    return int(count)


def _chosen(formats: str) -> list[str]:
    from kvfold.codec.names import find_format, split_names

    names = split_names(formats)
    for name in names:
        try:
            find_format(name)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="'--formats'") from None
    return names


def _verify(name: str, values: int, seed: int, mutations: int) -> dict[str, Any]:
    outcomes = _mutated(name, seed, mutations) if mutations else []
    found = _sent(name, values, seed)
    return {
        "format": name,
        "values": found.values,
        "mismatches": found.mismatches,
        "first_mismatches": list(found.first),
        "mutations": sum(one.mutations for one in outcomes),
        "refused_mutations": sum(one.refused for one in outcomes),
        "undetected_mutations": sum(one.undetected for one in outcomes),
    }


def _sent(name: str, values: int, seed: int) -> Verified:
    """Progress and rate go to stderr: wall-clock times are never part of the result."""
    from time import monotonic

    from kvfold.analysis.out import note
    from kvfold.codec.verify import Verified, verify_format

    start_s = told_s = monotonic()
    found = Verified(0, 0)
    for found in verify_format(name, values, seed):
        now_s = monotonic()
        if now_s - told_s > PROGRESS_EVERY_S:
            note(f"{name}: {found.values:.3g} of {values:.3g} values, {found.mismatches} mismatches")
            told_s = now_s
    rate = found.values / (monotonic() - start_s)
    note(
        f"{name}: {found.values:,} values, {found.mismatches} mismatches, {rate / 1e6:,.1f} million a second"
    )
    return found


def _mutated(name: str, seed: int, mutations: int) -> list[Outcomes]:
    from kvfold.analysis.out import note
    from kvfold.codec.corruption import try_mutations
    from kvfold.codec.golden import golden_bytes

    data = golden_bytes(name, "outlier")
    halves = ((mutations - mutations // 2, False), (mutations // 2, True))
    outcomes = [try_mutations(data, count, seed, sealed=sealed) for count, sealed in halves]
    note(f"{name}: {mutations:,} mutations, {sum(one.refused for one in outcomes):,} refused")
    return outcomes


def _print(report: dict[str, Any]) -> None:
    from kvfold.analysis.out import print_table

    mutated = any(row["mutations"] for row in report["formats"])
    columns = ("format", "values", "mismatches", *(("mutations", "undetected") if mutated else ()))
    print_table(
        "Every bit comes back" if report["mismatches"] == 0 else "BITS DIFFER",
        columns,
        [
            (
                row["format"],
                f"{row['values']:,}",
                f"{row['mismatches']:,}",
                *((f"{row['mutations']:,}", f"{row['undetected_mutations']:,}") if mutated else ()),
            )
            for row in report["formats"]
        ],
        f"Measured with seed {report['seed']}: all 65,536 patterns in every lane, planted and random values.",
    )
    for row in report["formats"]:
        for line in row["first_mismatches"]:
            print(f"{row['format']}: {line}")
