"""The page in a real browser: colours, mask, counts, filters, keys, and hostile text."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent_loop.turn_loop import Call
from cluster.compose import load_config
from cluster.viewer.export import page_of, write_page
from cluster.viewer.index import Filter, Index
from cluster.viewer.tokens import tokenizer_of
from tests.browser import Page, open_page
from tests.cluster.viewer.conftest import Serve
from tests.cluster.viewer.episodes import as_bytes, line, write_run

pytestmark = pytest.mark.browser

READY = "document.body.dataset.ready && document.querySelector('#detail > *')"

CALL = Call(
    turn=1,
    action="code",
    arguments="1+1",
    status="rejected",
    tool="sandbox",
    latency_s=0.25,
    limiter_wait_s=0.125,
    attempts=2,
    error="no such name",
)

HOSTILE = [
    "<script>window.hit = 1</script>",
    "</script><script>window.hit = 2</script>",
    "<img src=x onerror='window.hit = 3'>",
    "<!--<script>",
    "]]><svg onload='window.hit = 4'>",
    "a\u202eb\u2066c\u200bd\ufeffe\x00f\x1b[31mg\x7fh\x85i\u2028j\u2029k\r\n",
    "\ud83d lone \udc00",
    '"><a href="javascript:window.hit = 5">x</a>',
    "__proto__",
]
BIG = "x" * 1_000_000
HIDDEN = set("\u202e\u2066\u200b\ufeff\x00\x1b\x7f\x85\u2028\r")


def export(run_dir: Path, target: Path, chosen: Filter | None = None, most: int = 100) -> Path:
    decode, note = tokenizer_of(load_config(run_dir / "config.yaml"))
    with closing(Index(run_dir)) as index:
        index.refresh()
        page, _, _ = page_of(run_dir.name, index, decode, note, chosen or Filter(), most)
    write_page(target, page)
    return target


async def texts(page: Page, selector: str) -> list[str]:
    return await page.evaluate(
        f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)"
    )


async def chosen_row(page: Page) -> str:
    return await page.evaluate("document.querySelector('[aria-selected=true]').id")


async def press(page: Page, key: str, until: str) -> None:
    await page.press(key)
    await page.until(until)


def a_run(tmp_path: Path) -> Path:
    """Two sources, two steps, groups of three."""
    return write_run(
        tmp_path / "run",
        [
            line(
                [
                    ("model", f"<code>{member}+1</code>"),
                    ("tool", f"<information>é😀{member + 1}</information>"),
                    ("model", f"<answer>{member + 1}\n</answer>"),
                ],
                step=step,
                source=source,
                member=member,
                draw=step,
                reward=member / 2,
                advantage=member - 1.0,
                calls=[CALL],
            )
            for step in (1, 2)
            for source in ("math", "nq")
            for member in range(3)
        ],
    )


@pytest.mark.parametrize("way", ["served", "exported"])
async def test_a_trajectory_is_shown_token_by_token(tmp_path: Path, serve: Serve, way: str):
    run_dir = a_run(tmp_path)
    record = json.loads((run_dir / "trajectories" / "1.jsonl").read_text().splitlines()[0])
    async with serve(run_dir) as url:
        address = url if way == "served" else export(run_dir, tmp_path / "page.html")
        async with open_page(address) as page:
            await page.until(READY)
            tokens = await page.evaluate(
                "[...document.querySelectorAll('.segment .token')]"
                ".map(e => [e.className.split(' ').slice(1, 3), e.title,"
                " getComputedStyle(e).borderBottomStyle, getComputedStyle(e).backgroundColor])"
            )
            shown = "".join(
                text for text in await texts(page, ".segment .token:not(.part)")
            ).replace("\u23ce", "")
            bars = await page.evaluate(
                "[...document.querySelectorAll('.strip .bars')].map(row =>"
                " [...row.children].map(e => [e.className, +e.style.flexGrow]))"
            )
            counts = await texts(page, ".counts span")
            call = (await texts(page, ".call"))[0]
            facts = (await texts(page, ".facts"))[0]
            errors, requests = page.console_errors, page.requests
    mask = record["response_mask"]
    assert [bits[0][1] == "on" for bits in tokens] == [bit == 1 for bit in mask]
    authors = [author for author, _, n, _ in record["segments"] for _ in range(n)]
    assert [classes[0] for classes, *_ in tokens] == authors
    assert {style for (classes, _, style, _) in tokens if "on" in classes} == {"solid"}
    assert {style for (classes, _, style, _) in tokens if "off" in classes} == {"dotted"}
    assert len({color for *_, color in tokens}) == 2
    assert shown == "".join(text for *_, text in record["segments"])
    assert "log-prob -0.500 (p 0.607), mask 1" in tokens[0][1]
    model, tool = mask.count(1), mask.count(0)
    first, last = record["segments"][0][2], record["segments"][2][2]
    assert bars == [
        [["model", first], ["tool", tool], ["model", last]],
        [["on", first], ["off", tool], ["on", last]],
    ]
    assert counts == [
        f"model {model} + tool {tool} = response {len(mask)}",
        f"mask ones {model} = trained tokens {model}",
    ]
    for fact in ("code (sandbox)", "rejected", "2 attempts", "latency 0.250 s", "1+1", "no such"):
        assert fact in call
    assert "limiter wait 0.125 s" in call
    assert "advantage-1.000" in facts
    assert errors == []
    assert len(requests) == (7 if way == "served" else 1)


@pytest.mark.parametrize("way", ["served", "exported"])
async def test_keys_and_filters_move_through_the_run(tmp_path: Path, serve: Serve, way: str):
    run_dir = a_run(tmp_path)
    async with serve(run_dir) as url:
        address = url if way == "served" else export(run_dir, tmp_path / "page.html")
        async with open_page(address) as page:
            await page.until(READY)
            assert await chosen_row(page) == "row-1.1"
            for key, row in (("j", "1.2"), ("j", "1.3"), ("k", "1.2"), ("n", "1.4"), ("p", "1.1")):
                await press(page, key, f"location.hash === '#{row}'")
                assert await chosen_row(page) == f"row-{row}"
            await press(page, "g", "document.querySelectorAll('.member').length === 3")
            members = await texts(page, ".member .facts")
            assert ["reward0.000" in each and "advantage-1.000" in each for each in members] == [
                *(True, False, False)
            ]
            assert all("endedanswered" in each and "tokens" in each for each in members)
            await page.click(".member:nth-child(2) button")
            await page.until("location.hash === '#1.2' && document.querySelector('.trajectory')")

            for key in "jg":  # at once: what is shown is what is chosen last
                await page.press(key)
            await page.until("location.hash === '#1.3' && document.querySelector('.member')")
            await press(page, "g", "document.querySelector('.trajectory')")

            await press(page, "?", "document.querySelector('#help').open")
            await press(page, "Escape", "!document.querySelector('#help').open")
            await press(page, "/", "document.activeElement.name === 'text'")
            for letter in "infor":
                await page.press(letter)
            assert await page.evaluate("document.querySelector('[name=text]').value") == "infor"
            await press(page, "Escape", "document.activeElement === document.body")

            for values, left in (
                ({"text": "nowhere"}, 0),
                ({"text": "answer 3"}, 4),
                ({"source": "nq"}, 6),
                ({"source": "nq", "step": "2", "outcome": "solved"}, 1),
                ({"reward_min": "0.5", "reward_max": "0.5"}, 4),
                ({"outcome": "tool error", "step": "1-2"}, 12),
            ):
                await page.evaluate(
                    "(() => { const f = document.querySelector('#filter').elements;"
                    " for (const e of f) if (e.name) e.value = '';"
                    f" for (const [n, v] of Object.entries({json.dumps(values)})) f[n].value = v;"
                    " f.text.dispatchEvent(new Event('input', {bubbles: true})); })()"
                )
                words = "1 trajectory" if left == 1 else f"{left} trajectories"
                await page.until(
                    f"document.querySelector('#count').textContent === '{words}' &&"
                    f" document.querySelectorAll('[role=option]').length === {left}"
                )
            await page.until("document.querySelector('.trajectory')")
            assert page.console_errors == []


@pytest.mark.slow
@pytest.mark.parametrize("way", ["served", "exported"])
async def test_hostile_text_runs_nothing_and_hides_nothing(tmp_path: Path, serve: Serve, way: str):
    run_dir = write_run(tmp_path / "<b>run", [])
    hostile: list[dict[str, Any]] = []
    for member, text in enumerate([*HOSTILE, BIG]):
        safe = text.encode(errors="replace").decode()
        fact = text if text is not BIG else "big"
        each = line(
            [("model", safe[:2000]), ("tool", safe[:2000])],
            member=member,
            source=HOSTILE[0],
            row_id=fact,
            answer=fact,
            loop_error=fact,
            fault=fact,
            fault_tool=fact,
            reward_parts={fact: 1.0},
            calls=[Call(turn=1, action=fact, arguments=text, status=fact, tool=fact, error=fact)],
        )
        for segment in each["segments"]:
            segment[3] = text
        hostile.append(each)
    (run_dir / "trajectories").mkdir()
    (run_dir / "trajectories" / "1.jsonl").write_bytes(as_bytes(hostile) + b"</script><b>\n")
    for tokenizer in (True, False):
        if not tokenizer:
            (tmp_path / "model" / "tokenizer.json").unlink()
        async with serve(run_dir) as url:
            address = url if way == "served" else export(run_dir, tmp_path / "page.html")
            async with open_page(address) as page:
                await page.until(READY)
                for number in range(1, len(hostile) + 1):
                    await page.until(f"location.hash === '#1.{number}'")
                    hit, made, text = await page.evaluate(
                        "[window.hit, document.querySelectorAll('header b, main :is(img, svg, a, b,"
                        " script)').length, document.querySelector('#detail').textContent]"
                    )
                    assert hit is None and made == 0
                    assert not set(text) & HIDDEN
                    if number == 6:
                        for symbol in ("U+202E", "U+2066", "U+200B", "U+FEFF", "\u2400", "\u241b"):
                            assert symbol in text
                    if number == 7:
                        assert "U+D83D" in text and "U+DC00" in text
                    await page.press("j")
                await press(page, "g", "document.querySelectorAll('.member').length === 10")
                assert await page.evaluate("window.hit === undefined")
                assert page.console_errors == []
                outside = [
                    each for each in page.requests if not each.startswith(("http://127", "file:"))
                ]
                assert outside == []


async def test_without_a_tokenizer_ids_and_the_segments_texts_are_shown(
    tmp_path: Path, serve: Serve
):
    run_dir = write_run(tmp_path / "run", [line()], tokenizer=False)
    record = line()
    async with serve(run_dir) as url, open_page(url) as page:
        await page.until(READY)
        tokens = await texts(page, ".segment .token.id")
        said = await texts(page, ".segment .said")
        notes = await texts(page, "#notes p")
    assert tokens == [str(token) for token in record["response_ids"]]
    assert said == [text for *_, text in record["segments"]]
    assert "no tokenizer.json" in notes[0]


async def test_sums_that_do_not_add_up_are_red(tmp_path: Path, serve: Serve):
    record = line()
    record["response_mask"][0] = 0
    record["response_ids"].append(1)
    async with serve(write_run(tmp_path / "run", [record])) as url, open_page(url) as page:
        await page.until(READY)
        bad = await texts(page, ".counts .bad")
        alert = await texts(page, ".problems[role=alert] p")
        color = await page.evaluate("getComputedStyle(document.querySelector('.problems p')).color")
    assert len(bad) == 2 and all("≠" in each for each in bad)
    assert "are not the" in alert[0]
    assert color == "rgb(179, 18, 60)"


async def test_a_group_on_two_pages_is_one_group(tmp_path: Path, serve: Serve):
    lines = [line(draw=draw, member=member) for draw in range(30) for member in range(8)]
    async with serve(write_run(tmp_path / "run", lines)) as url, open_page(url + "/#1.240") as page:
        await page.until("location.hash === '#1.240' && document.querySelector('.trajectory')")
        await press(page, "]", "document.querySelector('#page').textContent.startsWith('101 ')")
        await press(page, "k", "location.hash === '#1.100'")
        await press(page, "j", "location.hash === '#1.101'")
        for key, number in (("n", 105), ("p", 101), ("p", 89), ("n", 97), ("n", 105), ("n", 113)):
            await press(page, key, f"location.hash === '#1.{number}'")


def test_export_holds_what_fits_and_says_so(tmp_path: Path):
    run_dir = a_run(tmp_path)
    page = export(run_dir, tmp_path / "page.html", Filter(source="nq"), most=4).read_text()
    block = page.split('id="data">')[1].split("</script>")[0]
    data = json.loads(block)
    assert len(data["rows"]) == len(data["trajectories"]) == 4
    assert {row["source"] for row in data["rows"]} == {"nq"}
    assert data["run"]["exported"] == "4 of 6 trajectories (source nq)"
    assert not set("<>&") & set(block)
    assert page.count("<script") == 2 and "src=" not in page and "href=" not in page


async def test_a_filter_that_cannot_be_read_is_said_until_it_can(tmp_path: Path, serve: Serve):
    async with serve(a_run(tmp_path)) as url, open_page(url) as page:
        await page.until(READY)
        await page.evaluate("document.querySelector('[name=step]').focus()")
        await press(page, "x", "document.querySelector('#detail > [role=alert]')")
        assert "want one step, 3" in (await texts(page, "#detail"))[0]
        await page.press("Backspace")
        await press(page, "2", "document.querySelector('.trajectory')")
        assert await chosen_row(page) == "row-2.1"


async def test_group_in_an_export_says_how_many_members_it_lacks(tmp_path: Path):
    address = export(a_run(tmp_path), tmp_path / "page.html", Filter(source="nq"), most=4)
    async with open_page(address) as page:
        await page.until(READY)
        for key in "nj":
            await page.press(key)
        await press(page, "g", "document.querySelector('.member')")
        assert (await texts(page, "h2"))[0].endswith("step 2 · 1 of 3 members")


@pytest.mark.parametrize("dark", [False, True])
async def test_page_follows_the_readers_preference(tmp_path: Path, serve: Serve, dark: bool):
    async with serve(a_run(tmp_path)) as url, open_page(url, dark=dark) as page:
        await page.until(READY)
        color = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert color == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
