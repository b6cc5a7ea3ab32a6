"""The report and the terminal's plan: complete, safe against hostile texts, the same bytes for the same plan."""

import html
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser

import numpy as np
import pytest

from kvfold.analysis.metrics import cdf
from kvfold.analysis.report import render
from kvfold.analysis.terminal import print_plan

FORMATS = {"bf16": 1.0, "gaac": 0.74, "fp8-e4m3": 0.5}
PAYLOADS = (
    "<script>document.title=1337</script>",
    "</script><script>document.title=1337</script>",
    "</title><script>document.title=1337</script>",
    "</style><script>document.title=1337</script>",
    "--><script>document.title=1337</script>",
    "]]><script>document.title=1337</script>",
    "<img src=x onerror=document.title=1337>",
    '"><img src=x onerror=document.title=1337>',
    "'><img src=x onerror=document.title=1337>",
    "<svg onload=document.title=1337>",
    "</svg><svg onload=document.title=1337>",
    "</text></svg><iframe srcdoc='<script>parent.document.title=1337</script>'></iframe>",
    "<iframe src=javascript:parent.document.title=1337>",
    "<a href=javascript:document.title=1337>x</a>",
    "<body onload=document.title=1337>",
    "<details open ontoggle=document.title=1337>",
    "<math><mtext><style><img src=x onerror=document.title=1337>",
    "<base href=//evil.example/>",
    "<meta http-equiv=refresh content=0;url=//evil.example>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<form action=//evil.example><input autofocus onfocus=document.title=1337>",
    '" onmouseover=document.title=1337 x="',
    "' onmouseover=document.title=1337 x='",
    "` onmouseover=document.title=1337 x=`",
    "x:expression(document.title=1337)",
    "100%;background:url(//evil.example)",
    "{{ 7*7 }}{% raw %}",
    "&lt;script&gt;document.title=1337&lt;/script&gt;",
    "\x00<\x00script>document.title=1337</script>",
    "<scr\x00ipt>document.title=1337</script>",
    "\u202e>tpircs<",
    "\ud800<script>document.title=1337</script>",
)
ACTIVE_TAGS = {"script", "iframe", "img", "object", "embed", "link", "base", "form", "input"}


def make_plan():
    """A plan as `kvfold plan` builds it, with made-up numbers of a likely size."""
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
            "text": "qwen3-8b on 1 x h200, SLO agent: gaac serves 35 % more load on the same KV budget (3.1 -> 4.19 "
            "requests/s); at equal concurrency a decode step runs 1.06x as fast (attention is 44 % of it); what binds "
            "is memory. All step times modelled.",
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
            "input_tokens": spread,
            "output_tokens": {"p50": 212, "p90": 801, "p99": 2044, "max": 8192},
            "sessions": 85,
            "calls_per_session": {"p50": 11, "p90": 40, "p99": 77, "max": 90},
            "tool_wait_s": {"p50": 0.8, "p90": 12.5, "p99": 180.0, "max": 911.2},
            "human_wait_s": {"p50": None, "p90": None, "p99": None, "max": None},
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
            "note": "at the recorded load the GPU is busy 31 % of the time and live KV peaks at 22 % of the budget",
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
            {"format": name, "batch": b, "context_tokens": c, "origin": "modelled"}
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


class Elements(HTMLParser):
    """The elements of a page with the names of their attributes, its title, and its visible text."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.elements, self.texts, self.title, self._stack = [], [], "", []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, tuple(name for name, _ in attrs), dict(attrs)))
        if tag != "meta":
            self._stack.append(tag)

    def handle_endtag(self, tag):
        self._stack.pop()

    def handle_data(self, data):
        if self._stack and self._stack[-1] == "title" and "svg" not in self._stack:
            self.title += data
        if self._stack and self._stack[-1] != "style":
            self.texts.append(data)

    @property
    def shape(self):
        return [(tag, names) for tag, names, _ in self.elements]


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


def test_sections_stand_in_the_order_in_which_a_planner_asks():
    page = Elements(render(make_plan()))
    sections = [found["id"] for tag, _, found in page.elements if tag == "section" and "id" in found]
    order = "verdict comparisons recorded memory step gain latency load timeline sessions energy trace trust reproduce"
    assert " ".join(sections) == order
    anchors = [attributes["href"].removeprefix("#") for tag, _, attributes in page.elements if tag == "a"]
    assert set(anchors) < set(sections)
    assert page.title == "KV capacity plan: qwen3-8b on h200"


def test_the_page_says_what_the_plan_holds():
    text = " ".join(" ".join(Elements(render(make_plan())).texts).split())
    for words in (
        "gaac serves 35 % more load on the same KV budget",
        "+35.1 %",  # capacity
        "bf16 3.10, gaac 4.19 req/s; 95 % CI [+31.1, +39.1] %; modelled",
        "Where gaac does not help",
        "Fixed KV budget, worse: per-request rate, mean.",
        "Fixed concurrency, no clear change: goodput; TTFT, P50; prefix hits.",
        "12 requests (1.0 %) were rejected: longer than model context 12.",
        "64 at once, for every format (largest power of two at which bf16 meets the SLO)",
        "107 GiB of KV for every format (modelled: what the waterfall leaves)",
        "the GPU is busy 31 % of the time and live KV peaks at 22 % of the budget",
        "One decode step of 22 sequences with 9,211 tokens of context each",
        "limit 1.78x at 44% attention",
        "SLO 10 s",
        "SLO 100 ms",
        "no cost table was measured for h200",
        "95 % percentile interval of a paired circular moving-block bootstrap",
        "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "kvfold plan --model qwen3-8b --gpu h200",
    ):
        assert words in text, words


def test_every_row_of_a_table_of_results_carries_its_origin():
    page = render(make_plan())
    origins = len(re.findall('<span class="tag modelled">modelled</span>', page))
    plan = make_plan()
    rows = sum(len(plan[study]["rows"]) for study in ("fixed_concurrency", "fixed_budget", "recorded_load"))
    assert origins >= rows + sum(len(line["rows"]) for line in plan["step"]["formats"])


def test_the_same_plan_gives_the_same_bytes():
    assert render(make_plan()) == render(make_plan())


def test_the_page_needs_neither_network_nor_script():
    page = render(make_plan())
    for word in ("http:", "https:", "//", "url(", "@import", " src=", "<script", "javascript"):
        assert word not in page, word
    policy = re.search('http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert "default-src 'none'" in html.unescape(policy.group(1))
    for word in ("nan", "inf", "None", "Undefined"):
        assert not re.search(rf">[^<]*\\b{word}\\b[^<]*<", page), word


def test_a_long_run_stays_small_and_quick():
    plan = make_plan()
    times = np.linspace(0, 1e5, 100_000)
    plan["timeline"]["gaac"] = {
        "t_s": times.tolist(),
        "running": (times % 97).tolist(),
        "waiting": (times % 11).tolist(),
        "used_bytes": (times * 1e5).tolist(),
    }
    plan["notes"] = [f"note {i}" for i in range(10_000)]
    start = time.perf_counter()
    page = render(plan)
    assert time.perf_counter() - start < 2
    assert len(page.encode()) < 500_000
    assert "… and 9,960 more in the JSON output" in page


@pytest.mark.parametrize("key", make_plan())
@pytest.mark.parametrize("without", ["missing", None])
def test_a_part_that_the_plan_lacks_is_left_out(key, without, capsys):
    plan = make_plan()
    if without is None:
        plan[key] = None
    else:
        del plan[key]
    assert len(render(plan)) < len(render(make_plan()))
    print_plan(plan)
    assert capsys.readouterr().out


def test_an_empty_plan_and_one_without_numbers_are_shown(capsys):
    assert "KV capacity plan" in render({})
    print_plan({})
    plan = make_plan()
    for study in ("fixed_concurrency", "fixed_budget"):
        for row in plan[study]["rows"]:
            row.update(baseline=None, value=None, change=None, ci95=None, n=0)
    plan["verdict"].update(slo_met=False, capacity_change=None, step_speedup=None)
    plan["curves"] = {"fixed_budget": {"bf16": {"ttft_s": {"q": [], "v": []}}}}
    plan["timeline"] = {"bf16": {"t_s": [], "running": [], "waiting": [], "used_bytes": []}}
    plan["load_curve"] = []
    plan["energy"]["gaac"]["j_per_output_token"] = None
    page = render(plan)
    assert "missed" in page
    assert 'id="latency"' not in page
    assert 'id="load"' not in page
    assert 'id="timeline"' not in page
    print_plan(plan)
    assert capsys.readouterr().out.splitlines()[-1] == plan["verdict"]["text"]


@pytest.fixture(scope="module")
def harmless():
    return Elements(render(poisoned(make_plan(), "x")))


@pytest.mark.parametrize("payload", PAYLOADS)
def test_texts_of_the_plan_cannot_become_elements(payload, harmless):
    hostile = Elements(render(poisoned(make_plan(), payload)))
    assert hostile.shape == harmless.shape
    assert {tag for tag, _ in hostile.shape} & ACTIVE_TAGS == set()
    for tag, names, attributes in hostile.elements:
        assert not [name for name in names if name.startswith("on") or name in ("src", "srcdoc", "action")], (
            tag
        )
        assert attributes.get("href", "#").startswith("#")
        assert re.fullmatch(r"(width:[0-9.]+%)?", attributes.get("style", ""))


def test_texts_of_the_plan_cannot_run_in_a_browser(tmp_path):
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("no chromium here")
    plan = poisoned(make_plan(), "".join(PAYLOADS))
    page = tmp_path / "plan.html"
    page.write_text(render(plan), encoding="utf-8")
    switches = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        f"--disable-component-update --disable-sync --user-data-dir={tmp_path / 'profile'} --dump-dom"
    ).split()
    shown = subprocess.run(
        [browser, *switches, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    title = Elements(page.read_text(encoding="utf-8")).title
    assert title.startswith("KV capacity plan: ")
    assert " ".join(Elements(shown).title.split()) == " ".join(title.split())


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


def test_numbers_stay_whole_with_the_longest_origin_names(printed):
    plan = make_plan()
    for study in ("fixed_concurrency", "fixed_budget", "recorded_load"):
        for row in plan[study]["rows"]:
            row["origin"] = "extrapolated"
    lines = printed(plan)
    assert max(len(line) for line in lines[:-1]) <= 80
    assert any(line.endswith("[-27.0, -25.0]   1,200 extrapol.") for line in lines)


def test_colour_only_on_a_terminal_and_not_with_no_color(printed):
    assert "\x1b" not in "".join(printed(make_plan()))
    assert "\x1b[32m" in "".join(printed(make_plan(), FORCE_COLOR="1"))
    assert "\x1b[3" not in "".join(printed(make_plan(), FORCE_COLOR="1", NO_COLOR="1"))


def test_texts_of_the_plan_cannot_steer_the_terminal(printed):
    lines = printed(poisoned(make_plan(), "\x1b]0;owned\x07\x1b[2J\u202e[bold]\r\n"))
    text = "\n".join(lines)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    assert "[bold]" in text
