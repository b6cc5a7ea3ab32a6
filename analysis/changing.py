"""Options that change a trace before a command uses it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.traces.changes import Changes

if TYPE_CHECKING:
    from kvfold.traces.table import Trace

_RANGE = re.compile(r"(\d+(?:\.\d+)?)?:(\d+(?:\.\d+)?)?")


def _range(text: str) -> tuple[float, float]:
    match = _RANGE.fullmatch(text)
    low, high = (float(match[1] or 0), float(match[2] or "inf")) if match else (1.0, 0.0)
    if not low <= high or text == ":":
        raise typer.BadParameter(f"must be FROM:TO, one of them may be left out, got {text!r}")
    return low, high


def _options(
    window: Annotated[
        Any,
        typer.Option("--window", parser=_range, metavar="FROM:TO", help="Only arrivals in these seconds."),
    ] = None,
    only_model: Annotated[
        list[str] | None, typer.Option("--only-model", help="Only calls of this model; may be repeated.")
    ] = None,
    only_tenant: Annotated[
        list[str] | None, typer.Option("--only-tenant", help="Only calls of this tenant; may be repeated.")
    ] = None,
    only_session: Annotated[
        list[int] | None, typer.Option("--only-session", help="Only this session_id; may be repeated.")
    ] = None,
    input_range: Annotated[
        Any,
        typer.Option("--input-range", parser=_range, metavar="FROM:TO", help="Only such prompts, in tokens."),
    ] = None,
    output_range: Annotated[
        Any,
        typer.Option(
            "--output-range", parser=_range, metavar="FROM:TO", help="Only such outputs, in tokens."
        ),
    ] = None,
    sample_sessions: Annotated[
        int | None, typer.Option("--sample-sessions", min=1, help="So many sessions, at random.")
    ] = None,
    cap_idle: Annotated[
        float | None,
        typer.Option(
            "--cap-idle", min=0, metavar="SECONDS", help="No longer time in which nothing at all happens."
        ),
    ] = None,
    speed_up: Annotated[
        float | None,
        typer.Option("--speed-up", metavar="FACTOR", help="Arrivals: 2 is twice as many a second."),
    ] = None,
    scale_waits: Annotated[
        bool, typer.Option("--scale-waits", help="Waits are divided by the factor of --speed-up too.")
    ] = False,
    infer_turns: Annotated[
        bool, typer.Option("--infer-turns", help="Sessions from prefix chains, where the source has none.")
    ] = False,
    spread_clock: Annotated[
        bool, typer.Option("--spread-clock", help="Arrivals of one tick are spread over it.")
    ] = False,
    change_seed: Annotated[
        int, typer.Option("--change-seed", min=0, help="Of --spread-clock and --sample-sessions.")
    ] = 42,
) -> Changes:
    try:
        return Changes(
            infer_turns=infer_turns,
            spread_clock=spread_clock,
            window_s=window,
            model=tuple(only_model or ()),
            tenant=tuple(only_tenant or ()),
            session=tuple(only_session or ()),
            input_tokens=input_range,
            output_tokens=output_range,
            sessions=sample_sessions,
            idle_s=cap_idle,
            rate=speed_up,
            scale_waits=scale_waits,
            seed=change_seed,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def changing(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options above; it gets them as the keyword ``changes``, a `Changes`."""
    mine, more = (inspect.signature(each, eval_str=True) for each in (command, _options))

    @wraps(command)
    def run(**options: Any) -> None:
        chosen = {name: options.pop(name) for name in more.parameters}
        command(**options, changes=_options(**chosen))

    own = [each for name, each in mine.parameters.items() if name != "changes"]
    # typer reads the signature for names and defaults, and the annotations for types
    signature = mine.replace(parameters=[*own, *more.parameters.values()])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
    return run


def changed(trace: Trace, changes: Changes) -> Trace:
    """The trace after ``changes``; each says on stderr what it did."""
    from kvfold.analysis.out import note

    try:
        trace, lines = changes.apply(trace)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    for line in lines:
        note(line)
    return trace
