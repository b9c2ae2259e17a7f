"""The page of a run in a real browser."""

import asyncio
from pathlib import Path

import pytest

from tests.browser import Page, chromium, open_page
from tests.fakes.run_folder import write_run
from tests.verl_mixed.views.report.test_charts import HOSTILE
from verl_mixed.run.state import RunFolder
from verl_mixed.views.report import write_report
from verl_mixed.views.report.files import write_page
from verl_mixed.views.report.runs import load_run

pytestmark = pytest.mark.browser

BELOW = """[...document.querySelectorAll('.card')].map(card => [
  card.querySelector('h2')?.textContent ?? 'chart', card.getBoundingClientRect().bottom])"""
OVERLAPS = """[...document.querySelectorAll('svg')].flatMap(svg => {
  const boxes = [...svg.querySelectorAll('text:not(.on)')].map(t => t.getBoundingClientRect());
  return boxes.filter((a, i) => boxes.some((b, j) => j > i && a.left < b.right - 1 &&
    b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)).map(() =>
    svg.getAttribute('aria-label')); })"""
CUT = """[...document.querySelectorAll('svg')].filter(svg => {
  const frame = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].some(t => {
    const box = t.getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1; });
  }).map(svg => svg.getAttribute('aria-label'))"""


@pytest.fixture
def page_of_a_run(tmp_path: Path) -> Path:
    chromium()  # skips where there is none, before anything is written
    write_run(tmp_path / "run", 40, total=1000)
    write_report(RunFolder(tmp_path / "run"))
    return tmp_path / "run/report.html"


async def background(page: Page) -> str:
    return await page.evaluate("getComputedStyle(document.body).backgroundColor")


@pytest.mark.parametrize("dark", [False, True])
async def test_a_page_opens_without_a_request_or_an_error_light_and_dark(
    page_of_a_run: Path, tmp_path: Path, dark: bool
) -> None:
    async with open_page(page_of_a_run, dark=dark) as page:
        assert page.requests == [page_of_a_run.as_uri()]
        assert page.console_errors == []
        assert await background(page) == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
        line = "document.querySelector('.c0 .line')"
        color = await page.evaluate(f"getComputedStyle({line}).stroke")
        assert color == ("rgb(110, 168, 242)" if dark else "rgb(47, 111, 196)")
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


async def test_no_text_of_a_chart_is_cut_or_covers_another(page_of_a_run: Path) -> None:
    async with open_page(page_of_a_run) as page:
        assert await page.evaluate("document.querySelectorAll('svg').length") > 25
        assert await page.evaluate(CUT) == []
        assert await page.evaluate(OVERLAPS) == []


async def test_a_narrow_window_shows_one_chart_beside_another_no_more(page_of_a_run: Path) -> None:
    async with open_page(page_of_a_run, (390, 800)) as page:
        width = await page.evaluate("document.documentElement.scrollWidth")
        assert width == 390


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
        assert page.requests == [(tmp_path / "page.html").as_uri()]
        assert page.console_errors == []
        assert await page.evaluate("document.querySelectorAll('script, img').length") == 0
        title = await page.evaluate("document.querySelector('h1').textContent")
        assert title == "<img src=x onerror=alert(3)>"
