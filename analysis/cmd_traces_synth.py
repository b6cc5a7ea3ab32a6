"""`kvfold traces synth`: make a synthetic trace, or one like a real trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvfold.analysis.options import Json, parse_tokens
from kvfold.analysis.summary import write_trace
from kvfold.analysis.trace_input import Columns, TraceFormat, checked, progress

if TYPE_CHECKING:
    from kvfold.traces.fit import Like

app = typer.Typer(help="Make a synthetic trace.", invoke_without_command=True, rich_markup_mode=None)

_Seed = Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same bytes.")]
_Out = Annotated[Path, typer.Option("--out", help="File to write: .jsonl, .csv or .parquet.", dir_okay=False)]
_Requests = Annotated[int, typer.Option("--requests", min=1)]
_Rate = Annotated[float, typer.Option("--rate", help="Requests per second.")]
_Clients = Annotated[int, typer.Option("--clients", min=1, help="Clients, whose rates fall as 1 / rank.")]
_Active = Annotated[
    float,
    typer.Option("--active-share", help="Share of the time that a client is active: 1 is a Poisson stream."),
]
_Memory = Annotated[
    float, typer.Option("--memory", metavar="SECONDS", help="How long clients stay active or inactive.")
]


@app.callback()
def synth(
    context: typer.Context,
    like: Annotated[
        str | None,
        typer.Option("--like", metavar="FILE", help="A trace to fit a generator to; needs --out."),
    ] = None,
    format: TraceFormat = None,
    columns: Columns = "",
    out: Annotated[Path | None, typer.Option("--out", help="File to write.", dir_okay=False)] = None,
    seed: _Seed = 42,
    json: Json = False,
) -> None:
    """Make a synthetic trace: one of the commands below, or `--like FILE --out FILE`."""
    if context.invoked_subcommand is not None:
        if like is not None:
            raise typer.BadParameter("stands alone, without a command after it", param_hint="--like")
        return
    if like is None:
        print(context.get_help())
        raise typer.Exit(2)
    if out is None:
        raise typer.BadParameter("is needed beside --like", param_hint="--out")
    stated = checked(format, columns)
    from kvfold.traces.fit import compared
    from kvfold.traces.fit import like as fit
    from kvfold.traces.load import load

    with progress() as report:
        real = load(like, format, report, stated)
    try:
        pair = fit(real, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--like") from None
    rows = compared(pair)
    names = ("name", "real", "synthetic", "change")
    table = [dict(zip(names, (*row, _change(*row[1:])), strict=True)) for row in rows]
    write_trace(pair.synthetic, out, json, {"comparison": table, "notes": list(pair.notes)})
    if not json:
        _print(pair, rows)


@app.command("poisson")
def poisson(
    out: _Out,
    requests: _Requests = 10_000,
    rate: _Rate = 8.0,
    input_tokens: Annotated[
        int, typer.Option("--input-tokens", min=1, help="Prompt tokens of each.")
    ] = 1_000,
    output_tokens: Annotated[
        int, typer.Option("--output-tokens", min=1, help="Output tokens of each.")
    ] = 200,
    seed: _Seed = 42,
    json: Json = False,
) -> None:
    """Single-shot requests of one size with exponential gaps between arrivals."""
    from kvfold.traces.synth import poisson as make

    _check_positive(rate, "--rate")
    write_trace(make(requests, rate, input_tokens, output_tokens, seed), out, json)


@app.command("sample")
def sample(out: _Out, seed: _Seed = 42, json: Json = False) -> None:
    """Chat and agent sessions with tool and human waits and shared prompts, like the bundled sample."""
    from kvfold.traces.synth import sample as make

    write_trace(make(seed), out, json)


@app.command("agent")
def agent(
    out: _Out,
    sessions: Annotated[int, typer.Option("--sessions", min=1)] = 200,
    starts: Annotated[
        float, typer.Option("--sessions-per-hour", help="Rate at which sessions start.")
    ] = 60.0,
    context_limit: Annotated[
        str | None,
        typer.Option(
            "--context-limit",
            metavar="TOKENS",
            help="Longest context, such as 128K; else as recorded, up to 900,000 tokens.",
        ),
    ] = None,
    clients: _Clients = 20,
    active_share: _Active = 0.33,
    memory: _Memory = 7_200.0,
    seed: _Seed = 42,
    json: Json = False,
) -> None:
    """Agent sessions with the waits, growth and compactions of recorded Claude Code sessions (WEKA)."""
    from kvfold.traces.arrivals import Clients
    from kvfold.traces.published import AGENT
    from kvfold.traces.synth_agent import agents, with_limit

    _check(starts, active_share, memory, "--sessions-per-hour")
    model = AGENT
    if context_limit is not None:
        try:
            model = with_limit(AGENT, parse_tokens(context_limit))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--context-limit") from None
    arrivals = Clients(starts / 3_600, active_share, memory, clients)
    write_trace(agents(model, sessions, arrivals, seed), out, json)


@app.command("chat")
def chat(
    out: _Out,
    requests: _Requests = 10_000,
    rate: _Rate = 5.53,
    system_tokens: Annotated[
        int, typer.Option("--system-tokens", min=0, help="Prompt tokens that all requests share.")
    ] = 0,
    clients: _Clients = 20,
    active_share: _Active = 0.63,
    memory: _Memory = 92.0,
    seed: _Seed = 42,
    json: Json = False,
) -> None:
    """Single-shot chat with the token counts of Azure's conversation trace, from few bursty clients."""
    from dataclasses import replace

    from kvfold.traces.arrivals import Clients
    from kvfold.traces.published import CHAT
    from kvfold.traces.synth_chat import chat as make

    _check(rate, active_share, memory, "--rate")
    arrivals = Clients(rate, active_share, memory, clients)
    write_trace(make(replace(CHAT, system_tokens=system_tokens), requests, arrivals, seed), out, json)


@app.command("rag")
def rag(
    out: _Out,
    requests: _Requests = 7_106,
    rate: _Rate = 0.0118,
    clients: _Clients = 20,
    active_share: _Active = 1.0,
    memory: _Memory = 92.0,
    seed: _Seed = 42,
    json: Json = False,
) -> None:
    """Retrieval requests with the chunks and lengths of a university's question service (RAGPulse)."""
    from kvfold.traces.arrivals import Clients
    from kvfold.traces.published import RAG
    from kvfold.traces.synth_rag import rag as make

    _check(rate, active_share, memory, "--rate")
    write_trace(make(RAG, requests, Clients(rate, active_share, memory, clients), seed), out, json)


@app.command("servegen")
def servegen(
    folder: Annotated[
        Path, typer.Argument(help="A category of ServeGen's data.", exists=True, file_okay=False)
    ],
    out: _Out,
    start: Annotated[
        float, typer.Option("--start", min=0, metavar="SECONDS", help="Of the data's days.")
    ] = 0.0,
    duration: Annotated[float, typer.Option("--duration", metavar="SECONDS")] = 3_600.0,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Mean requests per second; else the clients' own.")
    ] = None,
    seed: _Seed = 42,
    json: Json = False,
) -> None:
    """Requests of ServeGen's clients, by their recorded rates, burstiness and lengths per window."""
    from kvfold.traces.servegen import servegen as make

    _check_positive(duration, "--duration")
    if rate is not None:
        _check_positive(rate, "--rate")
    try:
        trace = make(folder, seed, start, duration, rate)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    write_trace(trace, out, json)


def _check(rate: float, active_share: float, memory: float, rate_option: str) -> None:
    _check_positive(rate, rate_option)
    _check_positive(memory, "--memory")
    if not 0 < active_share <= 1:
        raise typer.BadParameter(
            f"must be above 0 and at most 1, got {active_share}", param_hint="--active-share"
        )


def _check_positive(value: float, option: str) -> None:
    if not 0 < value < float("inf"):
        raise typer.BadParameter(f"must be a positive number, got {value}", param_hint=option)


def _change(real: float, synthetic: float) -> float:
    return synthetic / real - 1 if real else float("nan")


def _print(pair: Like, rows: list[tuple[str, float, float]]) -> None:
    from kvfold.analysis.out import print_table, say
    from kvfold.analysis.summary import number

    cells = [
        (
            name,
            number(real),
            number(made),
            "-" if real != real or made != made or not real else f"{_change(real, made):+.1%}",
        )
        for name, real, made in rows
    ]
    print_table("Real and synthetic", ("", "real", "synthetic", "change"), cells)
    for note in pair.notes:
        say(f"! {note}")
