"""`--costs`: a table of the user's own in place of the packaged one, in every command that has step costs."""

import json
import re

import pytest

from kvfold.analysis.deployment import deploy, format_sizes
from kvfold.codec.sizes import load_sizes
from kvfold.sim.errors import ConfigError
from tests.test_costs import COLUMNS, attend_row, linear_row

H100 = ("--model", "qwen3-8b", "--gpu", "h100")
LAYERS = 36
PREFILL = "h200,prefill,bf16,1,{0},32,8,128,,{0},,,,{1},,,,,0,made,,,,,"


@pytest.fixture
def table(tmp_path):
    """5 us a layer whatever the load, from one token to far beyond the model's context."""
    rows = [attend_row(batch, context, 5.0) for batch in (1, 256) for context in (1, 2**20)]
    rows += [linear_row(tokens, 4096, out, 3.0) for tokens in (1, 4096) for out in (1024, 32_768)]
    rows += [PREFILL.format(tokens, 0.01 * tokens) for tokens in (1, 4096)]
    rows = [row.removesuffix(",,") + ",abc123,2026-11-30" for row in rows]
    path = tmp_path / "mine.csv"
    path.write_text("\n".join([COLUMNS, *rows]) + "\n")
    return path


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_time_s,input_tokens,output_tokens\n0,400,20\n0.5,500,30\n1,90,10\n")
    return path


def test_step_takes_its_times_from_the_table_and_names_it(run_kvfold, table):
    point = ("step", *H100, "--format", "bf16", "--batch", "8", "--context", "16K", "--costs", table)
    code, out, err = run_kvfold(*point, "--json")
    assert code == 0, err
    found = json.loads(out)
    (kernel,) = [row for row in found["rows"] if row["name"] == "attention: kernel"]
    assert (kernel["s"], kernel["origin"]) == (pytest.approx(LAYERS * 5e-6), "interpolated")
    assert found["cost_source"] == f"{table} (h200; commit abc123; 2026-11-30)"
    said = run_kvfold(*point)[1]
    assert "mine.csv (h200; commit abc123; 2026-11-30)" in " ".join(said.split())


def test_replay_and_plan_name_the_table(run_kvfold, table, trace):
    code, out, err = run_kvfold("replay", trace, *H100, "--costs", table, "--strict-costs", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["config"]["cost_source"] == f"{table} (h200; commit abc123; 2026-11-30)"
    assert set(found["attention_origin_s"]) == {"interpolated"}
    code, out, err = run_kvfold(
        "plan", *H100, "--trace", trace, "--formats", "bf16", "--costs", table, "--json"
    )
    assert code == 0, err
    planned = json.loads(out)
    assert planned["config"]["cost_source"] == found["config"]["cost_source"]
    assert f"come from {table}" in out


def test_joules_are_those_of_the_table(table):
    row = attend_row(8, 16_384, 100.0, sustained="1").split(",")
    row[COLUMNS.split(",").index("energy_mj")] = "40"
    table.write_text(table.read_text() + ",".join(row) + "\n")
    assert deploy("qwen3-8b", "h100", costs=table).power().attend_w == {"bf16": pytest.approx(400.0)}
    assert deploy("qwen3-8b", "h100").power().attend_w == {}


def test_strict_costs_point_to_a_table_of_ones_own(run_kvfold, table):
    code, _, err = run_kvfold("step", *H100, "--strict-costs")
    assert code == 2
    assert "by --costs" in err
    assert run_kvfold("step", *H100, "--format", "bf16", "--strict-costs", "--costs", table)[0] == 0


NO_TABLES = {
    "missing": (None, "does not exist"),
    "empty": (b"", "mine.csv:1: not a cost table"),
    "a trace": (b"arrival_time_s,input_tokens\n0,1\n", "mine.csv:1: not a cost table"),
    "binary": (bytes(range(256)), "mine.csv: not a cost table"),
    "no rows": (f"{COLUMNS}\n".encode(), "mine.csv: a cost table needs rows"),
    "rows of packing": (
        f"{COLUMNS}\n{attend_row(1, 1, 1).replace('attend', 'pack')}\n".encode(),
        "needs rows",
    ),
    "no number": (f"{COLUMNS}\n{attend_row(1, 1024, 'ten')}\n".encode(), "mine.csv:2: "),
    "no joules": (
        f"{COLUMNS}\n{attend_row(1, 1024, 1)}\nX,attend,bf16,1,1,1,1,1,1,,,,,1,,,,some,1,k,,,,,\n".encode(),
        "mine.csv:3: ",
    ),
    "no time": (f"{COLUMNS}\nX,attend,bf16,1,1,1,1,1,1,,,,,0,,,,4,1,k,,,,,\n".encode(), "mine.csv:2: "),
}


@pytest.mark.parametrize("name", NO_TABLES)
def test_a_file_that_is_no_cost_table_costs_one_line(run_kvfold, tmp_path, name):
    content, text = NO_TABLES[name]
    path = tmp_path / "mine.csv"
    if content is not None:
        path.write_bytes(content)
    code, out, err = run_kvfold("step", *H100, "--costs", path)
    assert (code, out) == (2, "")
    assert text in err.splitlines()[-1]


def test_the_packaged_table_says_where_it_was_measured():
    source = deploy("qwen3-8b", "h200").cost_source
    assert source.startswith("costs_h200.csv (NVIDIA H200; commit")
    assert deploy("qwen3-8b", "h100").cost_source is None


@pytest.mark.parametrize(
    ("model", "gpu", "name", "modelled"),
    [
        ("qwen3-8b", "h200", "bf16", {"LM head", "sampling", "KV write", "launch and scheduling"}),
        ("qwen3-8b", "h200", "gaac", {"attention: KV read", "attention: decode work", "raw tails"}),
        ("qwen3-8b", "h100", "bf16", {"attention: KV read", "linear layers", "prompt attention"}),
        (
            "gpt-oss-20b",
            "h200",
            "bf16",
            {"experts", "linear layers", "attention: windows", "prompt attention"},
        ),
        ("qwen3.5-27b", "h200", "bf16", {"prompt attention", "linear layers"}),
    ],
)
def test_what_stays_modelled_is_named(model, gpu, name, modelled):
    found = set(deploy(model, gpu).modelled_terms(load_sizes()[name]))
    assert found >= modelled
    if (model, gpu, name) == ("qwen3-8b", "h200", "bf16"):
        assert found == modelled
        assert set(deploy(model, gpu, strict_costs=True).modelled_terms(load_sizes()[name])) == modelled


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gacc", "did you mean gaac?"),
        ("fp8", "did you mean fp8-e4m3, fp8-e5m2?"),
        ("fixed", "did you mean fixed4, fixed3?"),
        ("", "known: bf16"),
        ("zip", "known: bf16"),
    ],
)
def test_an_unknown_format_is_met_with_those_that_begin_like_it(name, hint):
    with pytest.raises(ConfigError, match=re.escape(f"unknown KV format {name!r}; {hint}")):
        format_sizes(name)
