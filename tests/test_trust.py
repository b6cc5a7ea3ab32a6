"""What a plan assumes, what is not validated, and what stands behind its joules."""

from types import SimpleNamespace

import pytest

from kvfold.analysis.deployment import deploy
from kvfold.analysis.trust import assumed, energy_note, measured_text, not_validated
from kvfold.traces.load import load
from tests.test_engine import calls_of
from tests.test_plan import SAMPLE, question


@pytest.fixture(scope="module")
def sample():
    return load(SAMPLE)


def answers(**origins):
    runs = {name: SimpleNamespace(run=SimpleNamespace(attention_origin_s=of)) for name, of in origins.items()}
    return SimpleNamespace(equal=runs)


@pytest.mark.parametrize(
    ("formats", "attention"),
    [(("bf16", "fixed4"), "bf16, fixed4"), (("bf16", "gaac"), "bf16")],
)
def test_only_what_was_measured_is_said_to_be(sample, formats, attention):
    asked = question(sample, formats, gpu="h200")
    measured = f"decode attention of {attention}, linear layers and prompt attention"
    assert measured_text(asked) == measured
    assert any(line.startswith(f"{measured} come from costs_h200.csv") for line in assumed(asked))


def test_a_model_takes_no_layers_from_the_table_that_it_does_not_have(sample):
    """Experts and linear layers of a mixture are modelled."""
    mixture = question(sample, deployment=deploy("qwen3-30b-a3b", "h200"))
    assert measured_text(mixture) == "decode attention of bf16 and prompt attention"


def test_without_a_table_everything_is_modelled(sample):
    asked = question(sample)
    assert measured_text(asked) == ""
    assert any("no cost table was measured for rtx-4090" in line for line in assumed(asked))
    assert any("every step time is modelled" in line for line in not_validated(asked, answers()))


def test_time_outside_the_measured_grid_is_not_validated(sample):
    asked = question(sample, gpu="h200")
    lines = not_validated(asked, answers(bf16={"interpolated": 3.0, "extrapolated": 1.0}))
    assert any("bf16: 25 % of its decoding time has batches or contexts outside" in line for line in lines)
    assert not any("costs_h200" in line for line in lines)
    assert not any("outside" in line for line in assumed(asked))


@pytest.mark.parametrize(("requests", "said"), [(63, True), (1000, False)])
def test_a_load_that_single_requests_decide_is_said(requests, said):
    trace = calls_of(*[(float(call), 100, 10) for call in range(requests)])
    lines = not_validated(question(trace), answers())
    assert any("of 63 requests 0.6 may miss the SLO" in line for line in lines) == said
    assert any("single requests" in line for line in lines) == said


@pytest.mark.parametrize(
    ("gpu", "said"),
    [("dgx-spark", "energy is not known: the profile of dgx-spark states no"), ("h200", "upper bound")],
)
def test_joules_are_bounded_or_said_to_be_missing(sample, gpu, said):
    assert said in energy_note(question(sample, gpu=gpu))
