"""Made-up profiles and recorded runs, in the form of LLMServingSim's files."""

import csv
import json

import numpy as np

from kvfold.analysis.validate_replay import replay
from kvfold.analysis.validate_run import load_run

LAYERS = ("embedding", "layernorm", "qkv_proj", "rotary_emb", "o_proj", "final_layernorm")
MLP = ("gate_up_proj", "act_fn", "down_proj")
#: Slopes of the made-up times, us.
TOKEN_US, KV_US, PAIR_US = 0.05, 2e-4, 1e-6
REPEATS = 3  # skew.csv holds sums over them
CHUNKS, COUNTS, CONTEXTS = (16, 256, 2048), (1, 4, 16, 64, 256), (16, 256, 1024, 4096, 16_384)


def write_csv(path, columns, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def even_us(count, context):
    """One attention call of the made-up GPU over `count` equal contexts."""
    return 8.0 + KV_US * count * context


def make_profile(
    folder, hardware="RTX4090", model="meta-llama/Llama-3.1-8B", tp=1, moe=False, skew=True, factor=1.0
):
    """A profile folder in `folder`; times are linear, so that interpolation is exact."""
    name = f"{hardware}_{model.replace('/', '_')}_bf16_tp{tp}"
    path = folder / name
    path.mkdir(parents=True)
    layers = LAYERS if moe else (*LAYERS, *MLP)
    write_csv(
        path / "dense.csv",
        ("layer", "tokens", "time_us"),
        [(layer, n, factor * (10 + TOKEN_US * n)) for layer in layers for n in (1, 512, 2048)],
    )
    write_csv(
        path / "per_sequence.csv",
        ("layer", "sequences", "time_us"),
        [(layer, n, 100 + n) for layer in ("lm_head", "sampler") for n in (1, 256)],
    )
    rows = [(0, 0, n, kv, even_us(n, kv)) for n in COUNTS for kv in CONTEXTS]
    for chunk in CHUNKS:
        for past in (0, 1024, 8192):
            own = PAIR_US * (chunk * chunk / 2 + chunk * past)
            rows.append((chunk, past, 0, 0, 5 + own))
            rows += [(chunk, past, n, kv, 5 + own + even_us(n, kv)) for n in COUNTS for kv in CONTEXTS]
    write_csv(
        path / "attention.csv", ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"), rows
    )
    if skew:
        columns = "regime,n,nb,ratio,skew,pc,kp,kvs,kv_big,kv_mean,t_mean_us,t_max_us,t_skew_us,alpha"
        uneven = []
        for chunk in (0, 256):
            for n in (4, 16, 64):
                for longer in (1, n // 2):
                    short, big = 256, 1024
                    mean = (longer * big + (n - longer) * short) / n
                    even = REPEATS * even_us(n, mean)
                    extra = REPEATS * 0.01 / longer * (big - short)
                    row = (
                        "mixed" if chunk else "pure",
                        n,
                        longer,
                        longer / n,
                        4.0,
                        chunk,
                        0,
                        short,
                        big,
                        mean,
                    )
                    uneven.append((*row, even, REPEATS * even_us(n, big), even + extra, 0.1))
        write_csv(path / "skew.csv", columns.split(","), uneven)
    if moe:
        experts = [(n, k, 5 + 0.02 * n + 0.5 * k) for n in (1, 64, 2048) for k in (1, 8, 64, 128)]
        write_csv(path / "moe.csv", ("tokens", "activated_experts", "time_us"), experts)
    meta = {
        "model": model,
        "hardware": hardware,
        "engine_effective": {"tensor_parallel_size": 1},
        "skew_profile": {"enabled": skew},
    }
    (path / "meta.json").write_text(json.dumps(meta))
    return path


def make_run(
    folder,
    name,
    hardware="RTX4090",
    model="meta-llama/Llama-3.1-8B",
    tp=1,
    data_parallel=1,
    requests=40,
    blocks=400,
    slower=1.0,
):
    """A recorded run whose times are those of our own replay, `slower` times as long; profiles must be there.

    The two clocks are years apart, and the front end adds up to 20 ms to every arrival but one.
    """
    path = folder / name
    path.mkdir(parents=True)
    instance = {
        "model_name": model,
        "hardware": hardware,
        "num_npus": tp,
        "tp_size": tp,
        "npu_mem": {"mem_util": 0.9},
    }
    instances = [
        instance | ({"ep_size": data_parallel, "dp_group": "A"} if data_parallel > 1 else {})
    ] * data_parallel
    cluster = {"num_nodes": 1, "nodes": [{"num_instances": data_parallel, "instances": instances}]}
    (path / "cluster_config.json").write_text(json.dumps(cluster))
    meta = {
        "schema_version": 1,
        "model": model,
        "vllm_version": "0.19.0",
        "engine_kwargs": {
            "tensor_parallel_size": tp,
            "data_parallel_size": data_parallel,
            "enable_expert_parallel": data_parallel > 1,
            "max_num_seqs": 128,
            "max_num_batched_tokens": 2048,
            "max_model_len": None,
        },
        "dataset_hash": "made up",
    }
    if blocks is not None:
        meta["kv_cache"] = {"num_gpu_blocks": blocks, "block_size": 16, "enable_prefix_caching": True}
    (path / "meta.json").write_text(json.dumps(meta))
    rng = np.random.default_rng(5)
    arrival = np.cumsum(rng.exponential(0.05, requests))
    inputs, outputs = rng.integers(100, 900, requests), rng.integers(2, 200, requests)
    rows = [
        dict(input_toks=int(i), output_toks=int(o), arrival_time=1.7e9 + a, queued_ts=500 + a)
        for i, o, a in zip(inputs, outputs, arrival, strict=True)
    ]
    late = rng.uniform(0, 0.02, requests)
    late[0] = 0.0
    write_requests(path, rows, arrival, arrival, late)
    found = replay(load_run(path), folder / "profiles").simulated.calls
    first = arrival + slower * (found.first_token_s - found.arrival_s)
    last = first + slower * (found.last_token_s - found.first_token_s)
    write_requests(path, rows, first, last, late)
    write_csv(
        path / "timeseries.csv",
        ("t", "prompt_throughput", "gen_throughput", "running", "waiting", "kv_cache_pct"),
        [(t + 1.0, 100.0, 200.0, 5, 1, 40.0) for t in range(5)],
    )
    return path


def write_requests(path, rows, first, last, late):
    with (path / "requests.jsonl").open("w") as file:
        for number, row in enumerate(rows):
            times = {
                "queued_ts": row["queued_ts"] + late[number],
                "scheduled_ts": row["queued_ts"] + late[number],
                "first_token_ts": 500 + first[number],
                "last_token_ts": 500 + last[number],
            }
            file.write(json.dumps({"request_id": f"bench-{number}"} | row | times) + "\n")
