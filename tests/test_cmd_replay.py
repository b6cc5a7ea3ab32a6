"""What `kvfold replay` says of its own figures."""

import json

import pytest

from kvfold.analysis.cmd_replay import _costs

SOURCE = "costs.csv (H; commit c; 2026-11-30)"


@pytest.fixture
def trace(tmp_path):
    """One call inside the measured contexts of the H200, one below them."""
    path = tmp_path / "trace.csv"
    path.write_text("arrival_time_s,input_tokens,output_tokens\n0,4000,200\n100,10,200\n")
    return path


def found(by_origin, source=SOURCE):
    return {
        "config": {"cost_source": source},
        "attention_origin_s": by_origin,
        "modelled_terms": ["LM head", "sampling"],
    }


def test_costs_say_how_much_was_extrapolated_and_what_is_modelled():
    text = _costs(found({"extrapolated": 1.0, "interpolated": 3.0}))
    assert text == (
        "costs: decoding time by its attention: 75.0 % interpolated, 25.0 % extrapolated; "
        f"always modelled: LM head, sampling; measured: {SOURCE}"
    )
    assert _costs(found({})) == f"costs: always modelled: LM head, sampling; measured: {SOURCE}"
    assert _costs(found({"modelled": 1.0}, None)).startswith("costs: every step time is modelled")


def test_a_replay_tells_measured_from_extrapolated_time(run_kvfold, trace):
    arguments = ("replay", trace, "--model", "qwen3-8b", "--gpu", "h200")
    code, out, err = run_kvfold(*arguments, "--json")
    assert code == 0, err
    result = json.loads(out)
    origins = result["attention_origin_s"]
    assert set(origins) == {"interpolated", "extrapolated"}
    assert origins["interpolated"] > origins["extrapolated"] > 0
    assert result["modelled_terms"] == ["LM head", "sampling", "KV write", "launch and scheduling"]
    said = " ".join(run_kvfold(*arguments)[1].split())
    assert "% extrapolated; always modelled: LM head, sampling" in said
    assert "costs modelled" not in said


def test_records_that_cannot_be_written_are_refused_before_the_trace_is_read(run_kvfold, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "folder"):
        code, _, err = run_kvfold(
            "replay", tmp_path / "no trace", "--model", "qwen3-8b", "--gpu", "h200", "--out", out
        )
        assert code == 2
        assert str(out) in err.splitlines()[-1]
