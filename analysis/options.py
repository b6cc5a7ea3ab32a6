"""Options that several commands share, and the ways in which sizes and token counts are written."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import typer

from kvfold.sim.errors import ConfigError

_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
BYTE_UNITS = _DECIMAL | _BINARY
#: K, M as context lengths are spoken of: 64K is 65,536 tokens.
TOKEN_UNITS = {"": 1, "K": 2**10, "M": 2**20}
_NUMBER = r"(\d{1,15}(?:\.\d{1,9})?)"
LARGEST = 2**63 - 1


def parse_bytes(text: str) -> int:
    """A size with its unit: `20GB` is 20 * 10^9 bytes, `20GiB` 20 * 2^30; a number alone counts bytes.

    Raises ConfigError for anything else, and for sizes below one byte or above 2^63 - 1.
    """
    return _parse(text, BYTE_UNITS | {"": 1}, "a size", "20GB or 20GiB")


def parse_tokens(text: str) -> int:
    """A number of tokens: `65536`, or `64K` = 64 * 1,024. Raises ConfigError for anything else."""
    return _parse(text, TOKEN_UNITS, "a number of tokens", "65536 or 64K")


def _parse(text: str, units: dict[str, int], what: str, example: str) -> int:
    match = re.fullmatch(_NUMBER + r"\s*([A-Za-z]*)", text.strip().replace(",", ""))
    unit = match[2].upper() if match else ""
    if not match or unit not in units:
        raise ConfigError(f"{what} must be written like {example}, got {text!r}")
    value = Decimal(match[1]) * units[unit]
    if not 1 <= value <= LARGEST or value != int(value):
        raise ConfigError(f"{what} must be a whole number from 1 to 2^63 - 1, got {text!r}")
    return int(value)


def _option(parse: Callable[[str], int]) -> Callable[[str], int]:
    """The parser with its error as a usage error, so that the message names the option."""

    def parsed(text: str) -> int:
        try:
            return parse(text)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from error

    return parsed


def _in_a_folder(file: Path | None) -> Path | None:
    """A file that is written last: that its folder is missing must be said before hours of work."""
    if file is not None and not file.parent.is_dir():
        raise typer.BadParameter(f"the folder {file.parent} must exist")
    return file


Model = Annotated[
    str, typer.Option("--model", help="Name from `kvfold list models`, or a path to a config.json.")
]
Gpu = Annotated[str, typer.Option("--gpu", help="Name from `kvfold list gpus`, or a path to a GPU file.")]
Format = Annotated[str, typer.Option("--format", help="KV format, from `kvfold list formats`.")]
Tp = Annotated[int, typer.Option("--tp", min=1, help="GPUs of a tensor-parallel group.")]
Weights = Annotated[
    str, typer.Option("--weights", metavar="FORMAT", help="Weights: bf16, fp8, w4a16 or w4a16-mlp.")
]
MaxContext = Annotated[
    int | None,
    typer.Option(
        "--max-context",
        parser=_option(parse_tokens),
        metavar="TOKENS",
        help="Longest context; else the model's.",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context", parser=_option(parse_tokens), metavar="TOKENS", help="Tokens per sequence, such as 64K."
    ),
]
KvBudget = Annotated[
    int | None,
    typer.Option(
        "--kv-budget",
        parser=_option(parse_bytes),
        metavar="SIZE",
        help="KV pool per GPU, such as 20GiB or 20GB.",
    ),
]
NumGpuBlocks = Annotated[
    int | None,
    typer.Option(
        "--num-gpu-blocks", min=1, help="KV pool per GPU as an engine counts it: BF16 pages of 16 tokens."
    ),
]
GpuMemoryUtilization = Annotated[
    float, typer.Option("--gpu-memory-utilization", help="Share of device memory that the engine may use.")
]
Costs = Annotated[
    Path | None,
    typer.Option(
        "--costs",
        exists=True,
        dir_okay=False,
        metavar="FILE",
        help="Cost table as kvfold kernels bench writes it, in place of the packaged one.",
    ),
]
StrictCosts = Annotated[
    bool,
    typer.Option(
        "--strict-costs", help="Refuse attention and linear layers that are not measured or interpolated."
    ),
]
Report = Annotated[
    Path | None,
    typer.Option("--report", dir_okay=False, callback=_in_a_folder, help="HTML file to write."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Concurrency = Annotated[
    int | None, typer.Option("--concurrency", min=1, help="Live sessions (or single calls) at once.")
]
MaxNumSeqs = Annotated[int, typer.Option("--max-num-seqs", help="Batch cap.")]
MaxNumBatchedTokens = Annotated[
    int, typer.Option("--max-num-batched-tokens", help="Tokens computed in one step at most.")
]
Retention = Annotated[
    str,
    typer.Option(
        "--retention",
        metavar="POLICY",
        help="KV of a session that waits: lru, keep, drop, ttl:SECONDS, swap, least-waste or oracle.",
    ),
]
NoPrefixCaching = Annotated[
    bool, typer.Option("--no-prefix-caching", help="No call finds the KV of an earlier one.")
]
Scheduler = Annotated[
    str,
    typer.Option(
        "--scheduler",
        metavar="ORDER",
        help="Who goes first and is preempted last: fcfs, sessions-first, or tenants:A,B (then all others).",
    ),
]
Preemption = Annotated[
    str, typer.Option("--preemption", help="Preempted sequences: recompute, or swap to host memory.")
]
SloText = Annotated[
    str, typer.Option("--slo", help="chat, interactive, agent, offline, or ttft=2s,tpot=100ms.")
]
KeepTicks = Annotated[
    bool,
    typer.Option(
        "--keep-ticks", help="Replay a coarse clock as recorded; else arrivals spread over its ticks."
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything that is drawn.")]
