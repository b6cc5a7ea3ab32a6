"""A small run of the fuzzer: damaged files of every format load soundly or are refused by one line."""

from tests.long_traces_fuzz import fuzz


def test_damage_raises_only_the_one_error(tmp_path):
    outcomes, wrong = fuzz(500, 3, tmp_path)
    assert not wrong, wrong[0]
    assert outcomes["sound"] >= 10
    assert outcomes["refused"] >= 300


def test_the_fuzzer_finds_another_exception(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.long_traces_fuzz.load", lambda *_, **__: 1 / 0)
    outcomes, wrong = fuzz(50, 3, tmp_path)
    assert outcomes["wrong"] == len(wrong) > 20
    assert "ZeroDivisionError" in wrong[0]
