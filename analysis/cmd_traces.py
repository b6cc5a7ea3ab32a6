"""`kvfold traces`: look into a request trace, bring it into another format, or make one."""

from __future__ import annotations

import typer

from kvfold.analysis import (
    cmd_traces_change,
    cmd_traces_convert,
    cmd_traces_inspect,
    cmd_traces_synth,
    cmd_traces_validate,
)

app = typer.Typer(
    help="Look into a request trace, convert it, or make one.", no_args_is_help=True, rich_markup_mode=None
)
app.command("inspect")(cmd_traces_inspect.inspect)
app.command("convert")(cmd_traces_convert.convert)
app.command("change")(cmd_traces_change.change)
app.command("validate")(cmd_traces_validate.validate)
app.add_typer(cmd_traces_synth.app, name="synth")
