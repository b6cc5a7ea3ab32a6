"""Which prompts of a workload start with an earlier one: what analysis/data/shared_prefixes.csv says.

The workload of the recorded Llama runs is LLMServingSim's sharegpt-llama-3.1-8b-300-sps10: turns of conversations,
each with all that came before it as its prompt (workloads/generators/sharegpt.py of casys-kaist/LLMServingSim).
What a prompt has in common with an earlier one is a fact about token ids, and no run's times are looked at:

1. With the workload at hand (a JSON object a line, with input_tok_ids) every prompt's longest common prefix with
   an earlier one: `python -m tests.long_prefixes --ids WORKLOAD.jsonl`.
2. Without it, `python -m tests.long_prefixes --counts RUN > analysis/data/shared_prefixes.csv`:
   - READ: later prompts read in a copy of the workload (skyp0714/event_driven_llmsim at e8b8311). Where an earlier
     turn ends in it gives the earlier prompt's length to the token, its last turn the question's length.
     These are the ones whose partner changes a figure of the replay by more than 0.3 points.
   - FOUND: how many tokens a prefix cache with room for everything found. LLMServingSim's logs of its RTX PRO 6000
     run (bench/examples/RTXPRO6000/Llama-3.1-8B/outputs/sim.log at 5daddb2 and 0d3de68) count prompt tokens asked
     for and found, second by second. Calls are let in in the order of their arrival, so the tokens asked for say
     which calls were asked for, whatever the simulated times. What READ leaves of a range is given to a pair of
     turns that explains it: the later prompt is the earlier one, its reply and a question, or the earlier one
     again. Of several, those whose longest question is the shortest. What no one or two pairs explain stays out.
"""

import csv
import json
import sys
from itertools import accumulate, combinations
from pathlib import Path

BLOCK_TOKENS = 16
DATASET_HASH = "05e48b32da530d4a3dd77f3d47c6fe694ac8308d611aa088e38bb10fba2b3b3a"
#: Later prompt -> the earlier one that it starts with.
READ = {
    47: 40,
    66: 35,
    68: 28,
    93: 82,
    117: 45,
    139: 117,
    140: 76,
    158: 107,
    173: 153,
    180: 61,
    183: 31,
    184: 151,
    209: 201,
}
#: Calls first to last, in order of arrival, and the tokens of them that a cache with room for everything found.
FOUND = (
    (45, 51, 448),
    (65, 72, 976),
    (73, 85, 848),
    (86, 94, 944),
    (112, 117, 384),
    (128, 128, 832),
    (138, 139, 992),
    (140, 141, 384),
    (148, 153, 32),
    (156, 160, 608),
    (172, 175, 1760),
    (176, 180, 1296),
    (181, 184, 880),
    (185, 189, 720),
    (198, 206, 256),
    (209, 212, 592),
    (215, 224, 1312),
    (226, 233, 512),
    (235, 236, 832),
    (237, 237, 1264),
    (264, 265, 592),
    (280, 281, 1632),
    (284, 288, 1168),
    (292, 294, 256),
)


def found_tokens(prompt_tokens, common_tokens):
    """Whole blocks of what is in common; a prompt's last token is always computed."""
    return min(common_tokens, prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def by_ids(prompts):
    """(request, earlier request, tokens in common) for every prompt that has a whole block in common with one."""
    seen = {}  # blocks so far -> the first prompt that has them
    for number, prompt in enumerate(prompts):
        chain = list(accumulate(map(tuple, _blocks(prompt)), lambda parent, block: hash((parent, block))))
        known = [hashed for hashed in chain if hashed in seen]
        if known:
            earlier = seen[known[-1]]
            pairs = zip(prompt, prompts[earlier], strict=False)
            differs = (place for place, (one, other) in enumerate(pairs) if one != other)
            yield number, earlier, next(differs, min(len(prompt), len(prompts[earlier])))
        for hashed in chain:
            seen.setdefault(hashed, number)


def by_counts(inputs, outputs, ranges=FOUND, read=READ):
    """(request, earlier request, "ids" or "counts") of the pairs of turns that explain what was found."""
    for first, last, found in ranges:
        inside = {later: earlier for later, earlier in read.items() if first <= later <= last}
        left = found - sum(found_tokens(inputs[later], inputs[earlier]) for later, earlier in inside.items())
        pairs = [
            pair
            for later in range(first, last + 1)
            if later not in inside
            for pair in turns(inputs, outputs, later)
        ]
        sets = [(pair,) for pair in pairs if pair[2] == left] + [
            both
            for both in combinations(pairs, 2)
            if both[0][0] < both[1][0] and both[0][2] + both[1][2] == left
        ]
        chosen = min(sets, key=lambda each: max(pair[3] for pair in each), default=()) if left else ()
        rows = [(*row, "ids") for row in inside.items()] + [(*pair[:2], "counts") for pair in chosen]
        yield from sorted(rows)


def turns(inputs, outputs, later):
    """(later, earlier, tokens found, question) for every earlier prompt that the later one may go on from."""
    for earlier in range(later):
        found = found_tokens(inputs[later], inputs[earlier])
        question = inputs[later] - inputs[earlier] - outputs[earlier]
        if inputs[later] == inputs[earlier]:
            question = 0
        if question >= -2 and found:  # two words may become one token
            yield later, earlier, found, question


def _blocks(prompt):
    whole = len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
    return [prompt[start : start + BLOCK_TOKENS] for start in range(0, whole, BLOCK_TOKENS)]


def main(kind, path):
    with (path if kind == "--ids" else path / "requests.jsonl").open(encoding="utf-8") as file:
        calls = [json.loads(line) for line in file]
    if kind == "--ids":
        found = [(*row, "ids") for row in by_ids([call["input_tok_ids"] for call in calls])]
    else:
        calls.sort(key=lambda call: call["arrival_time"])
        inputs, outputs = ([call[key] for call in calls] for key in ("input_toks", "output_toks"))
        found = [(later, earlier, inputs[earlier], how) for later, earlier, how in by_counts(inputs, outputs)]
    print(
        "# Prompts of this workload that start with an earlier one: numbers in order of arrival, tokens in common."
    )
    print(
        "# Made by tests/long_prefixes.py, which has the sources. known_by: read as token ids, or from counts."
    )
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(("dataset_hash", "request", "starts_with", "tokens", "known_by"))
    rows.writerows((DATASET_HASH, *row) for row in found)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
