"""What each part of the model is worth on the recorded runs: the replay without it (docs/validation.md).

Half a minute of one core: python -m tests.long_validation FOLDER
"""

import sys
from dataclasses import replace
from pathlib import Path

from kvfold.analysis.validate_replay import METRICS, replay, statistic_of
from kvfold.analysis.validate_run import find_runs, load_run

SHOWN = ("mean", "p50", "p90", "p99")


def variants(run):
    """(name, the run as it is then taken, whether uneven contexts are corrected)."""
    yield "as it is", run, None
    yield "shared prefixes unknown", replace(run, dataset_hash=""), None
    yield "preempted calls find nothing of theirs", replace(run, prefix_caching=False), None
    yield "no step is scheduled ahead", replace(run, async_scheduling=False), None
    yield "uneven contexts corrected", run, True
    yield "uneven contexts not corrected", run, False
    yield "no padding to captured graphs", replace(run, graph_sizes=()), None
    if run.num_gpu_blocks is not None:
        yield "31 % more blocks", replace(run, num_gpu_blocks=round(1.31 * run.num_gpu_blocks)), None


def main(folder):
    for path in find_runs(folder):
        run = load_run(path)
        print(f"\n{run.name}\n")
        print("| replay | " + " | ".join(f"{metric} {', '.join(SHOWN)}, %" for metric in METRICS) + " |")
        print("|---" * (1 + len(METRICS)) + "|")
        for name, taken, uneven in variants(run):
            found = replay(taken, path.parent / "profiles", uneven=uneven)
            cells = [
                ", ".join(
                    f"{100 * (statistic_of(found.ours[metric], s) / statistic_of(found.real[metric], s) - 1):+.1f}"
                    for s in SHOWN
                )
                for metric in METRICS
            ]
            print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
