"""The canonical table as Parquet: the header object in the metadata, one column a field."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, TypeVar

import msgspec
import numpy as np

from kvfold.traces.batch import ROWS, Batch
from kvfold.traces.columns import TEXTS
from kvfold.traces.decode import convert_row, decode_json
from kvfold.traces.errors import BadTraceError
from kvfold.traces.row import MARK, SECONDS, WORDS, Header, Row, batch_of, rows_of

MAGIC = b"PAR1"
#: Batches that are compressed together when a file is written: 65,536 rows.
_GROUP_BATCHES = (1 << 16) // ROWS

T = TypeVar("T")


def batches(stream: BinaryIO, source: str) -> tuple[Header, Iterator[Batch]]:
    """What the file says of itself, and its rows a few thousand at a time. Both raise BadTraceError."""
    import pyarrow.parquet as pq

    file = _sound(lambda: pq.ParquetFile(stream), source)
    mark = (file.schema_arrow.metadata or {}).get(MARK)
    header = decode_json(msgspec.json.Decoder(Header), mark, source, 1) if mark else Header(kvfold_trace=1)
    names = file.schema_arrow.names
    if repeated := [name for name in names if names.count(name) > 1]:
        raise BadTraceError(f"a column may stand once, got {repeated[0]!r} twice", source, "remove one")
    return header, _batches(file, source)


def write(batches: Iterable[Batch], header: Header, used: Iterable[str], file: BinaryIO) -> None:
    """All rows to ``file``. Every column of `Row` is there; one that is not in ``used`` is null throughout."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {"new_block_ids": pa.list_(pa.int64()), "parents": pa.list_(pa.string())}
    kinds |= dict.fromkeys(SECONDS, pa.float64()) | dict.fromkeys((*TEXTS, *WORDS), pa.string())
    fields = {name: kinds.get(name, pa.int64()) for name in Row.__struct_fields__}
    schema = pa.schema(list(fields.items()), metadata={MARK: msgspec.json.encode(header)})
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        waiting: list[pa.RecordBatch] = []
        for batch in batches:
            columns = _columns(batch)
            arrays = [
                columns[name] if name in columns else pa.nulls(len(batch), kind)
                for name, kind in fields.items()
            ]
            waiting.append(pa.RecordBatch.from_arrays(arrays, schema=schema))
            if len(waiting) == _GROUP_BATCHES:
                writer.write_table(pa.Table.from_batches(waiting))
                waiting = []
        if waiting:
            writer.write_table(pa.Table.from_batches(waiting))


def _columns(batch: Batch) -> dict[str, Any]:
    """The fields that the rows of one batch use, as Arrow arrays."""
    import pyarrow as pa

    found: dict[str, Any] = {}
    for name in batch.used & set(Row.__struct_fields__):
        if name == "new_block_ids" and batch.new_blocks is not None:
            offsets = np.concatenate(([0], np.cumsum(batch.new_blocks))).astype(np.int32)
            found[name] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(batch.new_block_ids))
        elif name == "parents":
            found[name] = pa.array([row.parents for row in rows_of(batch)], pa.list_(pa.string()))
        elif name in WORDS:
            codes = pa.array(np.asarray(batch.columns[name]).astype(np.int64))
            found[name] = pa.array(WORDS[name]).take(codes)
        elif name in TEXTS:
            found[name] = pa.array(batch.columns[name], pa.string())
        elif name in SECONDS:
            found[name] = pa.array(batch.columns[name], from_pandas=True)  # NaN becomes null
        else:
            found[name] = pa.array(np.asarray(batch.columns[name]).astype(np.int64))
    found.setdefault("output_tokens", pa.array(np.full(len(batch), -1)))
    return found


def _batches(file: Any, source: str) -> Iterator[Batch]:
    groups = _sound(lambda: file.iter_batches(ROWS), source)
    number = 1
    while (group := _sound(lambda: next(groups, None), source)) is not None:
        given = [name for name in group.schema.names if group.column(name).null_count < group.num_rows]
        values: list[dict[str, Any]] = _sound(group.select(given).to_pylist, source) or [{}] * group.num_rows
        numbers = range(number, number + len(values))
        rows = [
            convert_row({name: value for name, value in row.items() if value is not None}, Row, place)
            for place, row in zip((f"{source}:{at}" for at in numbers), values, strict=True)
        ]
        yield batch_of(rows, numbers, source)
        number += len(values)


def _sound(made: Callable[[], T], source: str) -> T:
    import pyarrow as pa

    try:
        return made()
    except (pa.ArrowException, OSError, ValueError) as error:
        rule = f"a Parquet file must be whole: {str(error).splitlines()[0]}"
        raise BadTraceError(rule, source, "restore the file") from None
