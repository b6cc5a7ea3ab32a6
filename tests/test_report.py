"""The report: complete, safe against hostile texts, the same bytes for the same plan."""

import html
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser

import numpy as np
import pytest

from kvfold.analysis import figures
from kvfold.analysis.report import render
from kvfold.analysis.words import digits, quantity
from tests.example_plan import make_plan, poisoned, without_numbers

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


def test_sections_stand_in_the_order_in_which_a_planner_asks():
    page = Elements(render(make_plan()))
    sections = [found["id"] for tag, _, found in page.elements if tag == "section" and "id" in found]
    figures = "memory step gain latency load timeline sessions energy"
    assert " ".join(sections) == f"verdict comparisons recorded {figures} trace trust reproduce"
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


def test_units_and_counts_of_the_traffic():
    """A number before ``_s`` is a window, and ``n`` counts."""
    text = " ".join(" ".join(Elements(render(make_plan())).texts).split())
    assert "dispersion over 60 s 6.00" in text
    assert not re.search(r"dispersion over 60 s 6.00 s\b", text)
    assert "human wait \N{EN DASH} \N{EN DASH} \N{EN DASH} \N{EN DASH} 0" in text
    assert "0 s" not in re.findall(r"human wait[^a-z]*?(0 s?)", text)


def test_assumptions_and_what_is_not_validated_stand_under_their_names():
    page = render(make_plan())
    validated, assumed = page.index("What has not been validated"), page.index("What was assumed")
    assert validated < page.index("no cost table was measured for h200") < assumed
    assert assumed < page.index("3 calls without output were simulated")


def test_joules_and_bursts_carry_their_note():
    page = Elements(render(make_plan()))
    text = " ".join(" ".join(page.texts).split())
    assert "shown apart. Note: energy is an upper bound." in text
    assert "each one's own rate may fall. Note: a burst that drains afterwards." in text


def test_the_chart_of_goodput_shows_good_requests_over_the_makespan():
    plan = make_plan()
    chart = dict(figures.load_curve(plan, plan["config"]))["Goodput"]
    for point in plan["load_curve"]:
        assert f"{quantity(point['goodput_rps'], 'requests/s')} at {digits(point['load'])}" in chart
    for point in plan["load_curve"]:
        del point["goodput_rps"]
    assert "Goodput" not in dict(figures.load_curve(plan, plan["config"]))


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
def test_a_part_that_the_plan_lacks_is_left_out(key, without):
    plan = make_plan()
    if without is None:
        plan[key] = None
    else:
        del plan[key]
    assert len(render(plan)) < len(render(make_plan()))


def test_an_empty_plan_and_one_without_numbers_are_shown():
    assert "KV capacity plan" in render({})
    page = render(without_numbers())
    assert "missed" in page
    assert 'id="latency"' not in page
    assert 'id="load"' not in page
    assert 'id="timeline"' not in page


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


def luminance(colour):
    """Relative luminance of WCAG 2.2 of ``#rgb`` or ``#rrggbb``."""
    colour = colour.removeprefix("#")
    if len(colour) == 3:
        colour = "".join(digit * 2 for digit in colour)
    channels = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_from_the_ground(theme):
    """WCAG 2.2: 4.5 : 1 for text, 3 : 1 for lines and bars."""
    block = re.findall(r":root \{(.*?)\}", render({}), re.DOTALL)[theme]
    colours = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]+);", block))

    def contrast(front, ground):
        lighter, darker = sorted((luminance(colours[front]), luminance(colours[ground])), reverse=True)
        return (lighter + 0.05) / (darker + 0.05)

    for front in ("ink", "muted", "good", "bad", "link"):
        assert min(contrast(front, "paper"), contrast(front, "card")) >= 4.5, front
    assert contrast("ink", "bad-bg") >= 4.5
    for front in (f"s{i}" for i in range(8)):
        assert contrast(front, "paper") >= 3, front
