"""Real archives that several tests read, loaded once."""

from functools import cache
from pathlib import Path

from kvfold.traces.load import load
from kvfold.traces.table import Trace


@cache
def weka(shared_data: Path) -> Trace:
    """The 710 sessions of the WEKA archive."""
    return load(shared_data / "traces" / "weka-claude-code-traces" / "all710_original.tar.xz")
