"""The page of a run in a real browser."""

import asyncio
from pathlib import Path

import pytest

from tests.browser import Page, chromium, open_page
from tests.fakes.run_folder import write_run
from tests.verl_mixed.views.report.test_charts import HOSTILE
from verl_mixed.run.state import RunFolder
from verl_mixed.views.report.files import write_page, write_report
from verl_mixed.views.report.runs import load_run
from verl_mixed.views.report.text import plain

pytestmark = pytest.mark.browser

BELOW = """[...document.querySelectorAll('.card')].map(card => [
  card.querySelector('h2')?.textContent ?? 'chart', card.getBoundingClientRect().bottom])"""
CUT = """(async () => { const cut = [];
  for (const place of document.querySelectorAll('.chart')) {
    const frame = document.createElement('div');
    frame.innerHTML = await (await report.draw(place)).toSVG();
    document.body.append(frame);
    const box = frame.firstChild.getBoundingClientRect();
    const texts = [...frame.querySelectorAll('text')].map(t => t.getBoundingClientRect());
    if (texts.some((a, i) => a.width && (a.left < box.left - 1 || a.right > box.right + 1 ||
        a.top < box.top - 1 || a.bottom > box.bottom + 1 ||
        texts.some((b, j) => j > i && a.left < b.right - 1 && b.left < a.right - 1 &&
          a.top < b.bottom - 3 && b.top < a.bottom - 3))))
      cut.push(place.getAttribute('aria-label'));
    frame.remove();
  } return cut; })()"""
"""Labels of the charts of which a text is cut by the edge or covers another one."""
DOMAIN = "report.draw(document.querySelector('.chart')).then(view => view.scale('x').domain())"
TOOLTIP = """[...document.querySelectorAll('#vg-tooltip-element.visible tr')].map(row =>
  [...row.cells].map(cell => cell.textContent))"""


@pytest.fixture
def page_of_a_run(tmp_path: Path) -> Path:
    chromium()  # skips where there is none, before anything is written
    write_run(tmp_path / "run", 40, total=1000)
    write_report(RunFolder(tmp_path / "run"))
    return tmp_path / "run/report.html"


@pytest.fixture
def page_with_a_script_of_its_own(page_of_a_run: Path) -> Path:
    text = page_of_a_run.read_text()
    page_of_a_run.write_text(text.replace("</body>", "<script>window.own = 1</script></body>"))
    return page_of_a_run


async def background(page: Page) -> str:
    return await page.evaluate("getComputedStyle(document.body).backgroundColor")


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.nightly)])
async def test_a_page_opens_without_a_request_or_an_error_light_and_dark(
    page_of_a_run: Path, tmp_path: Path, dark: bool
) -> None:
    async with open_page(page_of_a_run, dark=dark) as page:
        assert page.requests == [page_of_a_run.as_uri()]
        assert page.console_errors == []
        assert await background(page) == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
        await page.evaluate("report.drawn")
        ink = "report.draw(document.querySelector('.chart')).then(view => view.toSVG())"
        assert ("#9aa3b0" if dark else "#5d6571") in await page.evaluate(ink)
        assert page.requests == [page_of_a_run.as_uri()] and page.console_errors == []
        shot = await page.screenshot(tmp_path / "report.png", whole=True)
        assert shot.stat().st_size > 100_000


async def test_the_first_screen_answers_the_three_questions(page_of_a_run: Path) -> None:
    async with open_page(page_of_a_run, (1280, 720)) as page:
        cards = await page.evaluate(BELOW)
        assert [name for name, _ in cards] == [
            "What improved",
            "chart",
            "Is the mixture exact?",
            "What limited the step time",
        ]
        assert all(bottom <= 720 for _, bottom in cards)
        width = await page.evaluate("document.documentElement.scrollWidth")
        assert width == 1280
        tables = "[...document.querySelectorAll('.card .scroll')]"
        assert await page.evaluate(f"{tables}.every(e => e.scrollWidth <= e.clientWidth)")


@pytest.mark.nightly
@pytest.mark.slow
async def test_charts_are_drawn_anew_when_the_system_turns_dark(page_of_a_run: Path) -> None:
    async with open_page(page_of_a_run) as page:
        await page.evaluate("report.drawn")
        dark = {"name": "prefers-color-scheme", "value": "dark"}
        await page.call("Emulation.setEmulatedMedia", features=[dark])
        ink = "report.draw(document.querySelector('.chart')).then(view => view.toSVG())"
        frame = "new Promise(done => requestAnimationFrame(done))"
        await page.evaluate(f"{frame}.then(() => {frame}).then(() => report.drawn)")
        assert "#9aa3b0" in await page.evaluate(ink)
        assert page.console_errors == []


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
async def test_no_text_of_a_chart_is_cut_or_covers_another(page_of_a_run: Path, width: int) -> None:
    async with open_page(page_of_a_run, (width, 720)) as page:
        assert await page.evaluate("document.querySelectorAll('.chart').length") > 25
        assert await page.evaluate(CUT) == []


@pytest.mark.nightly
async def test_the_pointer_shows_the_value_of_the_nearest_point_and_zooms(
    page_of_a_run: Path,
) -> None:
    run = load_run(RunFolder(page_of_a_run.parent))
    step, value = run.lines[-1]["step"], run.lines[-1]["metrics"]["mixed/math/val/reward/mean"]

    async with open_page(page_of_a_run, (1280, 720)) as page:
        at = await page.evaluate(
            "report.draw(document.querySelector('.chart')).then(view => {"
            " const box = document.querySelector('.chart canvas').getBoundingClientRect();"
            " const [x, y] = view.origin();"
            f" return [box.x + x + view.scale('x')({step}), box.y + y + view.scale('y')({value})];"
            "})"
        )
        for x in (at[0] - 30, at[0] - 1):
            await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=at[1])
        shown = dict(await page.until(f"({TOOLTIP}).length && {TOOLTIP}"))
        own = run.lines[-1]["metrics"][f"mixed/{shown['curve']}/val/reward/mean"]
        assert (shown["step"], float(shown["value"])) == (str(step), pytest.approx(own))
        assert own == pytest.approx(value, abs=0.02)  # where the pointer is

        whole = await page.evaluate(DOMAIN)
        await page.call(
            "Input.dispatchMouseEvent",
            **{"type": "mouseWheel", "x": at[0] - 1, "y": at[1], "modifiers": 2},
            **{"deltaX": 0, "deltaY": -300},
        )
        assert whole == [0, step]
        changed = (
            f"({DOMAIN}.then(ends => window.ends = ends), window.ends?.[0] > 0 && window.ends)"
        )
        ends = await page.until(changed)
        assert 0 < ends[0] < ends[1]
        assert page.console_errors == []


@pytest.mark.nightly
async def test_a_narrow_window_shows_one_chart_beside_another_no_more(page_of_a_run: Path) -> None:
    async with open_page(page_of_a_run, (390, 800)) as page:
        width = await page.evaluate("document.documentElement.scrollWidth")
        assert width == 390


@pytest.mark.nightly
@pytest.mark.slow
async def test_hostile_names_run_nothing(tmp_path: Path) -> None:
    chromium()
    names = [text.replace("/", "|") for text in HOSTILE[:4]]
    sources = [name.encode("utf-8", "replace").decode() for name in names]
    await asyncio.to_thread(
        write_run,
        tmp_path / "run",
        4,
        sources=sources,
        config={"<script>alert(2)</script>": names[0]},
    )
    run = load_run(RunFolder(tmp_path / "run"), "<img src=x onerror=alert(3)>")
    write_page([run], tmp_path / "page.html")

    async with open_page(tmp_path / "page.html") as page:
        await page.evaluate("report.drawn")
        assert await page.evaluate("document.querySelectorAll('script, img').length") == 3
        box = await page.evaluate(
            "(b => [b.x + b.width / 2, b.y + b.height / 2])"
            "(document.querySelector('.chart canvas').getBoundingClientRect())"
        )
        for x in (box[0], box[0] + 5):
            await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=box[1])
        shown = dict(await page.until(f"({TOOLTIP}).length && {TOOLTIP}"))
        assert shown["curve"] in [plain(source) for source in sources]
        assert await page.evaluate("document.querySelectorAll('script, img').length") == 3
        assert page.requests == [(tmp_path / "page.html").as_uri()]
        assert page.console_errors == []
        title = await page.evaluate("document.querySelector('h1').textContent")
        assert title == "<img src=x onerror=alert(3)>"


@pytest.mark.nightly
async def test_a_script_that_got_into_the_page_would_not_be_executed(
    page_with_a_script_of_its_own: Path,
) -> None:
    async with open_page(page_with_a_script_of_its_own) as page:
        assert await page.evaluate("window.own === undefined")
        assert "Content Security Policy" in page.console_errors[0]
