"""Flat files in three containers give the same rows; empty is unknown; a fault is named with its line."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvfold.traces.errors import BadTraceError
from kvfold.traces.sheet import header_of, sheet


def rows(content: bytes) -> list:
    return list(sheet(io.BytesIO(content), "f"))


def parquet(**columns) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def test_three_containers_give_the_same_rows():
    assert rows(b"a,b\r\n1,x\r\n2,") == [(2, {"a": "1", "b": "x"}), (3, {"a": "2"})]
    assert rows(b'{"a": 1, "b": "x"}\n\n{"a": 2, "b": null}') == [(1, {"a": 1, "b": "x"}), (3, {"a": 2})]
    assert rows(parquet(a=[1, 2], b=["x", None])) == [(1, {"a": 1, "b": "x"}), (2, {"a": 2})]


def test_a_byte_order_mark_is_no_part_of_the_first_name():
    assert rows(b"\xef\xbb\xbfa\n1")[0] == (2, {"a": "1"})
    assert rows(b'\xef\xbb\xbf{"a": 1}')[0] == (1, {"a": 1})
    assert header_of(b"\xef\xbb\xbfa, b\r\n") == ["a", "b"]


def test_a_quoted_line_end_keeps_the_count_of_lines():
    assert rows(b'a,b\n"1\n2",x\n3,4\n') == [(3, {"a": "1\n2", "b": "x"}), (4, {"a": "3", "b": "4"})]


@pytest.mark.parametrize(
    ("content", "rule", "place"),
    [
        (b"a,b\n1\n", "a row must have 2 cells as the header has, got 1", "f:2"),
        (b"a,b\n1,2,3\n", "a row must have 2 cells as the header has, got 3", "f:2"),
        (b"a,a\n1,2\n", "a column must stand once in the header, got 'a' twice", "f:1"),
        (b'a\n"x', "a row must be valid CSV", "f:2"),
        (b"a\n\xff\n", "text must be UTF-8", "f:2"),
        (b'{"a": 1}\n{"a": ', "one whole JSON object", "f:2"),
        (b'{"a": 1}\n{"a": 1, "a": 2}', "a key may stand once, got 'a' twice", "f:2"),
        (b'{"a": 1}\n[1]', "expected object, got array", "f:2"),
        (b'{"a": ' + b"[" * 200_000, "nested without end", "f:1"),
        (parquet(a=[1])[:-4], "a Parquet file must be whole", "f"),
    ],
)
def test_a_fault_is_named(content, rule, place):
    with pytest.raises(BadTraceError, match=rule) as caught:
        rows(content)
    assert caught.value.place == place
    assert caught.value.mend
