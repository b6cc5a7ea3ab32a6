"""splitwise-sim: a CSV of single calls in seconds."""

from kvfold.traces.load import load


def test_the_real_example(shared_data):
    trace = load(shared_data / "traces/misc-formats/splitwise_sim_test_trace.csv")
    assert (trace.meta.format, trace.meta.rows_read, trace.meta.time_unit) == ("splitwise-sim", 3, "s")
    assert trace.arrival_time_s.tolist() == [0, 2, 3]
    assert trace.input_tokens.tolist() == [4096, 2048, 2048]
    assert trace.output_tokens.tolist() == [32, 8, 16]
    assert trace.source_id == ["0", "1", "2"]


def test_the_csv_of_inference_perf_is_azure(shared_data):
    trace = load(shared_data / "traces/misc-formats/inference_perf_trace_replay.csv")
    assert (trace.meta.format, len(trace)) == ("azure", 20)  # no newline after the last row
