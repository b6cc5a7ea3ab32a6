"""How `kvfold validate` writes its checks: one way for each unit, a source once, a note beside its names."""

import re
from collections import Counter

import pytest

from kvfold.analysis.validate import compared, holds
from kvfold.analysis.validate_all import result, validate
from kvfold.analysis.validate_report import render
from kvfold.analysis.validate_words import notes_of, row_of
from kvfold.sim.errors import ConfigError
from tests.test_validate import invoke


def error_of(**check):
    return row_of(compared("f", "n", "s", 0.927, 0.934, **check).plain())[3]


def test_a_share_differs_by_points_and_keeps_percent_where_a_gate_is_relative():
    assert error_of(unit="share") == "+0.7 pp"
    assert error_of(unit="share", gate=0.01) == "+0.8 %"
    assert error_of(unit="x") == "+0.8 %"


def test_no_unit_is_written_in_two_ways():
    checks = validate(None, ["gaac", "fp8", "memory", "codec"], lambda _: None)["checks"]
    texts = [text for check in checks for text in (*row_of(check), check["source"], check["note"])]
    assert [text for text in texts if re.search(r"\d us\b|\d%", text)] == []
    assert any("µs" in text for text in texts)


def test_a_note_is_said_once_and_after_its_names(capsys):
    from kvfold.analysis.cmd_validate import _print

    note = "20 points; " + "a long way to say how it was measured, " * 8 + "by all"
    checks = [compared("f", name, "the source", 1.0, 1.0, note=note) for name in ("median", "mean")]
    _print(result(checks, []))
    said = " ".join(capsys.readouterr().out.split())
    assert f"median; mean \N{EN DASH} {note}" in said
    assert said.count("20 points") == 1
    assert notes_of([check.plain() for check in checks]) == {note: ["median", "mean"]}


def test_the_page_names_each_source_once():
    checks = [compared("f", f"check {place}", f"source {place % 2}", 1.0, 1.0) for place in range(6)]
    page = render(result(checks, []))
    assert Counter(re.findall("source [01]", page)) == {"source 0": 1, "source 1": 1}
    assert page.index("check 4") < page.index("source 1") < page.index("check 1")


def test_texts_fold_to_the_right_like_the_numbers_and_verdicts_do_not_fold():
    page = render(result([holds("f", "n", "s", "a text longer than a number", "b", True)], []))
    assert '<td class="fold">a text longer' in page
    assert re.search(r'<small class="whole">holds: pass', page)


def run_of(engine):
    lines = {"t_s": [0.0, 1.0], "running": [1, 2], "waiting": [0, 0], "kv_share": [0.1, 0.2]}
    return {
        **{"name": "r", "requests": 2, "preemptions": 0, "num_blocks": 10, "kv_pool": "given"},
        **{"extrapolated_share": 0.0, "notes": [], "cdf": {}},
        "timeline": {"engine": {key: lines[key] for key in engine}, "ours": lines},
    }


@pytest.mark.parametrize("logged", [True, False])
def test_a_chart_without_an_engine_curve_says_so(logged):
    engine = ("t_s", "running", "waiting", *(("kv_share",) if logged else ()))
    page = render(result([], [], [run_of(engine)]))
    assert ("KV pool in use, simulated (the engine did not log it)" in page) is not logged


def test_no_line_ends_between_a_number_and_its_percent_sign(capsys):
    from kvfold.analysis.out import say

    for length in range(60, 80):
        say("x" * length + " +26.3 % of it")
        assert not re.search(r"\n\s*%", capsys.readouterr().out)


def test_fitted_terms_are_in_the_unit_of_the_tables(capsys):
    from kvfold.analysis.cmd_validate import _print

    fit = {"step_s": 1e-4, "token_s": 1e-7, "sequence_s": 1e-6, "fitted_requests": 1, "tested_requests": 1}
    _print(result([], []) | {"fit": fit})
    assert "100 µs a step, 0.100 µs a token" in capsys.readouterr().out


def test_costs_belong_to_a_result_of_ones_own(tmp_path):
    (tmp_path / "costs.csv").write_text("")
    with pytest.raises(ConfigError, match="--vllm-result or --fit"):
        invoke("--only", "memory", "--costs", tmp_path / "costs.csv")
