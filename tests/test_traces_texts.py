"""Token counts from text: the stated rule and nothing else; equal beginnings give equal blocks."""

import pytest

from kvfold.traces.readers import Stated
from kvfold.traces.texts import BLOCK_TOKENS, chain_of, chain_of_parts, plain, tokens_of


@pytest.mark.parametrize(
    ("characters", "rule", "tokens"),
    [(0, 4.0, 0), (1, 4.0, 1), (4, 4.0, 1), (8, 4.0, 2), (11, 4.0, 2), (7, 3.5, 2), (3, 0.5, 6)],
)
def test_tokens_round_down_but_no_text_counts_nothing(characters, rule, tokens):
    assert tokens_of(characters, rule) == tokens


@pytest.mark.parametrize("rule", [0.5, 3.3, 4.0])
def test_a_chain_has_every_whole_block(rule):
    text = "".join(chr(ord("a") + at % 26) for at in range(3000))
    for length in (0, 1, 255, 256, 257, 1000, 3000):
        chain = chain_of(text[:length], rule)
        assert len(chain) == tokens_of(length, rule) // BLOCK_TOKENS
        assert chain == chain_of(text, rule)[: len(chain)]
        assert all(0 <= block < 2**63 for block in chain)


def test_one_character_changes_its_block_and_all_after_it():
    text = "x" * 256 * 4
    other = text[:300] + "y" + text[301:]
    same = [a == b for a, b in zip(chain_of(text, 4.0), chain_of(other, 4.0), strict=True)]
    assert same == [True, False, False, False]


def test_equal_blocks_at_different_places_differ():
    assert len(set(chain_of_parts([b"a", b"a", b"a"]))) == 3


def test_all_texts_of_a_message_in_order():
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, "b", {"x": [None, 5, ["c"]]}, ""]}
    assert plain(message) == "user\ntext\na\nb\nc"


@pytest.mark.parametrize("make", [lambda inner: [inner], lambda inner: {"a": inner}])
def test_depth_is_no_limit(make):
    value = "x"
    for _ in range(100_000):
        value = make(value)
    assert plain(value) == "x"


@pytest.mark.parametrize("rule", [0.0, -4.0, float("nan"), float("inf"), 1000.0])
def test_a_rule_that_makes_no_sense_is_refused(rule):
    with pytest.raises(ValueError, match=r"chars_per_token must be from 0.1 to 100"):
        Stated(chars_per_token=rule)
