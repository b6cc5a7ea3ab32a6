"""One JSON value at a time: what must be refused is, whatever stands around it."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.traces.decode import decode_json, decode_lines
from kvfold.traces.errors import BadTraceError

ANY = msgspec.json.Decoder(dict[str, object])
FLAT = msgspec.json.Decoder(dict[str, int])


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 1}',
        '{"a": 1, "\\u0061": 2}',
        '{"a" : 1, "b": 2, "a"\t:3}',
        '{"x": [{"a": 1, "a": 2}]}',
        '{"x": {"y": [[{"a": ":", "a": 2}]]}}',
        '{"t": "\\": {", "a": 1, "a": 2}',
    ],
)
def test_a_key_that_stands_twice_is_named(text):
    with pytest.raises(BadTraceError, match="a key may stand once, got 'a' twice") as caught:
        decode_json(ANY, text.encode(), "f", 7)
    assert caught.value.place == "f:7"


_values = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(st.sampled_from('a":{}[],\\ '), max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('a":', max_size=2), inner, max_size=3)
    ),
)


@settings(max_examples=300, deadline=None)
@given(value=st.dictionaries(st.text('ab":{', max_size=2), _values, max_size=4), spaces=st.booleans())
def test_sound_objects_pass(value, spaces):
    text = json.dumps(value, separators=(" ,\t", " :\n") if spaces else None)
    assert decode_json(ANY, text.encode(), "f", 1) == value


def test_lines_are_decoded_as_one_by_one():
    lines = [b'{"a": 1}', b'{"b": 2}', b'{"a": 3}']
    assert decode_lines(FLAT, lines, [1, 3, 4], "f") == [{"a": 1}, {"b": 2}, {"a": 3}]


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        (b'{"a": 1, "a": 2}', "a key may stand once"),
        (b'{"a": 1}{"a": 2}', "one whole JSON object"),
        (b'{"a": 1', "one whole JSON object"),
        (b'{"a": "x"}', "expected int, got str"),
        (b'{"a": NaN}', "one whole JSON object"),
        (b'{"a": 1e999}', "number out of range"),
        (b"[1]", "expected object, got array"),
        (b'{"a": ' + b"[" * 200_000, "nested without end|whole JSON object|expected int"),
    ],
)
def test_the_bad_one_of_many_lines_is_named(bad, rule):
    with pytest.raises(BadTraceError, match=rule) as caught:
        decode_lines(FLAT, [b'{"a": 1}', bad, b'{"a": 3}'], [1, 3, 4], "f")
    assert caught.value.place == "f:3"
