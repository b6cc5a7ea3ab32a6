"""`kvfold codec`: what the KV formats do with real K/V arrays."""

from __future__ import annotations

import typer

from kvfold.analysis import cmd_codec_calibrate, cmd_codec_pack, cmd_codec_ratio, cmd_codec_verify

app = typer.Typer(help="KV formats on real K/V arrays.", no_args_is_help=True)
app.command("ratio")(cmd_codec_ratio.ratio)
app.command("calibrate")(cmd_codec_calibrate.calibrate)
app.command("pack")(cmd_codec_pack.pack)
app.command("unpack")(cmd_codec_pack.unpack)
app.command("verify")(cmd_codec_verify.verify)


@app.callback()
def codec() -> None:
    """KV formats on real K/V arrays."""
