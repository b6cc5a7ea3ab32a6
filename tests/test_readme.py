"""The README tells the truth: its commands run, its outputs are the real ones, its tree is the one on disk."""

import csv
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvfold.codec.sizes import load_sizes

REPO = Path(__file__).resolve().parent.parent
FUSED = ("fixed3", "fixed4")  # with a tuned kernel
README = (REPO / "README.md").read_text(encoding="utf-8")
ROOMS = ("traces", "codec", "kernels", "sim", "analysis")


def shown():
    """(command, lines of output shown) of every console block."""
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL):
        command, output = None, []
        for line in block.splitlines():
            if line.startswith("$ "):
                if command:
                    yield command, output
                command, output = line[2:], []
            else:
                output.append(line.rstrip())
        if command:
            yield command, output


def run(command):
    """`make report` runs what the Makefile says, in this environment; `make test` would run this very test."""
    if command.startswith("make "):
        listed = subprocess.run(
            ["make", "--dry-run", *shlex.split(command)[1:]], cwd=REPO, capture_output=True, text=True
        )
        assert listed.returncode == 0, listed.stderr
        (line,) = [line for line in listed.stdout.splitlines() if "kvfold plan" in line or "pytest" in line]
        if "pytest" in line:
            return None
        command = line
    words = shlex.split(command)
    assert words[0].endswith("bin/kvfold"), command
    return subprocess.run(
        [sys.executable, "-m", "kvfold.analysis.cli", *words[1:]],
        cwd=REPO,
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "80"},
    )


COMMANDS = list(shown())


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_every_command_runs_and_prints_what_is_shown(command, output):
    result = run(command)
    if result is None:
        return
    assert result.returncode == 0, result.stderr
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    for part in "\n".join(output).split("..."):
        wanted = [line for line in part.splitlines() if line]
        printed = [line for line in lines if line]
        assert not wanted or any(
            printed[start : start + len(wanted)] == wanted for start in range(len(printed))
        ), f"not printed as shown:\n{part}\nbut:\n{result.stdout}"


def test_the_tree_names_every_file():
    tree = README.split("```\ntraces/", 1)[1].split("```", 1)[0]
    listed, room = set(), "traces"
    for line in tree.splitlines()[1:]:
        name = line.split()[0]
        if not line.startswith(" "):
            room = name.rstrip("/")
        elif name.endswith(".py"):
            listed.add(f"{room}/{name}")
    on_disk = {f"{room}/{path.name}" for room in ROOMS for path in (REPO / room).glob("*.py")}
    assert listed == {name for name in on_disk if not name.endswith("__init__.py")}


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (REPO / target).exists(), target


def test_the_measured_speed_ups_are_those_of_the_committed_table():
    rows = csv.DictReader((REPO / "kernels" / "data" / "costs_h200.csv").read_text().splitlines())
    fastest: dict[str, float] = {}  # by format
    point = {"op": "attend", "batch": "8", "context_tokens": "65536", "sustained": "0"}
    for row in rows:
        if point.items() <= row.items():
            time_us = float(row["median_us"])
            fastest[row["format"]] = min(time_us, fastest.get(row["format"], time_us))
    shown = re.search(
        r"runs ([\d.]+) times as fast as the best BF16.*?smaller\)\s+([\d.]+) times", README, re.S
    )
    assert shown.groups() == tuple(f"{fastest['bf16'] / fastest[kv]:.3f}" for kv in ("fixed3", "fixed4"))
    for kv in FUSED:
        saving = re.search(rf"`{kv}` pages \(lossless, ([\d.]+) % smaller\)", README)
        assert f"{100 * load_sizes()[kv].resident_saving:.1f}" == saving[1]
