"""Speed of the simulator: requests and simulated tokens per second of wall time, and peak memory, by size.

    python tests/bench_sim.py [--sizes 10000,100000,1000000] [--rate 8]

A person starts it. Poisson arrivals, 1,000 prompt and 200 output tokens, Llama-3.1-8B on an H100, batch cap 256,
token budget 2,048: the load on which other simulators were timed. One process per size, so that memory is its own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from kvfold.traces.canonical import write
from kvfold.traces.synth import poisson

PROGRAM = (
    "import resource, subprocess, sys, time\n"
    "start = time.perf_counter()\n"
    "found = subprocess.run(sys.argv[1:], capture_output=True, check=True, text=True).stdout\n"
    "print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)\n"
    "print(found)"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="10000,100000,1000000")
    parser.add_argument("--rate", type=float, default=8.0)
    options = parser.parse_args()
    print("| requests | whole process, s | requests/s | simulated tokens/s | peak MB |")
    print("|--:|--:|--:|--:|--:|")
    for size in (int(text) for text in options.sizes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "load.jsonl"
            write(poisson(size, options.rate, 1000, 200, seed=42), path)
            command = [sys.executable, "-m", "kvfold.analysis.cli", "replay", str(path), "--json"]
            command += ["--model", "llama-3.1-8b", "--gpu", "h100"]
            result = subprocess.run(
                [sys.executable, "-c", PROGRAM, *command], capture_output=True, check=True, text=True
            )
        seconds, peak_kb = (float(text) for text in result.stderr.split())
        tokens = json.loads(result.stdout)["counts"]["completed"] * 1200
        row = f"{size:,} | {seconds:.2f} | {size / seconds:,.0f} | {tokens / seconds:,.0f} | {peak_kb / 1024:,.0f}"
        print(f"| {row} |", flush=True)


if __name__ == "__main__":
    main()
