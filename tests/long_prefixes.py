"""Which prompts of a workload start with an earlier one, inferred from a simulator that had the token ids.

LLMServingSim's `llmservingsim_sim.csv` says when each prompt of its simulated run was computed.

1. Lengths, from a run with room for all KV. A step that computes prompts is held against the profile's times; one
   that is shorter than its neighbours by more than 3 ms found part of its longest prompt in the prefix cache, and
   how much shorter says how long that part is.
2. Whose prompt it is, from a run whose KV is scarce. In a chat a prompt starts with that of an earlier turn, after
   which come that turn's output and a question. Of the earlier prompts of about the length those are taken with
   which our scheduler, not looking ahead, comes closest to the first and last tokens of the simulated run: one
   prompt after the other, until none changes.

The real engine's times are not looked at. Twenty minutes of one core:
python -m tests.long_prefixes RTXPRO6000_RUN RTX4090_RUN > analysis/data/shared_prefixes.csv
"""

import csv
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from kvfold.analysis.deployment import format_sizes
from kvfold.analysis.validate_replay import _gpu, _model, _profile, replay
from kvfold.analysis.validate_run import load_run
from kvfold.sim.profile_cost import ProfileCost, _as_one
from kvfold.sim.work import Chunk

BLOCK = 16
SHORTER_MS, NEAR_S = 3.0, 4.0
#: A prefix is found in whole blocks and a little short of the prompt; lengths within this are candidates.
LATE, WINDOW = 20, 90
#: Tokens of a length's error, and of a question, that weigh as much as each other.
LENGTH_SCALE, QUESTION_SCALE = 60, 100
MOST, FARTHEST_S, LEAST_GAIN = 8, 5.0, 2e-3


def read(path):
    """Rows of (input, output, start, first token, end, arrival), seconds, in order of arrival."""
    with path.open(newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: int(row["request id"]))
    found = []
    for row in rows:
        arrival = int(row["arrival"]) / 1e9
        start, first = arrival + int(row["queuing_delay"]) / 1e9, arrival + int(row["TTFT"]) / 1e9
        found.append(
            (int(row["input"]), int(row["output"]), start, first, int(row["end_time"]) / 1e9, arrival)
        )
    return found


def time_ms(cost, prompts, contexts):
    """A step that computes prompts, given as (tokens, history), beside sequences of these contexts."""
    count, tokens = len(contexts), sum(new for new, _ in prompts)
    own, past = _as_one([Chunk(new, old, True) for new, old in prompts])
    mean = round(sum(contexts) / count) if count else 0
    attention_us, _ = cost.profile.attention.mixed_us(own, past, count, mean)
    return (cost._base_us(tokens + count, count + len(prompts))[0] + cost.layers * attention_us) / 1e3


def steps_of(rows, cost):
    """(number of the longest prompt, start, ms that the step took, function of the tokens that were found)."""
    for number, (tokens, _, start, first, _, _) in enumerate(rows):
        group = [i for i, row in enumerate(rows) if abs(row[2] - start) < 1e-6]
        others = [
            i
            for i, row in enumerate(rows)
            if i not in group and row[2] < first - 1e-6 and row[3] > start + 1e-6
        ]
        if others or number != max(group, key=lambda i: rows[i][0]):
            continue
        running = [row for row in rows if row[3] <= start + 1e-6 and row[4] > start + 1e-6]
        contexts = [row[0] + row[1] * (start - row[3]) / (row[4] - row[3]) for row in running]
        rest = [(rows[i][0], 0) for i in group if i != number]
        if tokens + sum(each for each, _ in rest) + len(running) > 2048:
            continue

        def taken(found, tokens=tokens, rest=rest, contexts=contexts):
            return time_ms(cost, [*rest, (tokens - found, found)], contexts)

        yield number, start, 1e3 * (first - start), taken


def prefixes(rows, cost):
    """Number of a prompt -> tokens of it that were found."""
    steps = list(steps_of(rows, cost))
    excess = [(start, ms - taken(0)) for _, start, ms, taken in steps]
    for place, (number, start, ms, taken) in enumerate(steps):
        near = [
            more for at, (other, more) in enumerate(excess) if at != place and abs(other - start) < NEAR_S
        ]
        usual = median(near) if near else 0.0
        if excess[place][1] < usual - SHORTER_MS:
            lengths = range(0, rows[number][0] - 1, BLOCK)
            yield number, min(lengths, key=lambda found: abs(taken(found) + usual - ms))


def candidates(rows, number, found):
    """Earlier prompts of about that length, those that leave the shortest question first; or equally long ones."""
    near = []
    for earlier in range(number):
        question = rows[number][0] - rows[earlier][0] - rows[earlier][1]
        off = abs(rows[earlier][0] - found - LATE)
        if question >= -2 and off < WINDOW:  # two words may become one token
            near.append((off / LENGTH_SCALE + question / QUESTION_SCALE, earlier))
    equal = [earlier for earlier in range(number) if rows[earlier][0] == rows[number][0]]
    return [earlier for _, earlier in sorted(near)[:MOST]] or equal


def distance(run, rows, parents):
    """Mean distance from the simulated run's first and last tokens, without what all neighbours have in common."""
    shared = {number: (earlier, rows[earlier][0]) for number, earlier in parents.items()}
    calls = replay(run, run.folder.parent / "profiles", shared=shared).simulated.calls
    first = calls.first_token_s - [row[3] for row in rows]
    last = calls.last_token_s - [row[4] for row in rows]
    common = np.array([np.median(first[max(0, i - 10) : i + 11]) for i in range(len(rows))])
    return float(sum(np.minimum(np.abs(each - common), FARTHEST_S).mean() for each in (first, last)))


def main(roomy, scarce):
    run = load_run(roomy)
    profile = _profile(roomy.parent / "profiles", run, None)
    cost = ProfileCost(profile, _model(run.model), _gpu(run.hardware), format_sizes("bf16"))
    rows = read(roomy / "llmservingsim_sim.csv")
    possible = {number: candidates(rows, number, found) for number, found in prefixes(rows, cost)}
    parents = {number: near[0] for number, near in possible.items() if near}
    rows = read(scarce / "llmservingsim_sim.csv")
    arrival_s = np.array([row[5] for row in rows])
    run = replace(load_run(scarce), arrival_s=arrival_s, async_scheduling=False, graph_sizes=())
    best = distance(run, rows, parents)
    print(f"none {distance(run, rows, {}):.3f}, closest in length {best:.3f}", file=sys.stderr)
    changed = True
    while changed:
        changed = False
        for number in sorted(possible):
            for earlier in [None, *possible[number]]:
                tried = {key: value for key, value in parents.items() if key != number}
                if earlier is not None:
                    tried[number] = earlier
                if tried != parents and (found := distance(run, rows, tried)) < best - LEAST_GAIN:
                    parents, best, changed = tried, found, True
        print(f"{best:.3f} {parents}", file=sys.stderr)
    print("dataset_hash,request,starts_with,tokens")
    for number, earlier in sorted(parents.items()):
        print(f"{run.dataset_hash},{number},{earlier},{rows[earlier][0]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
