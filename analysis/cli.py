"""The program `kvfold`: one subcommand per file, heavy imports inside the commands.

Exit codes: 0 ok; 1 internal error; 2 usage or configuration; 3 SLO or gate missed; 4 does not fit memory;
5 bad input file; 6 bits differ; 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, cast

import typer

from kvfold.analysis import (
    cmd_codec,
    cmd_kernels,
    cmd_list,
    cmd_mem,
    cmd_plan,
    cmd_replay,
    cmd_step,
    cmd_traces,
    cmd_validate,
)

_UsageError = cast("type[Exception]", typer.BadParameter.__base__)  # typer exports no name of it

app = typer.Typer(
    name="kvfold",
    help="What a different KV-cache format buys: in the attention kernel, in the decode step, in the service.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("plan")(cmd_plan.plan)
app.command("replay")(cmd_replay.replay)
app.command("step")(cmd_step.step)
app.command("mem")(cmd_mem.mem)
app.command("list")(cmd_list.list_)
app.command("validate")(cmd_validate.validate)
app.add_typer(cmd_traces.app, name="traces")
app.add_typer(cmd_codec.app, name="codec")
app.add_typer(cmd_kernels.app, name="kernels")


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        print(version("kvfold"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")] = False,
) -> None:
    """What a different KV-cache format buys: in the attention kernel, in the decode step, in the service."""


def main() -> None:
    """Run the program and turn each kind of error into its exit code and one line on stderr."""
    from kvfold.codec.errors import BadArrayError, CorruptDataError
    from kvfold.sim.errors import ConfigError, DoesNotFitError
    from kvfold.traces.errors import BadTraceError

    error: Exception | None = None
    try:
        code = app(prog_name="kvfold", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except _UsageError as exception:
        _print_usage_error(exception)
        code = 2
    except (BadTraceError, BadArrayError, CorruptDataError) as exception:
        code, error = 5, exception
    except DoesNotFitError as exception:
        code, error = 4, exception
    except ConfigError as exception:
        code, error = 2, exception
    except Exception as exception:
        code, error = 1, exception
    if "--debug" in sys.argv and error is not None:
        raise error
    if error is not None:
        message = str(error)
        if code == 1:
            message = f"internal error: {type(error).__name__}: {message} (--debug shows where)"
        print(f"kvfold: {message}", file=sys.stderr)
    elif code == 130:
        print("kvfold: interrupted", file=sys.stderr)
    sys.exit(code)


def _print_usage_error(error: Any) -> None:
    """One line; a group of commands without a command is the one that prints its help."""
    text = error.format_message()
    if "\n" not in text:
        command = error.ctx.command_path if error.ctx else "kvfold"
        text = f"kvfold: {text.rstrip('.')} ({command} --help shows the options)"
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
