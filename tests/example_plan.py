"""A plan as `kvfold plan` builds it, with made-up numbers of a likely size, for the tests of what shows it."""

import numpy as np

from kvfold.analysis.metrics import cdf

FORMATS = {"bf16": 1.0, "gaac": 0.74, "fp8-e4m3": 0.5}


def make_plan():
    rng = np.random.default_rng(0)

    def row(metric, format_name, unit, baseline, value, ci95, n=1200):
        change = None if not baseline else value / baseline - 1
        named = {"metric": metric, "format": format_name, "unit": unit, "baseline": baseline, "value": value}
        return named | {"change": change, "ci95": ci95, "n": n, "origin": "modelled"}

    def rows(format_name, factor):
        lower = [factor - 1.01, factor - 0.99]
        higher, own = [1 / factor - 1.02, 1 / factor - 0.98], factor**0.1
        return [
            row("output tokens", format_name, "tok/s", 1802.4, 1802.4 / factor, higher),
            row("goodput", format_name, "requests/s", 3.1, 3.1, [-0.01, 0.01]),
            row("per-request rate, mean", format_name, "tok/s", 61.2, 61.2 * own, [own - 1.02, own - 0.98]),
            row("TTFT, P50", format_name, "s", 0.981, 1.034, [-0.05, 0.16]),
            row("TTFT, P99", format_name, "s", 9.71, 9.71 * factor, lower),
            row("TPOT, mean", format_name, "ms", 16.4, 16.4 * factor, lower),
            row("TPOT, P99", format_name, "ms", 41.7, 41.7 * factor, lower),
            row("ITL, P99", format_name, "ms", 212.0, 230.5, None, n=310_222),
            row("task completion, P50", format_name, "s", 322.1, 318.4, None, n=85),
            row("preemptions", format_name, "", 0, 0, None),
            row("prefix hits", format_name, "% of tokens", 71.3, 71.3, None),
            row("KV held, peak", format_name, "GiB", 61.2, 61.2 * factor, None),
            row("energy per output token", format_name, "J", 0.512, 0.512 * factor, None),
        ]

    def steps(format_name, factor):
        names = (
            "attention: KV read",
            "attention: decode work",
            "raw tails",
            "linear layers",
            "LM head",
            "launch gaps",
        )
        base = np.array([3100e-6, 0, 0, 3420e-6, 260e-6, 300e-6])
        ours = base * [factor, 1, 1, 1, 1, 1] + [0, 410e-6, 22e-6, 0, 0, 0]
        light = ours * [0.8, 0.5, 0.8, 0.8, 0.8, 0]
        attention = base[0] / ours[:3].sum()
        share = base[0] / base.sum()
        return {
            "format": format_name,
            "step_s": ours.sum(),
            "baseline_step_s": base.sum(),
            "speedup": base.sum() / ours.sum(),
            "attention_share": share,
            "attention_speedup": attention,
            "amdahl_speedup": 1 / (1 - share + share / attention),
            "rows": [
                {"name": n, "baseline_s": b, "s": s, "speed_of_light_s": lim, "origin": "modelled"}
                for n, b, s, lim in zip(names, base, ours, light, strict=True)
            ],
        }

    others = {name: factor for name, factor in FORMATS.items() if name != "bf16"}
    device = (
        ("device memory", 150_754_820_096, "published"),
        ("kept free", 15_075_482_010, "given"),
        ("weights", 16_381_470_720, "modelled"),
        ("activation peak", 3_111_976_960, "modelled"),
        ("CUDA graphs", 1_105_954_078, "published"),
        ("non-torch memory", 139_586_437, "published"),
        ("KV pool", 114_940_349_891, "modelled"),
    )
    batches, contexts = [1, 4, 8, 32, 128, 256], [1024 * 2**i for i in range(8)]
    work = np.outer(batches, contexts) / (np.outer(batches, contexts) + 400_000)
    times = np.linspace(0, 3600, 300)
    latencies = {"ttft_s": (0.9, 1.0), "tpot_s": (0.016, 0.3), "itl_s": (0.014, 0.7)}
    curves = {
        study: {
            name: {
                key: cdf(middle * factor * rng.lognormal(0, spread, 4000))
                for key, (middle, spread) in latencies.items()
            }
            for name, factor in FORMATS.items()
        }
        for study in ("recorded_load", "fixed_concurrency", "fixed_budget")
    }
    loads = np.array([1.0, 2.0, 2.6, 3.0, 3.2, 3.6, 4.4])
    spread = {"p50": 8123, "p90": 31_000, "p99": 61_244, "max": 131_071}
    task = {
        "mean": 400.2,
        "p50": 322.1,
        "p90": 801.0,
        "p95": 1002.0,
        "p99": None,
        "n": 85,
        "p99_flagged": True,
    }
    return {
        "verdict": {
            "text": "qwen3-8b on 1 x h200, SLO agent: gaac serves 35 % more load on the same KV budget "
            "(3.1 -> 4.19 requests/s); at equal concurrency a decode step runs 1.06x as fast "
            "(attention is 44 % of it); what binds is memory. All step times modelled.",
            "slo_met": True,
            "format": "gaac",
            "capacity_change": 0.351,
            "step_speedup": 1.056,
            "binding": "none",
            "binding_at_highest_load": "memory",
        },
        "config": {
            "model": "qwen3-8b",
            "gpu": "h200",
            "weights": "bf16",
            "tp": 1,
            "slo": "agent",
            "slo_text": "TTFT ≤ 10 s and TPOT ≤ 100 ms",
            "formats": list(FORMATS),
            "baseline": "bf16",
            "seed": 0,
            "max_num_seqs": 256,
            "max_batched_tokens": 8192,
            "max_context_tokens": 131_072,
            "prefix_caching": True,
            "version": "0.1.0",
            "command": "kvfold plan --model qwen3-8b --gpu h200 --trace traces/data/sample.jsonl --slo agent "
            "--formats bf16,gaac,fp8-e4m3 --report plan.html",
        },
        "trace": {
            "format": "canonical",
            "source": "sample.jsonl",
            "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
            "rows_read": 1210,
            "rows_kept": 1200,
            "drops": {"no_output": 10},
            "span_s": 3600.0,
            "rate_per_s": 0.3333,
            "interarrival_cv": 1.42,
            "dispersion_60_s": 6.0,
            "input_tokens": spread,
            "output_tokens": {"p50": 212, "p90": 801, "p99": 2044, "max": 8192},
            "sessions": 85,
            "calls_per_session": {"p50": 11, "p90": 40, "p99": 77, "max": 90},
            "tool_wait_s": {"p50": 0.8, "p90": 12.5, "p99": 180.0, "max": 911.2},
            "human_wait_s": {"p50": None, "p90": None, "p99": None, "max": None, "n": 0},
            "block_size_tokens": 64,
            "prefix_hit_token_share": 0.713,
            "warnings": ["12 waits are negative in the source and were taken as 0"],
        },
        "fixed_concurrency": {
            "concurrency": 64,
            "concurrency_origin": "largest power of two at which bf16 meets the SLO",
            "rows": [line for name, factor in others.items() for line in rows(name, factor)],
        },
        "fixed_budget": {
            "kv_budget_bytes": 114_940_349_891,
            "kv_budget_origin": "modelled: what the waterfall leaves",
            "load_unit": "requests/s",
            "note": "a burst that drains afterwards",
            "rows": [
                line
                for name, factor in others.items()
                for line in [
                    row(
                        "highest load within the SLO",
                        name,
                        "requests/s",
                        3.1,
                        3.1 / factor,
                        [1 / factor - 1.04, 1 / factor - 0.96],
                        n=15,
                    ),
                    row("sequences of 9,211 tokens that fit", name, "", 84, int(84 / factor), None, n=1),
                    *rows(name, factor),
                ]
            ],
        },
        "recorded_load": {
            "note": "at the recorded load the GPU is busy 31 % of the time and live KV peaks at 22 % of the "
            "budget",
            "rows": rows("gaac", 0.97),
        },
        "memory": {
            "kv_bytes_per_token": 147_456,
            "kv_bytes_per_sequence": 0,
            "formats": [
                {
                    "format": name,
                    "waterfall": [{"name": n, "bytes": size, "origin": origin} for n, size, origin in device],
                    "num_blocks": int(48_000 / factor / (1 if name == "bf16" else 16)),
                    "unit_tokens": 16 if name == "bf16" else 256,
                    "unit_bytes": int(2_359_296 * factor * (1 if name == "bf16" else 16)),
                    "encoded_bits": 16 * factor - 0.3 * (factor < 1),
                    "slot_bits": 16 * factor,
                    "raw_block_share": 0.013 if name == "gaac" else 0.0,
                    "origin": "measured" if name == "gaac" else "modelled",
                    "source": "K/V of one 8B model, 24 windows",
                }
                for name, factor in FORMATS.items()
            ],
        },
        "step": {"batch": 22, "context_tokens": 9211, "formats": [steps(*pair) for pair in others.items()]},
        "break_even": [
            {
                "format": name,
                "batch": b,
                "context_tokens": c,
                "stretches": [[c, contexts[-1]]] if c else [],
                "tried_tokens": [contexts[0], contexts[-1]],
                "tried": len(contexts),
                "not_measured": 0,
                "origin": "modelled",
                "origins": {"bf16": ["modelled"], name: ["modelled"]},
            }
            for name in others
            for b, c in zip(batches, [None, 32_768, 16_384, 4096, 1024, 1024], strict=True)
        ],
        "heatmap": [
            {
                "format": name,
                "batches": batches,
                "contexts": contexts,
                "speedup": (0.985 + work * (1 / factor - 1) * 0.6).tolist(),
            }
            for name, factor in others.items()
        ],
        "curves": curves,
        "timeline": {
            name: {
                "t_s": times.tolist(),
                "running": (30 / factor * (1 + 0.5 * np.sin(times / 300))).round().tolist(),
                "waiting": np.maximum(0, 40 * factor * np.sin(times / 300 + 1)).round().tolist(),
                "used_bytes": (7e10 * (1 + 0.4 * np.sin(times / 300))).tolist(),
            }
            for name, factor in FORMATS.items()
        },
        "load_curve": [
            {
                "format": name,
                "load": load,
                "attainment": float(1 / (1 + np.exp(8 * (load - 3.7)))),
                "goodput_rps": float(0.9 * load / (1 + np.exp(8 * (load - 3.7)))),
                "ttft_p99_s": float(2 * np.exp(load)),
            }
            for name, factor in FORMATS.items()
            for load in (loads / factor**0.7).tolist()
        ],
        "sessions": {
            name: {
                "count": 85,
                "completed": 84,
                "task_completion_s": task,
                "llm_s": 21_000.0 * factor,
                "queue_s": 1200.0 * factor,
                "prefill_s": 4100.0,
                "decode_s": 15_700.0 * factor,
                "tool_wait_s": 9100.0,
                "human_wait_s": 80_000.0,
                "other_wait_s": 0.0,
            }
            for name, factor in FORMATS.items()
        },
        "energy": {
            name: {"j_per_output_token": 0.512 * factor, "idle_j": 91_200.0, "origin": "modelled"}
            for name, factor in FORMATS.items()
        },
        "energy_note": "energy is an upper bound",
        "rejected": {
            "count": 12,
            "share": 0.01,
            "offered": 1200,
            "reasons": {"longer_than_model_context": 12},
        },
        "ci_method": "95 % percentile interval of a paired circular moving-block bootstrap",
        "notes": ["3 calls without output were simulated with one token"],
        "limits": ["no cost table was measured for h200: every step time is modelled from datasheet figures"],
    }


def without_numbers():
    """The plan of runs in which nothing completed."""
    plan = make_plan()
    for study in ("fixed_concurrency", "fixed_budget"):
        for row in plan[study]["rows"]:
            row.update(baseline=None, value=None, change=None, ci95=None, n=0)
    plan["verdict"].update(slo_met=False, capacity_change=None, step_speedup=None)
    plan["curves"] = {"fixed_budget": {"bf16": {"ttft_s": {"q": [], "v": []}}}}
    plan["timeline"] = {"bf16": {"t_s": [], "running": [], "waiting": [], "used_bytes": []}}
    plan["load_curve"] = []
    plan["energy"]["gaac"]["j_per_output_token"] = None
    return plan


def poisoned(value, payload):
    """The same plan with the payload before every text, in names of formats, drops and reasons too."""
    if isinstance(value, str):
        return payload + value
    if isinstance(value, dict):
        free = FORMATS.keys() | {"no_output", "longer_than_model_context"}
        return {payload + key if key in free else key: poisoned(item, payload) for key, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item, payload) for item in value]
    return value
