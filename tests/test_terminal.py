"""The plan in the terminal: 80 columns, the verdict last, and no text that can steer it."""

import re

import pytest

from kvfold.analysis.terminal import print_plan
from tests.example_plan import make_plan, poisoned, without_numbers


@pytest.fixture
def printed(capsys, monkeypatch):
    """Prints a plan and returns its lines; 80 columns as when the output is no terminal."""

    def lines(plan, **environment):
        monkeypatch.delenv("COLUMNS", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        print_plan(plan)
        return capsys.readouterr().out.splitlines()

    return lines


def test_the_terminal_gets_80_columns_and_the_verdict_last(printed):
    lines = printed(make_plan())
    assert lines[-1] == make_plan()["verdict"]["text"]
    assert max(len(line) for line in lines[:-1]) <= 80
    text = "\n".join(lines)
    assert "Fixed concurrency (N = 64; largest power of two at which bf16 meets the SLO)" in text
    assert "Fixed KV budget (107 GiB; each at its highest load within the SLO)" in text
    assert re.search(r"TTFT, P99 \(s\) +9\.71 +7\.19 +-26\.0 % +\[-27\.0, -25\.0\] +1,200 +modelled", text)
    assert text.index("Fixed concurrency") < text.index("Fixed KV budget") < text.index("Recorded load")


def test_no_line_ends_in_blanks_and_joules_carry_their_note(printed):
    lines = printed(make_plan(), COLUMNS="70")
    assert [line for line in lines if line != line.rstrip()] == []
    assert "Note: energy is an upper bound" in lines


def test_numbers_stay_whole_with_the_longest_origin_names(printed):
    plan = make_plan()
    for study in ("fixed_concurrency", "fixed_budget", "recorded_load"):
        for row in plan[study]["rows"]:
            row["origin"] = "extrapolated"
    lines = printed(plan)
    assert max(len(line) for line in lines[:-1]) <= 80
    assert any(line.endswith("[-27.0, -25.0]   1,200 extrapol.") for line in lines)


def test_a_narrow_terminal_folds_names_and_not_numbers(printed):
    lines = printed(make_plan(), COLUMNS="70")
    assert max(len(line) for line in lines[:-1]) <= 70
    assert sum("[-27.0, -25.0]" in line for line in lines) == 6
    assert sum("1,802" in line for line in lines) == 5


def test_colour_only_on_a_terminal_and_not_with_no_color(printed):
    assert "\x1b" not in "".join(printed(make_plan()))
    assert "\x1b[32m" in "".join(printed(make_plan(), FORCE_COLOR="1"))
    assert "\x1b[3" not in "".join(printed(make_plan(), FORCE_COLOR="1", NO_COLOR="1"))


def test_texts_of_the_plan_cannot_steer_the_terminal(printed):
    lines = printed(poisoned(make_plan(), "\x1b]0;owned\x07\x1b[2J\u202e[bold]\r\n"))
    text = "\n".join(lines)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    assert "[bold]" in text


@pytest.mark.parametrize("key", make_plan())
def test_a_part_that_the_plan_lacks_is_left_out(key, printed):
    plan = make_plan()
    del plan[key]
    assert printed(plan)


def test_an_empty_plan_and_one_without_numbers_are_shown(printed):
    assert printed({}) == [""]
    plan = without_numbers()
    assert printed(plan)[-1] == plan["verdict"]["text"]
