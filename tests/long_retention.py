"""What a KV format and a retention policy buy an agent fleet: WEKA sessions at one fixed KV budget.

A person starts it: `python tests/long_retention.py PATH/all710_original.tar.xz --out FILE.csv`. 64 live sessions
in file order, a finished one replaced by the next, sub-agents included, repeats left out; about 10 s a replay on
an idle machine. The table of the last run is in docs/retention.md.
"""

import argparse
import csv
import sys

import numpy as np

from kvfold.analysis.deployment import deploy, format_sizes
from kvfold.analysis.latency import call_latency
from kvfold.analysis.metrics import metrics, sessions
from kvfold.analysis.slo import PRESETS
from kvfold.sim.retention import parse_retention
from kvfold.sim.scenario import Scenario, run
from kvfold.sim.sessions import Load
from kvfold.traces.load import load
from kvfold.traces.transform import first_of_equal_sessions, keep_sessions

POLICIES = ("drop", "lru", "keep", "ttl:60", "ttl:600", "swap", "least-waste", "oracle")
FORMATS = ("bf16", "gaac", "fixed4", "fp8-e4m3")
#: Model and longest context; sessions of the dense model are those that fit it.
MODELS = (("qwen3.5-35b-a3b", 262_144), ("llama-3.1-8b", 131_072))
LIVE_SESSIONS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive")
    parser.add_argument("--out", required=True)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--models", default=",".join(model for model, _ in MODELS))
    options = parser.parse_args()
    whole = load(options.archive)
    trace, text = keep_sessions(whole, first_of_equal_sessions(whole))
    print(text, file=sys.stderr)
    rows = []
    for model, context in MODELS:
        if model not in options.models.split(","):
            continue
        deployment = deploy(model, options.gpu)
        used = trace
        if model == "llama-3.1-8b":
            longest = np.zeros(trace.session_id.max() + 1, np.int64)
            np.maximum.at(longest, trace.session_id, trace.input_tokens + np.maximum(trace.output_tokens, 1))
            used, text = keep_sessions(trace, np.flatnonzero((longest > 0) & (longest <= context)).tolist())
            print(f"{model}: {text}", file=sys.stderr)
        for name in options.formats.split(","):
            for policy in options.policies.split(","):
                rows.append(replay(deployment, used, name, policy, context))
                print(rows[-1], file=sys.stderr)
    add_gain(rows)
    with open(options.out, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def add_gain(rows):
    """How much of what the oracle takes off LRU's median task each policy takes off, where both were run."""
    median_s = {(row["model"], row["format"], row["retention"]): row["task_p50_s"] for row in rows}
    for row in rows:
        lru_s, oracle_s = (median_s.get((row["model"], row["format"], name)) for name in ("lru", "oracle"))
        row["of_oracle_gain"] = ""
        if lru_s and oracle_s and lru_s > oracle_s:
            row["of_oracle_gain"] = round((lru_s - row["task_p50_s"]) / (lru_s - oracle_s), 3)


def replay(deployment, trace, name, policy, context):
    """One row of the table."""
    sizes = format_sizes(name)
    budget = deployment.budget(sizes)
    scenario = Scenario(
        trace=trace,
        cost=deployment.cost(sizes),
        budget=budget,
        max_context_tokens=context,
        load=Load(live_sessions=LIVE_SESSIONS),
        retention=parse_retention(policy),
        power=deployment.power(),
    )
    result = run(scenario)
    found = metrics(result, PRESETS["agent"])
    task = sessions(result.calls, call_latency(result.calls))["task_completion_s"]
    return {
        "model": deployment.model.name,
        "format": name,
        "retention": policy,
        "kv_budget_gib": round(budget.kv_budget_bytes / 2**30, 2),
        "task_p50_s": round(task["p50"], 1),
        "task_p95_s": round(task["p95"], 1),
        "ttft_p99_s": round(found["metrics"]["ttft_s"]["p99"], 2),
        "tpot_mean_ms": round(1e3 * found["metrics"]["tpot_s"]["mean"], 2),
        "slo_attainment": round(found["slo_attainment"], 4),
        "makespan_s": round(found["makespan_s"]),
        "re_prefilled_mtokens": round(result.kv["re_prefilled_tokens"] / 1e6, 1),
        "idle_cached_tb_s": round(result.kv["idle_cached_byte_s"] / 1e12, 1),
        "idle_held_tb_s": round(result.kv["idle_held_byte_s"] / 1e12, 1),
        "host_tb_s": round(result.kv["host_byte_s"] / 1e12, 1),
        "forced_releases": result.kv["forced_releases"],
        "preemptions": found["preemptions"],
        "kj_per_task": round(found["energy"]["j_per_task"] / 1e3, 1),
        "rejected": found["counts"]["rejected"],
    }


if __name__ == "__main__":
    main()
