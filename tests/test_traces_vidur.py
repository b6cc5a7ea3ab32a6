"""Vidur's processed traces: seconds by name; lengths without arrivals are refused; equal to Azure's rows."""

import io

import numpy as np
import pytest

from kvfold.traces import vidur
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load


def read(content: str):
    return vidur.read(io.BytesIO(content.encode()), "v.csv")


def test_rows_by_name_of_the_column_whatever_its_place():
    trace = read("num_decode_tokens,arrived_at,num_prefill_tokens,pd_ratio\r\n5,0.052,10,2\r\n8,0,20,2")
    assert trace.arrival_time_s.tolist() == [0, 0.052]
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([20, 10], [8, 5])
    assert (trace.meta.format, trace.meta.time_unit) == ("vidur", "s")


def test_lengths_without_arrivals_are_refused():
    with pytest.raises(
        BadTraceError, match="needs arrival times, but the column arrived_at is not among"
    ) as caught:
        read("num_prefill_tokens,num_decode_tokens,total_tokens\n2730,167,2897\n")
    assert caught.value.place == "v.csv:1"
    assert "lengths only" in caught.value.mend


@pytest.mark.parametrize("row", [",10,5", "-1,10,5", "0,10.5,5", "0,,5", "inf,10,5"])
def test_a_bad_row_is_named(row):
    with pytest.raises(BadTraceError) as caught:
        read(f"arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,1\n{row}\n")
    assert caught.value.place == "v.csv:3"


@pytest.mark.parametrize("name", ["code", "conv"])
def test_azure_rows_in_seconds_have_the_same_offsets(shared_data, tmp_path, name):
    """What Vidur did to the Azure files: other names, and seconds from the first row."""
    azure = load(shared_data / f"traces/azure-llm-2023/AzureLLMInferenceTrace_{name}.csv")
    rows = zip(
        azure.arrival_time_s.tolist(), azure.input_tokens.tolist(), azure.output_tokens.tolist(), strict=True
    )
    path = tmp_path / "splitwise.csv"
    header = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
    path.write_text(header + "".join(f"{at:.7f},{prompt},{output}\n" for at, prompt, output in rows))
    trace = load(path)
    assert trace.meta.format == "vidur"
    np.testing.assert_allclose(trace.arrival_time_s, azure.arrival_time_s, atol=1e-6)
    assert trace.input_tokens.tolist() == azure.input_tokens.tolist()
