"""The committed cost table is whole, and `kvfold kernels` says what is missing where there is no GPU."""

import contextlib
import csv
from importlib import resources

import pytest
import torch
from typer.testing import CliRunner

from kvfold.analysis import cmd_kernels
from kvfold.analysis.cmd_kernels import FORMATS, OPS, app
from kvfold.kernels import bench, timing
from kvfold.kernels.bench import MOST_KV_BYTES, POINTS
from kvfold.kernels.bench_pages import KV_HEADS, TOKEN_BYTES
from kvfold.kernels.fuzz import VARIANTS
from kvfold.kernels.gate import CHECKS
from kvfold.kernels.timing import COLUMNS, BitsDifferError, Machine, Row

with (resources.files("kvfold.kernels") / "data" / "costs_h200.csv").open() as file:
    ROWS = list(csv.DictReader(file))


def times(name, batch, context, sustained="0"):
    return [
        float(row["median_us"])
        for row in ROWS
        if (row["op"], row["format"], row["sustained"]) == ("attend", name, sustained)
        and (int(row["batch"]), int(row["context_tokens"])) == (batch, context)
    ]


def test_columns_and_provenance():
    assert tuple(ROWS[0]) == COLUMNS
    assert {row["op"] for row in ROWS} == set(OPS) | {"unpack"}
    for row in ROWS:
        assert all(row[name] for name in ("device", "kernel", "torch", "triton", "driver", "commit", "date"))
        if row["p10_us"]:
            assert 0 < float(row["p10_us"]) <= float(row["median_us"]) <= float(row["p90_us"])


def test_every_point_of_the_grid_has_every_format_and_a_peer():
    # A way to attend that is not tuned has a parameter behind its format, and need not be everywhere.
    names = {row["format"] for row in ROWS if row["op"] == "attend" and ":" not in row["format"]}
    assert names >= {"bf16", "fixed4"}
    for batch, context in POINTS:
        if batch * context * TOKEN_BYTES <= MOST_KV_BYTES:
            assert len(times("bf16", batch, context)) >= 2
            assert all(times(name, batch, context) for name in names)


def test_products_with_packed_weights_stand_beside_those_of_bf16():
    points = {
        kind: {
            (row["in_features"], row["out_features"], row["tokens"])
            for row in ROWS
            if row["op"] == "linear" and row["weights"] == kind
        }
        for kind in ("bf16", "w4a16")
    }
    assert points["bf16"]
    assert points["w4a16"] in (set(), points["bf16"])


def test_packed_is_never_slower_than_the_best_bf16_from_64_mb_on():
    for batch, context in POINTS:
        if 64e6 <= batch * context * TOKEN_BYTES <= MOST_KV_BYTES:
            assert min(times("fixed4", batch, context)) < min(times("bf16", batch, context))


def test_no_row_beats_the_memory():
    """4.8 TB/s is the datasheet's bandwidth of an H200; its L2 holds 60 MB."""
    for row in ROWS:
        if row["op"] == "attend" and float(row["bytes"]) > 1e9:
            assert float(row["bytes"]) / float(row["median_us"]) / 1e6 < 4.8
    assert KV_HEADS == 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["bench", "fuzz"])
def test_without_a_gpu_one_line_and_exit_2(command):
    result = CliRunner().invoke(app, [command])
    assert result.exit_code == 2
    assert len(result.output.splitlines()) == 1
    assert "need an NVIDIA GPU" in result.output


def test_a_launch_that_is_refused_costs_its_own_rows(monkeypatch, tmp_path):
    row = Row("attend", "bf16", "a kernel", 2.0, 1.0, 3.0, bytes=8)

    def refused():
        yield row
        raise RuntimeError("No available kernel")

    machine = Machine("NVIDIA H200", "2", "3", "580")
    monkeypatch.setattr(cmd_kernels, "_require_gpu", lambda: None)
    monkeypatch.setattr(cmd_kernels, "_check", lambda *_: ([], {}, []))
    monkeypatch.setattr(cmd_kernels, "_tasks", lambda *_: [("one", refused()), ("two", iter([row]))])
    monkeypatch.setattr(timing, "Machine", lambda: machine)
    result = CliRunner().invoke(app, ["bench", "--out", str(tmp_path)])
    assert result.exit_code == 0
    assert result.stdout.startswith("2 rows (measured)")
    assert "1 not run: one (No available kernel)" in result.stdout
    assert len((tmp_path / "costs_h200.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize("found", [1, 2])
def test_nothing_runs_at_the_power_cap_before_all_single_launches_are_timed(monkeypatch, found):
    def ways(pool, point, formats):
        return [bench.Way(name, {f"ours {name}": None}, 8, 64, name != "fixed4:slow") for name in formats]

    times = (2.0, 1.0, 3.0)
    monkeypatch.setattr(bench, "Pool", lambda *_: None)
    monkeypatch.setattr(bench, "_ways", ways)
    monkeypatch.setattr(bench, "_peers", lambda *_: [bench.Peer("torch", None, None)])
    monkeypatch.setattr(bench, "fastest", lambda launches: (*launches, None, times))
    monkeypatch.setattr(bench, "burst", lambda _: times)
    monkeypatch.setattr(bench, "replayed", lambda _: times)
    monkeypatch.setattr(bench, "sustained", lambda _: (4.0, 5.0))
    monkeypatch.setattr(bench, "distinct_results", lambda *_: found)
    said = []
    tasks = bench.attend_tasks([(8, 65536), (2, 256)], ["bf16", "fixed4", "fixed4:slow"], "cuda", said.append)
    rows = []
    with contextlib.nullcontext() if found == 1 else pytest.raises(BitsDifferError, match="2 distinct"):
        rows += [row for _, timed in tasks for row in timed]
    if found == 1:
        formats = [row.format for row in rows]
        assert formats[:8] == ["bf16", "fixed4", "fixed4:slow", "bf16"] * 2
        assert formats[8:12] == ["bf16:timed=replays"] * 4
        assert [(row.format, row.batch, row.sustained, row.energy_mj) for row in rows[12:]] == [
            ("bf16", 8, 1, 5.0),
            ("fixed4", 8, 1, 5.0),
        ]
        assert len(said) == 2


def test_every_format_of_the_kernels_can_be_asked_for():
    assert set(FORMATS) == set(bench.FORMATS)
    assert {check for variant in VARIANTS for check in variant.checks} == set(CHECKS)


def test_unknown_names_are_refused():
    result = CliRunner().invoke(app, ["bench", "--op", "attent"])
    assert result.exit_code == 2
    assert "'attent'" in result.output
