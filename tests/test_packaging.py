"""The packages that are declared are those on disk, and rooms import one way."""

import ast
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
ROOMS = ("sim", "codec", "kernels", "traces", "analysis")
MAY_IMPORT = {
    "traces": {"traces"},
    "codec": {"codec"},
    "kernels": {"kernels", "codec"},
    "sim": {"sim", "traces", "codec"},
    "analysis": {"analysis", "sim", "traces", "codec"},
}


def modules():
    return [path for room in ROOMS for path in sorted((REPO / room).glob("*.py"))]


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_declared_packages_are_those_on_disk():
    settings = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]
    on_disk = {f"kvfold.{path.parent.name}" for path in REPO.glob("*/__init__.py")}
    assert set(settings["packages"]) == on_disk
    assert not [path for room in ROOMS for path in (REPO / room).glob("*/*.py")], "folders stay flat"
    assert settings["package-dir"] == {f"kvfold.{room}": room for room in ROOMS}


@pytest.mark.parametrize("path", modules(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_rooms_import_one_way(path):
    room = path.parent.name
    for name in imported(path):
        if name.startswith("kvfold."):
            # the bodies of the kernels' subcommands are the one place outside their room that runs them
            allowed = MAY_IMPORT[room] | ({"kernels"} if path.name == "cmd_kernels.py" else set())
            assert name.split(".")[1] in allowed, f"{path.name} imports {name}"
        heavy = name.split(".")[0] in {"torch", "triton"}
        assert not heavy or room == "kernels" or path.name == "cmd_kernels.py"
    if room == "sim":
        ours = {name for name in imported(path) if name.startswith("kvfold.codec")}
        assert ours <= {"kvfold.codec.sizes"}


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_replay_imports_no_heavy_library():
    loaded = run_python(
        "import sys, kvfold.analysis.cli, kvfold.sim.engine, kvfold.analysis.metrics, kvfold.traces.load\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    ).split()
    assert not {"pandas", "pyarrow", "numba", "torch", "triton", "scipy"} & set(loaded)


def test_help_is_fast():
    """The goal is 0.3 s; the best of three, with room for a busy machine."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "kvfold.analysis.cli", "--help"], check=True, capture_output=True
        )
        times.append(time.perf_counter() - start)
    assert min(times) < 0.6
