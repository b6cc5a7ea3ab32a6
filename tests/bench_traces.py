"""Time and peak memory of reading long files; the figures of docs/traces.md.

    PYTHONPATH=. python tests/bench_traces.py GB FOLDER

Writes a flat JSONL and a Mooncake JSONL of GB gigabytes into FOLDER, then runs each task in a process of its own.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_TASK = """
import resource, sys, time
from pathlib import Path
from kvfold.traces import convert, load, stream
path, out = sys.argv[1:]
{code}
print(f"{{time.process_time():.0f}} s (CPU), {{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}} MB")
"""
_TASKS = {
    "inspect": "stream.inspect(path, long_bytes=0)",
    "convert to Parquet": "convert.convert(path, Path(out + '.parquet'), long_bytes=0)",
    "convert to JSONL": "convert.convert(path, Path(out + '.jsonl'), long_bytes=0)",
    "load": "load.load(path)",
}
#: The table of a longer file may not fit into memory.
_MOST_LOADED_BYTES = 400e6


def flat(draw: random.Random) -> Iterator[dict]:
    """Single calls at 8 a second."""
    arrival_s = 0.0
    while True:
        arrival_s += draw.expovariate(8)
        yield {
            "arrival_time_s": round(arrival_s, 6),
            "input_tokens": draw.randint(1, 8000),
            "output_tokens": draw.randint(1, 800),
        }


def mooncake(draw: random.Random) -> Iterator[dict]:
    """Prompts of about 24 blocks, most of which go on from one of the last 1,000."""
    chains: list[list[int]] = [[]]
    fresh = stamp = 0
    while True:
        stamp += draw.randint(0, 600)
        base = draw.choice(chains[-1000:])[: draw.randint(0, 20)]
        new = draw.randint(1, 28)
        chains = [*chains[-1000:], [*base, *range(fresh, fresh + new)]]
        fresh += new
        yield {
            "timestamp": stamp,
            "input_length": 512 * len(chains[-1]) - draw.randint(0, 511),
            "output_length": draw.randint(1, 800),
            "hash_ids": chains[-1],
        }


def main(size_bytes: float, folder: Path) -> None:
    """Write the files, run the tasks, print a line each."""
    for rows in (flat, mooncake):
        path, written = folder / f"{rows.__name__}.jsonl", 0
        with path.open("w") as file:
            for row in rows(random.Random(1)):
                written += file.write(json.dumps(row) + "\n")
                if written >= size_bytes:
                    break
        for name, code in _TASKS.items():
            if name == "load" and size_bytes > _MOST_LOADED_BYTES:
                continue
            command = [sys.executable, "-c", _TASK.format(code=code), str(path), str(folder / "out")]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            print(f"{rows.__name__}, {written:,} bytes, {name}: {done.stdout.strip()}", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]) * 1e9, Path(sys.argv[2]))
