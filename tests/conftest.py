"""Runs before anything imports triton: its decorator decides at import time whether it interprets."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

try:
    import torch

    _has_gpu = torch.cuda.is_available()
except ImportError:
    _has_gpu = False
if not _has_gpu:
    os.environ.setdefault("TRITON_INTERPRET", "1")

REPO = Path(__file__).resolve().parent.parent
SHARED_DATA = REPO.parent / "shared" / "data"


@pytest.fixture
def shared_data() -> Path:
    """Folder of the real traces and tensors; tests that need it are skipped where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the real data folder {SHARED_DATA} is not here")
    return SHARED_DATA


@pytest.fixture
def run_kvfold(monkeypatch, capsys):
    """A function that runs a command line in this process: exit code, stdout, stderr."""
    from kvfold.analysis import cli

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvfold", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return run


@pytest.fixture
def random_trace():
    """A function that makes a seeded trace of agent sessions that fork, shrink and wait, or of single calls."""
    from kvfold.traces.columns import Edges, assemble
    from kvfold.traces.prefix import Chains
    from kvfold.traces.table import WAIT_KINDS, Meta

    def make(calls: int, seed: int, *, sessions: bool, rate_per_s: float = 4.0, longest: int = 6000):
        rng = np.random.default_rng(seed)
        block_tokens = 64
        chains, edges = Chains(), Edges()
        input_tokens, output_tokens, arrival_s, session_id = [], [], [], []
        history: list[list[int]] = []
        new_id, clock_s, left = 0, 0.0, 0
        for call in range(calls):
            if not sessions or left == 0:
                clock_s += rng.exponential((6 if sessions else 1) / rate_per_s)
                left, first = int(rng.integers(1, 12)), call
                tokens = int(rng.integers(1, longest))
                chain = list(range(-3, 0)) if sessions else []
            else:
                parent = int(rng.integers(first, call)) if rng.random() < 0.2 else call - 1
                kept = history[parent][: rng.integers(1, 200)] if rng.random() < 0.2 else history[parent]
                chain = list(kept)
                tokens = len(chain) * block_tokens + int(rng.integers(0, 1500))
                wait_s = float(rng.exponential(3.0)) if rng.random() < 0.8 else 0.0
                edges.add(call, parent, wait_s, WAIT_KINDS.index("tool"))
            chain = chain[: tokens // block_tokens]
            grown = tokens // block_tokens - len(chain)
            chain += range(new_id, new_id + grown)
            new_id += grown
            left -= 1
            history.append(chain)
            if sessions:
                chains.add(chain, f"row {call}")
            input_tokens.append(max(1, tokens))
            output_tokens.append(int(rng.integers(1, 400)))
            arrival_s.append(clock_s)
            session_id.append(first if sessions else -1)
        columns = {
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "arrival_time_s": arrival_s,
            "session_id": session_id,
        }
        meta = Meta("made", "made", "", "s", rows_read=calls, rows_kept=calls)
        if sessions:
            columns |= chains.columns()
            meta = Meta(
                "made",
                "made",
                "",
                "s",
                rows_read=calls,
                rows_kept=calls,
                block_size_tokens=block_tokens,
                hash_scope="global",
            )
        return assemble(meta, columns, edges)

    return make
