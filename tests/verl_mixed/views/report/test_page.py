"""The HTML page of a run, and of several."""

import html
import json
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from agent_loop.records.statistics import wilson
from samplers.ledger import LedgerEntry
from tests.fakes.records import of_policy
from tests.fakes.run_folder import write_run
from tests.verl_mixed.views.report.test_charts import HOSTILE
from verl_mixed.run.evaluations import Evaluation
from verl_mixed.run.state import RunFolder
from verl_mixed.views.evaluation import summary_of
from verl_mixed.views.report.charts import COLORS
from verl_mixed.views.report.files import write_report
from verl_mixed.views.report.machinery import limiter
from verl_mixed.views.report.page import render
from verl_mixed.views.report.runs import Run, load_run

VOID = {"meta", "br"}
SECTIONS = (
    "Reward",
    "Reward parts",
    "Mixture",
    "Lengths and turns",
    "Tools",
    "Rate limiter",
    "Time",
    "Optimizer",
    "Prompts given up",
    "All numbers per source",
    "Config",
)


class Page(HTMLParser):
    """What a browser would make of a page: open tags, what it loads, tags and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.scripts = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        self.scripts += tag == "script"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass


EMPTY = len(render([Run(name="", lines=[])]).encode())
"""Bytes of a page without a run: the drawing library, most of all."""


def run_of(folder: Path, steps: int, **options: Any) -> Run:
    write_run(folder, steps, **options)
    return load_run(RunFolder(folder))


def section(page: str, title: str) -> str:
    """The text of one section."""
    anchor = title.lower().replace(" ", "-")
    return page.split(f'<h2 id="{anchor}">')[1].split("</section>")[0]


def charts_of(page: str) -> list[dict[str, Any]]:
    """What each chart of a page has to itself."""
    data = page.split('<script type="application/json" id="charts">')[1].split("</script>")[0]
    return json.loads(data)["own"]


def test_the_first_screen_says_what_improved_with_the_numbers_of_the_metrics(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path / "run", 20)
    first, last = run.lines[0]["metrics"], run.lines[-1]["metrics"]

    page = render([run]).split("<section>")[0]

    assert "20 of 20 steps, finished" in page
    for source in ("math", "nq", "taco"):
        means = [metrics[f"mixed/{source}/val/reward/mean"] for metrics in (first, last)]
        row = page.split(f"<td>{source}<br>")[1].split("</tr>")[0]
        cells = [re.sub("<[^>]+>", "", cell) for cell in row.split("</td>")]
        assert cells[0] == "step 0 → 20"
        for cell, mean in zip(cells[1:], means, strict=False):
            low, high = wilson(mean, 100)
            assert cell == f"{mean:.2f} [{low:.2f}, {high:.2f}]"
        assert cells[3].startswith(f"{means[1] - means[0]:+.2f} [")


def test_the_first_screen_says_whether_the_mixture_is_exact(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 6)
    entries = [line for line in run.ledger if isinstance(line, LedgerEntry)]
    per_source = {s: sum(e.source == s for e in entries) for s in ("math", "nq", "taco")}
    given_up = [
        replace(line, outcome="stale")
        if isinstance(line, LedgerEntry) and line.step == 4 and line.source == "nq"
        else line
        for line in run.ledger
    ]

    exact, off = render([run]), render([replace(run, ledger=given_up)])

    assert "Exact: each of 6 steps trained the planned prompts" in exact
    cells = "".join(f"<td>{n:,} ({n / 120:.1%})</td>" for n in per_source.values())
    assert f"<td>prompts trained</td>{cells}" in exact
    assert "NOT exact: 1 of 6 steps are off their plan, step 4 by 5 prompts" in off
    assert "<td>nq</td><td>5</td>" in section(off, "Prompts given up")


def test_a_ledger_that_lacks_steps_is_no_proof(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 16)

    def without(*steps: int) -> str:
        ledger = [line for line in run.ledger if getattr(line, "step", None) not in steps]
        return render([replace(run, ledger=ledger)])

    assert '<p class="bad">NOT proven: steps 4 to 16 not in the ledger.' in without(*range(4, 17))
    assert "NOT proven: step 7 not in the ledger." in without(7)
    assert "NOT proven: step 1 not in the metrics." in render(
        [replace(run, ledger=[], lines=[run.lines[0], *run.lines[2:]])]
    )
    assert "Exact: each of 16 steps" in render([replace(run, lines=run.lines[:9])])


def test_a_plan_that_is_none_leaves_the_proof_to_the_metrics(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, 3)
    first, *rest = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    broken = json.dumps({**json.loads(first), "plan": {"x": 1}}) + "\n"
    (folder / "ledger.jsonl").write_text("".join([broken, *rest]))

    page = render([load_run(RunFolder(folder))])

    assert "by the metrics; not the description of a mixture plan" in page


def test_metrics_that_differ_from_the_ledger_are_no_proof(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 3)
    run.lines[2]["metrics"]["mixed/nq/count"] = 99.0

    assert "NOT proven: the metrics of 1 steps differ from the ledger, first in step 2" in render(
        [run]
    )


def test_the_first_screen_says_what_limited_the_step(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 8)
    steps = [line["metrics"] for line in run.lines[1:]]
    share = sum(m["timing_s/gen"] for m in steps) / sum(m["timing_s/step"] for m in steps)

    page = render([run])

    assert "Most time went into generation: " in page
    assert f"s a step ({share:.0%})." in page
    assert "waiting for the rate limiter" in page


def test_shares_of_phases_that_overlap_are_of_the_step_in_the_sentence_and_the_bar() -> None:
    metrics = {"timing_s/gen": 5.0, "timing_s/update_actor": 3.0, "timing_s/step": 5.5}
    run = Run(name="async", lines=[{"step": 1, "time": 0.0, "metrics": metrics}])

    page = render([run]).split("<section>")[0]

    assert "generation: 5 of 5.5 s a step (91%)" in page
    assert "generation 91%, policy update 55%; phases overlap, together they are 145% of" in page
    assert 'title="generation: 90.9%"' in page


def test_a_source_that_lost_everything_has_a_row_on_the_first_screen(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 10)
    for line in run.lines:
        for name in [name for name in line["metrics"] if name.startswith("mixed/nq/")]:
            del line["metrics"][name]
        line["metrics"]["mixed/nq/infra_error_rate"] = 1.0

    page = render([run]).split("<section>")[0]

    assert '<td>nq</td><td colspan="4">nothing to compare: it has a reward in no validation' in page
    assert "<td>math<br>" in page and Page(page).tags


def test_a_resume_begins_the_limiters_counters_anew(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lines = write_run(folder, 6)
    when = time.gmtime(lines[3]["time"] + 1)
    starts = [time.strftime("%Y-%m-%dT%H:%M:%S+0000", moment) for moment in (time.gmtime(0), when)]
    versions = "".join(json.dumps({"time": text}) + "\n" for text in starts)
    (folder / "versions.jsonl").write_text(versions + "nonsense\n[]\n")

    run = load_run(RunFolder(folder))

    assert run.restarts == [4]
    granted = next(p for p in limiter(run).panels if p.title == "Granted per step")
    curve = next(curve for curve in granted.curves if curve.name == "math")
    assert curve.points[3] == (4, lines[4]["metrics"]["mixed/math/limiter/granted"])
    shared = replace(run, config={"a.tool_config.rate_limit_file": "/shared/limit"})
    assert shared.restarts == []


def test_waits_for_servers_are_drawn_and_said_beside_those_for_the_limiter(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 6)
    titles = [panel.title for panel in limiter(run).panels]
    run.trained[2]["metrics"]["mixed/math/server_wait_s/sum"] = 34.0

    waited = limiter(run)

    title = "Seconds waited for servers per step, all calls"
    assert [panel.title for panel in waited.panels if panel.title not in titles] == [title]
    words = "calls of math waited 34 s for a tool server that was away or overloaded."
    assert [*waited.notes] == [words] and words in render([run])
    assert "servers" not in "".join(titles)


def test_lines_that_were_passed_over_are_said_on_the_first_screen(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, 4)
    first, *rest = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([first, "nonsense\n", *rest]))

    page = render([load_run(RunFolder(folder))])

    assert "Warning: metrics.jsonl: 1 line cannot be read and was passed over" in page


def test_every_step_of_the_mixture_is_in_the_page(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 30, batch_size=7)
    expected = {(e.step, e.source) for e in run.ledger if isinstance(e, LedgerEntry)}

    rows = re.findall(r"<tr><td>(\d+)</td>(?:<td>\d+ of \d+</td>){3}", render([run]))

    assert [int(row) for row in rows] == sorted({step for step, _ in expected})


@pytest.mark.parametrize("steps", [0, 1, 2, 25])
def test_a_page_is_well_formed_and_loads_nothing(tmp_path: Path, steps: int) -> None:
    text = render([run_of(tmp_path / "run", steps, total=25)])
    page = Page(text)

    policy = text.split('Content-Security-Policy" content="')[1].split('"')[0]
    assert html.unescape(policy).startswith("default-src 'none'; style-src 'unsafe-inline'; ")
    assert re.search("script-src( 'sha256-[^' ]+'){2}$", html.unescape(policy))
    assert page.open == []
    assert all(address.startswith("#") for address in page.loads)
    assert page.scripts == 3  # the data, the library, what draws
    assert not any(name.startswith("on") for name in page.attributes)


def test_a_run_without_a_line_gives_a_page() -> None:
    page = render([Run(name="trial", lines=[])])

    assert Page(page).open == []
    assert "0 of ? steps: no metrics yet" in page
    for title in SECTIONS:
        assert len(re.findall("<p>", section(page, title))) == 1  # one sentence
    assert charts_of(page) == []


def test_metrics_that_are_missing_leave_their_section_out_with_a_sentence() -> None:
    metrics = {"mixed/math/reward/mean": 0.5, "timing_s/step": 2.0}
    page = render([Run(name="old", lines=[{"step": 1, "time": 0.0, "metrics": metrics}])])

    assert section(page, "Rate limiter") == "Rate limiter</h2><p>The run has no rate limiter.</p>"
    text = page.split("<script>")[0]  # the library has words of its own
    assert "Entropy" not in text and "Latency" not in text and "0.000" not in text
    assert section(page, "Reward").count('class="chart"') == 1


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_and_values_are_text(text: str) -> None:
    source = text.replace("/", "|")
    metrics = {
        f"mixed/{source}/reward/mean": 0.5,
        f"mixed/{source}/reward_parts/{text}": 0.5,
        f"mixed/{source}/tools/{text}/calls": 1.0,
        f"mixed/tools/{text}/calls": 1.0,
        f"timing_s/{source}": 1.0,
        "timing_s/step": 2.0,
    }
    lines = [{"step": step, "time": 0.0, "metrics": metrics} for step in (1, 2)]
    run = Run(name=text, lines=lines, config={text: text}, ledger_problem=text)
    tags = Page(render([Run(name="a", lines=[{"step": 1, "time": 0.0, "metrics": {}}])])).tags

    for runs in ([run], [run, replace(run, config={text: "other"})]):
        page = render(runs)
        found = Page(page)
        assert found.scripts == 3 and "img" not in found.tags
        assert found.tags - tags <= {
            *("table", "tr", "th", "td", "details", "summary", "h3", "b", "br", "small", "span"),
        }
        assert not any(name.startswith("on") for name in found.attributes)
        assert found.open == []
        assert len(page.encode()) - EMPTY < 200_000
        assert "\u202e" not in page and "\x00" not in page


def test_torn_last_lines_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    whole = run_of(folder, 5, total=9)
    for name, torn in (("metrics.jsonl", '{"step": 6, "tim'), ("ledger.jsonl", '{"step": 6, "s')):
        with (folder / name).open("a") as file:
            file.write(torn)

    write_report(RunFolder(folder))

    assert (folder / "report.html").read_text() == render([whole])
    assert "5 of 9 steps, not finished" in render([whole])


def test_a_ledger_that_cannot_be_read_leaves_the_proof_to_the_metrics(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, 3)
    lines = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    (folder / "ledger.jsonl").write_text("".join(["nonsense\n", *lines]))

    write_report(RunFolder(folder))

    page = (folder / "report.html").read_text()
    assert "by the metrics; cannot read" in page and "not of a ledger" in page


def test_warnings_stand_on_the_first_screen(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 2)
    run.lines[-1]["metrics"]["mixed/state_masking"] = 0.0

    assert "Warning: state_masking=false" in render([run]).split("<nav>")[0]


@pytest.mark.slow
def test_a_long_run_stays_below_two_megabytes(tmp_path: Path) -> None:
    config = {"section": {f"some_key_of_usual_length_{i}": "a value" for i in range(1100)}}
    run = run_of(tmp_path / "run", 1000, batch_size=8, config=config)

    page = render([run])

    assert len(page.encode()) < 2_000_000
    assert re.search(r"smallest and the largest value of each of 1\d\d equal parts", page)
    assert "equal parts" not in render([replace(run, lines=run.lines[:200])])


@pytest.mark.slow
@pytest.mark.parametrize(("runs", "sources"), [(1, 12), (2, 8)])
def test_many_curves_are_drawn_with_fewer_points_and_stay_below_two_megabytes(
    tmp_path: Path, runs: int, sources: int
) -> None:
    names = [f"source_{i}" for i in range(sources)]
    given = [
        run_of(tmp_path / f"{seed}", 1000, batch_size=24, seed=seed, sources=names)
        for seed in range(runs)
    ]
    ledger = given[0].ledger
    off = replace(next(line for line in ledger if isinstance(line, LedgerEntry)), step=501)
    given[0] = replace(given[0], ledger=[*ledger, off])

    page = render(given)

    assert len(page.encode()) < 2_000_000
    steps = re.findall(r"<tr><td>(\d+)</td><td>\d+ of", section(page, "Mixture"))
    assert len(steps) <= 240 * runs and "501" in steps
    assert "steps, among them the first" in page


def test_several_runs_are_compared_with_one_colour_each_on_the_same_axes(tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", 40)
    two = run_of(tmp_path / "two", 15, total=40, seed=1, config={"extra": "<new>"})

    page = render([one, two])

    assert Page(page).open == []
    charts = charts_of(page)
    reward = next(chart for chart in charts if chart["title"] == "Training reward of math")
    scale = reward["encoding"]["color"]["scale"]
    assert (scale["domain"], scale["range"]) == (["one", "two"], list(COLORS[:2]))
    for run in (one, two):
        value = [m for line in run.lines if (m := line["metrics"].get("mixed/nq/val/pass_rate"))]
        assert f"{value[-1]:.3f}".rstrip("0") in section(page, "Comparison")
    for own in section(page, "Time").split('<div class="panels runs"')[1:]:
        left, right = (charts[int(i)]["encoding"] for i in re.findall(r'data-chart="(\d+)"', own))
        assert [left[axis] for axis in "xy"] == [right[axis] for axis in "xy"]


def test_only_config_keys_that_differ_come_first(tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", 2)
    two = run_of(tmp_path / "two", 2, seed=1, config={"extra": "<new>"})

    config = section(render([one, two]), "Config")
    differing, every = config.split("<details>")

    assert "<td>trainer.seed</td><td>0</td><td>1</td>" in differing
    assert "<td>extra</td><td>absent</td><td>&lt;new&gt;</td>" in differing
    assert "total_training_steps" not in differing and "total_training_steps" in every
    assert "The runs have the same config." in render([one, replace(one, name="again")])


def test_charts_are_drawn_for_every_logged_metric_of_the_design(tmp_path: Path) -> None:
    page = render([run_of(tmp_path / "run", 12)])

    titles = [chart["title"] for chart in charts_of(page)]
    for title in (
        *("Training reward", "Validation reward", "Solved in training", "Reward parts of nq"),
        *("Prompts trained per step", "Off the plan", "Response tokens, longest", "Turns, mean"),
        *("Calls per step", "Failed calls, share", "Latency p95, s", "Utilisation of the rate"),
        *("Granted per step", "Seconds a step, by phase", "Gradient norm", "Entropy per source"),
        *("KL to the reference per source", "|advantage|", "tokens with a gradient"),
    ):
        assert any(title in one for one in titles), title
    places = re.findall('class="chart" role="img" aria-label="([^"]+)" data-chart="([0-9]+)"', page)
    assert [(html.unescape(name), int(i)) for name, i in places] == [
        (title, i) for i, title in enumerate(titles)
    ]


def test_values_that_are_no_numbers_are_left_out_and_no_path_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, 3)
    (folder / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "time": 0.0, "metrics": {"mixed/a/reward/mean": float("nan")}})
        + "\n"
    )

    write_report(RunFolder(folder))

    page = (folder / "report.html").read_text()
    assert "nan" not in page.split("<script>")[0].lower()
    assert str(tmp_path) not in page


def test_evaluations_of_the_run_have_a_section(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 6)
    done = Evaluation(label="step_6", step=6, records=of_policy([0.5] * 20, 2, 0))
    with_one = replace(run, evaluations=[summary_of(done, (1, 2))])

    without, page = (
        section(render([run]), "Evaluations"),
        section(render([with_one]), "Evaluations"),
    )

    assert "No checkpoint was evaluated" in without
    assert "<th>pass@2</th>" in page and "<td>step_6</td><td>20 x 2</td>" in page


def test_the_first_screen_says_how_changes_were_compared(tmp_path: Path) -> None:
    page = render([run_of(tmp_path / "run", 20)])

    assert "Unpaired; 3 comparisons, each interval at 98.3 %" in page.split("<section>")[0]
