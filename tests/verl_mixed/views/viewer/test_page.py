"""The page in a real browser: colours, mask, counts, filters, keys, and hostile text."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agent_loop.records.run_folder import write_text
from agent_loop.turns.turn_loop import Call
from tests.browser import Page, open_page
from tests.verl_mixed.views.viewer.conftest import Serve
from tests.verl_mixed.views.viewer.episodes import COMPACTED, as_bytes, line, session, write_run
from verl_mixed.run.compose import load_config
from verl_mixed.views.viewer.export import page_of
from verl_mixed.views.viewer.filters import Filter
from verl_mixed.views.viewer.index import Index
from verl_mixed.views.viewer.tokens import tokenizer_of

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
    server_wait_s=2.5,
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
    write_text(target, page)
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


@pytest.mark.parametrize("way", ["served", pytest.param("exported", marks=pytest.mark.nightly)])
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
    assert "limiter wait 0.125 s, waited 2.500 s for the server" in call
    assert "advantage-1.000" in facts
    assert errors == []
    assert len(requests) == (8 if way == "served" else 1)


@pytest.mark.nightly
@pytest.mark.slow
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


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["served", "exported"])
async def test_a_session_of_several_rows_is_a_tree(tmp_path: Path, serve: Serve, way: str):
    rows = session(COMPACTED, member=1, reward=1.0)
    rows[1]["cause"] = HOSTILE[2]
    for row in rows[1:]:
        row["prompt_ids"] = row["prompt_ids"][:1]
    rows[3]["turns"] = rows[3]["turns"][:1]  # the answer to request 6 is in no row
    run_dir = write_run(tmp_path / "run", [line(), *rows, line(member=2)])
    async with serve(run_dir) as url:
        address = url if way == "served" else export(run_dir, tmp_path / "page.html")
        async with open_page(address) as page:
            await page.until(READY)
            assert await texts(page, "#count, #page") == ["3 trajectories", "1 to 3 of 3"]
            assert await texts(page, ".tree") == []
            notes = await texts(page, "#notes p")
            lines = await texts(page, "#list .row")
            options = await texts(page, "#list [role=option]")
            for key, place in [*(("j", n) for n in "23546"), *(("k", n) for n in "45")]:
                await press(page, key, f"location.hash === '#1.{place}'")
                assert await chosen_row(page) == f"row-1.{place}"
            tree = await texts(page, ".tree button")
            indents = await page.evaluate(
                "[...document.querySelectorAll('.tree button')].map(e => e.style.paddingLeft)"
            )
            here = await texts(page, ".tree [aria-current]")
            problems = await texts(page, ".problems p")
            await page.click(".tree button:nth-of-type(4)")
            await page.until("location.hash === '#1.4'")
            assert await chosen_row(page) == "row-1.4"

            await press(page, "g", "document.querySelectorAll('.member').length === 3")
            heads = await texts(page, "h2, .member h3")
            members = await texts(page, ".member .facts")
            of_group = await texts(page, ".member .tree button")
            last = await texts(page, ".member .tree [aria-current]")
            prompt = await texts(page, "#detail > div > details pre")
            await page.click(".member .tree button:nth-of-type(2)")
            await page.until("location.hash === '#1.3' && document.querySelector('.trajectory')")
            await page.click("[name=text]")
            await press(page, "5", "document.querySelectorAll('.unfit').length === 3")
            await page.until("location.hash === '#1.4'")
            assert await texts(page, "#count") == ["1 trajectory"]
            hit, errors = await page.evaluate("window.hit"), page.console_errors
    tokens = [len(each["response_ids"]) for each in rows]
    assert (len(lines), len(options)) == (7, 6)
    assert "answered · 4 rows✓ 1.00-" in lines[1] and lines[1].endswith(f"{sum(tokens)}0")
    assert lines[2] == f"start{tokens[0]} trained{tokens[0]}0"
    order = [(0, "start"), (1, HOSTILE[2]), (3, "start"), (2, "sub-agent")]
    assert tree == [
        f"{cause} 1.{2 + index}: {tokens[index]} tokens, {tokens[index]} trained"
        for index, cause in order
    ]
    assert indents == sorted(set(indents)) and len(indents) == 4
    assert here == last == [tree[2]]
    assert notes == ([] if way == "served" else ["exported: 3 of 3 trajectories"])
    assert problems == ["session: the engine's answer to request 6 is in no rows"]
    assert heads[0].endswith("3 of 3 members") and heads.count("session of 4 rows") == 1
    assert f"tokens{sum(tokens)}" in members[1]
    assert (of_group, prompt) == (tree, ["What is it?"])
    assert (hit, errors) == (None, [])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["served", pytest.param("exported", marks=pytest.mark.nightly)])
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


@pytest.mark.nightly
async def test_without_a_tokenizer_ids_and_the_segments_texts_are_shown(
    tmp_path: Path, serve: Serve
):
    run_dir = write_run(tmp_path / "run", [line()], tokenizer=False)
    record = line()
    async with serve(run_dir) as url, open_page(url) as page:
        await page.until(READY)
        tokens = await texts(page, ".segment .token.id")
        said = await texts(page, ".segment .text")
        notes = await texts(page, "#notes p")
    assert tokens == [str(token) for token in record["response_ids"]]
    assert said == [text for *_, text in record["segments"]]
    assert "no tokenizer.json" in notes[0]


@pytest.mark.nightly
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


@pytest.mark.nightly
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
    assert data["run"]["name"] == "run"
    assert data["run"]["exported"] == "4 of 6 trajectories (source nq)"
    assert not set("<>&") & set(block)
    assert page.count("<script") == 2 and "src=" not in page and "href=" not in page


@pytest.mark.nightly
async def test_a_filter_that_cannot_be_read_is_said_until_it_can(tmp_path: Path, serve: Serve):
    async with serve(a_run(tmp_path)) as url, open_page(url) as page:
        await page.until(READY)
        await page.evaluate("document.querySelector('[name=step]').focus()")
        await press(page, "x", "document.querySelector('#detail > [role=alert]')")
        assert "want one step, 3" in (await texts(page, "#detail"))[0]
        await page.press("Backspace")
        # the empty filter shows the first trajectory of all for a moment
        row = "document.querySelector('[aria-selected=true]')?.id === 'row-2.1'"
        await press(page, "2", f"{row} && document.querySelector('.trajectory')")


SAID = [
    "the capital of France is Paris",
    "print(value) # CODE_1 and code",
    "S\u00e3o Paulo, na\u00efve caf\u00e9; A\u030angstro\u0308m",
    'said "yes" at 100 % of 1+1, <b>3.14</b>',
    "\u041c\u043e\u0441\u043a\u0432\u0430 \u0438 \u0439\u043e\u0434; \u039f\u0394\u039f\u03a3",
    "\u6771\u4eac is Tokyo \U0001f600 x\u00b2 \u00bd \u0663",
    "stra\u00dfe 12_34 don't",
    "",
]
SOUGHT = [
    *("capital france", "FRANCE", "fran", "rance", "france cap", "par paris", "is", "capital of"),
    *(
        "print(val",
        "rint",
        "code",
        "code_1",
        "cod",
        "value)#",
        "#",
        "# _",
        "code and",
        "print value",
    ),
    *("sao", "S\u00c3O", "naive", "na\u00efve", "cafe", "caf\u00e9 sa", "angstrom", "\u00e5ngstr"),
    *('"', '"yes', 'yes"at', "100%", "%", "1+1", "1+", "<b>", "3.14", "3.1", "4", "b>3.14</b"),
    *("\u043c\u043e\u0441\u043a\u0432\u0430", "\u0439\u043e\u0434", "\u0438\u043e\u0434"),
    *("\u03bf\u03b4\u03bf\u03c2", "\u03bf\u03b4\u03bf\u03c3", "\u6771", "\u4eac", "tokyo"),
    *("\U0001f600", "x\u00b2", "\u00bd", "\u0663", "strasse", "stra\u00dfe", "STRA\u00dfE", "12"),
    *("34", "12_3", "don", "don't", "t", "NOT france", "paris OR code", "text:france", "^", "par*"),
]
ASKED = [
    *({"text": text} for text in SOUGHT),
    *(
        {"step": s}
        for s in ("1", "2-3", " 1 - 2 ", "3-", "-3", "x", "3-2", "1.5", "9" * 16, "9" * 400)
    ),
    *(
        {"reward_min": low, "reward_max": high}
        for low in ("", "0", "-1e3", ".5", "0x0", "nan", "inf", "1_0", "9e999", "x")
        for high in ("", "1", "-1", "+0.5E0")
    ),
    {"outcome": "unsolved"},
    {"outcome": "solved", "source": "math", "step": "1-9", "reward_min": "0.5", "text": "is"},
]
IN_FILE = """(asked => {
  const data = JSON.parse(document.getElementById('data').textContent);
  const said = row => {
    const text = data.trajectories[row.id].segments.map(each => each.text).join('\\n');
    return {text: bareOf(text), words: wordsOf(bareOf(text))};
  };
  return asked.map(query => {
    try { return data.rows.filter(filterOf(query, said)).map(row => row.id); }
    catch (error) { return error.message; }
  });
})"""


@pytest.mark.nightly
async def test_filters_mean_the_same_in_a_file_as_on_the_server(tmp_path: Path, serve: Serve):
    run_dir = write_run(tmp_path / "run", [])
    lines = [line([("model", "x")], step=1 + n % 3, draw=n) for n in range(len(SAID))]
    for each, said, reward in zip(
        lines, SAID, [0.0, 1.0, 0.5, -1.0, float("nan"), float("inf"), 2.0, 0.0], strict=True
    ):
        each["segments"][0][3] = said
        each["reward"] = each["acc"] = reward
    (run_dir / "trajectories").mkdir()
    for step in (1, 2, 3):
        of_step = [each for each in lines if each["step"] == step]
        (run_dir / "trajectories" / f"{step}.jsonl").write_bytes(as_bytes(of_step))
    address = export(run_dir, tmp_path / "page.html")
    on_server: list[list[str] | str] = []
    async with serve(run_dir) as url, aiohttp.ClientSession() as session:
        for query in ASKED:
            async with session.get(f"{url}/api/trajectories", params=query) as response:
                answer = await response.json()
                found = [row["id"] for row in answer.get("rows", [])]
                on_server.append(answer["error"] if response.status == 400 else found)
    async with open_page(address) as page:
        await page.until(READY)
        in_file = await page.evaluate(f"{IN_FILE}({json.dumps(ASKED)})")
    assert list(zip(ASKED, in_file, strict=True)) == list(zip(ASKED, on_server, strict=True))
    assert sum(bool(found) for found in on_server) > len(SOUGHT) // 2


@pytest.mark.nightly
async def test_what_cannot_be_read_is_named(tmp_path: Path, serve: Serve):
    run_dir = write_run(tmp_path / "run", [line(response_ids=[-1, 2**40])])
    (run_dir / "trajectories" / "99.jsonl").mkdir()
    async with serve(run_dir) as url, open_page(url) as page:
        await page.until(READY)
        assert await texts(page, "#notes p") == [
            "cannot be read and left out (1): 99.jsonl: Is a directory"
        ]
        assert any("cannot decode its tokens" in each for each in await texts(page, ".problems p"))
        assert await texts(page, ".segment .token.id") == ["-1", str(2**40)]


@pytest.mark.nightly
async def test_group_in_an_export_says_how_many_members_it_lacks(tmp_path: Path):
    address = export(a_run(tmp_path), tmp_path / "page.html", Filter(source="nq"), most=4)
    async with open_page(address) as page:
        await page.until(READY)
        for key in "nj":
            await page.press(key)
        await press(page, "g", "document.querySelector('.member')")
        assert (await texts(page, "h2"))[0].endswith("step 2 · 1 of 3 members")


@pytest.mark.nightly
@pytest.mark.parametrize("dark", [False, True])
async def test_page_follows_the_readers_preference(tmp_path: Path, serve: Serve, dark: bool):
    async with serve(a_run(tmp_path)) as url, open_page(url, dark=dark) as page:
        await page.until(READY)
        color = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert color == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
