"""Several changes at once: their order, their lines, and the options that ask for them."""

from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from kvfold.analysis.changing import changed, changing
from kvfold.traces import synth
from kvfold.traces.changes import Changes
from kvfold.traces.load import load
from kvfold.traces.transform import cap_idle, keep_matching, sample_sessions, scale_rate, window

SAMPLE = Path(__file__).resolve().parent.parent / "traces/data/sample.jsonl"


def test_nothing_asked_for_changes_nothing():
    trace = synth.poisson(50, 8.0, 100, 20, seed=1)
    same, lines = Changes().apply(trace)
    assert same is trace
    assert lines == []


def test_all_at_once_are_one_after_another():
    trace = load(SAMPLE)
    asked = Changes(
        window_s=(100.0, 2_000.0), input_tokens=(2_000, 30_000), sessions=40, idle_s=30.0, rate=3.0, seed=5
    )
    made, lines = asked.apply(trace)
    step, by_hand = window(trace, 100.0, 2_000.0)[0], []
    for change, *options in (
        (keep_matching, (), (), (), (2_000, 30_000), None),
        (sample_sessions, 40, 5),
        (cap_idle, 30.0),
        (scale_rate, 3.0, False),
    ):
        step, line = change(step, *options)
        by_hand.append(line)
    assert lines[1:] == by_hand
    np.testing.assert_array_equal(made.arrival_time_s, step.arrival_time_s)
    np.testing.assert_array_equal(made.block_ids, step.block_ids)
    assert made.meta.rows_read == made.meta.rows_kept + sum(made.meta.drops.values()) == len(trace)
    assert made.meta.warnings[-5:] == tuple(lines)


def test_waits_need_a_rate():
    with pytest.raises(ValueError, match="waits are scaled together with the rate"):
        Changes(scale_waits=True)


def run(*options):
    app = typer.Typer()
    seen: list[Changes] = []

    @app.command()
    @changing
    def look(
        file: Annotated[Path, typer.Argument()],
        changes: Changes,
        twice: Annotated[bool, typer.Option()] = False,
    ) -> None:
        seen.append(changes)
        print(len(changed(load(file), changes)), twice)

    return CliRunner().invoke(app, [str(SAMPLE), *options]), seen


def test_options_become_changes():
    result, (changes,) = run(
        *("--window", "10:", "--input-range", "5:90000", "--output-range", ":7000", "--sample-sessions", "2"),
        *(
            "--only-session",
            "3",
            "--only-session",
            "5",
            "--cap-idle",
            "60",
            "--speed-up",
            "2",
            "--scale-waits",
            "--change-seed",
            "7",
            "--twice",
        ),
    )
    assert result.exit_code == 0
    assert changes == Changes(
        window_s=(10.0, float("inf")),
        session=(3, 5),
        input_tokens=(5.0, 90_000.0),
        output_tokens=(0.0, 7_000.0),
        sessions=2,
        idle_s=60.0,
        rate=2.0,
        scale_waits=True,
        seed=7,
    )
    assert result.stdout.split()[-1] == "True"
    assert "2 times as fast" in result.stderr
    assert run()[1] == [Changes()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--window", "9"), "must be FROM:TO"),
        (("--window", "9:5"), "must be FROM:TO"),
        (("--input-range", ":"), "must be FROM:TO"),
        (("--scale-waits",), "give its factor"),
        (("--only-model", "absent"), "model must be in the trace"),
        (("--speed-up", "0"), "must be positive"),
        (("--sample-sessions", "100000"), "number of sessions must be"),
        (("--window", "1e9:2e9"), "must be FROM:TO"),
    ],
)
def test_bad_options_are_usage_errors(options, message):
    result, _ = run(*options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
