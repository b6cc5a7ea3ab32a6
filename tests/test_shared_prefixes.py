"""Prompts that start with an earlier one: by their ids, and the table of the known workload against its counts."""

import csv
from importlib import resources

import numpy as np
import pytest

from kvfold.analysis.validate_replay import PREFIXES_CSV
from kvfold.analysis.validate_run import load_run
from tests.long_prefixes import (
    BLOCK_TOKENS,
    DATASET_HASH,
    FOUND,
    READ,
    by_counts,
    by_ids,
    found_tokens,
    turns,
)

RUN = "validation/llmservingsim-vllm/RTX4090_Llama-3.1-8B"
#: The counters at the end of both logs.
FOUND_IN_ALL, IN_NO_ROW = 19_520, 880


@pytest.fixture(scope="module")
def rows():
    text = resources.files("kvfold.analysis").joinpath(PREFIXES_CSV).read_text(encoding="utf-8")
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return [row for row in csv.DictReader(lines) if row["dataset_hash"] == DATASET_HASH]


def test_the_longest_common_prefix_is_found_by_ids():
    """Against every pair of prompts compared token by token."""
    rng = np.random.default_rng(3)
    prompts = []
    for number in range(60):
        old = prompts[rng.integers(number)][: rng.integers(120)] if number and rng.random() < 0.6 else []
        prompts.append([*old, *rng.integers(0, 3, rng.integers(1, 90)).tolist()])

    def common(one, other):
        pairs = enumerate(zip(one, other, strict=False))
        return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))

    found = {number: (earlier, tokens) for number, earlier, tokens in by_ids(prompts)}
    for number, prompt in enumerate(prompts):
        longest = max((common(prompt, prompts[earlier]) for earlier in range(number)), default=0)
        if longest < BLOCK_TOKENS:
            assert number not in found
            continue
        earlier, tokens = found[number]
        assert tokens == common(prompt, prompts[earlier])
        assert tokens // BLOCK_TOKENS == longest // BLOCK_TOKENS


def test_a_prompts_last_token_is_computed():
    assert (found_tokens(721, 721), found_tokens(720, 720), found_tokens(900, 455)) == (720, 704, 448)


def test_a_later_turn_is_the_earlier_one_its_reply_and_a_question():
    """A prompt of 160 tokens, a reply of 40 and a question of 5 make a later prompt of 205; or it comes again."""
    inputs, outputs = [160, 300, 205, 199, 160], [40, 400, 400, 400, 400]
    found = [pair for later in range(5) for pair in turns(inputs, outputs, later)]
    assert found == [(1, 0, 160, 100), (2, 0, 160, 5), (3, 0, 160, -1), (4, 0, 144, 0)]


def test_what_was_found_is_given_to_the_shortest_questions():
    inputs, outputs = [160, 64, 300, 205, 130], [40, 60, 400, 400, 400]
    assert list(by_counts(inputs, outputs, [(2, 4, 160)], {})) == [(3, 0, "counts")]
    assert list(by_counts(inputs, outputs, [(2, 4, 224)], {})) == [(3, 0, "counts"), (4, 1, "counts")]
    assert list(by_counts(inputs, outputs, [(2, 4, 224)], {2: 0})) == [(2, 0, "ids"), (4, 1, "counts")]
    assert list(by_counts(inputs, outputs, [(2, 4, 160)], {2: 0})) == [(2, 0, "ids")]
    assert list(by_counts(inputs, outputs, [(2, 4, 16)], {})) == []


def test_the_table_is_what_its_script_makes_and_adds_up_to_what_was_found(rows, shared_data):
    run = load_run(shared_data / RUN)
    assert run.dataset_hash == DATASET_HASH
    inputs, outputs = run.input_tokens.tolist(), run.output_tokens.tolist()
    made = [(later, earlier, inputs[earlier], how) for later, earlier, how in by_counts(inputs, outputs)]
    assert made == [(int(r["request"]), int(r["starts_with"]), int(r["tokens"]), r["known_by"]) for r in rows]
    assert sum(how == "ids" for *_, how in made) == len(READ)
    assert sum(found for *_, found in FOUND) == FOUND_IN_ALL
    assert (
        sum(found_tokens(inputs[later], tokens) for later, _, tokens, _ in made) == FOUND_IN_ALL - IN_NO_ROW
    )
    for later, earlier, *_ in made:
        assert (later, earlier) in [pair[:2] for pair in turns(inputs, outputs, later)]
