"""Every view of two old run folders as text: `views_1_0_0.txt`, `views_1_1_0.txt`.

    python -m tests.recorded.views --write | --check

A run's folder is copied into an empty checkout, with training files whose rows have the ids of its
ledger. Then each command of `verl-mixed` that shows a run is called, and what it prints or writes
is reduced to text: a page to its words, tables and the data of its charts.
"""

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.recorded.compare import RECORDED, REPO_ROOT, joined, main, normalised
from tests.recorded.rows import ROW_TYPES

RUNS = {
    "1.0.0": REPO_ROOT / "tests" / "release" / "run_of_1_0_0",
    "1.1.0": RECORDED / "run_of_1_1_0",
}
"""Release -> a folder that it wrote, with `/checkout` for the folder that it was started in."""

NAME = "mixed_demo"
RUN = f"runs/{NAME}"

NOTE = """\
Views of a run folder of release {release}. Made again by
    python -m tests.recorded.views --write
`/site` is the checkout that the run was copied into."""

_KEPT = ("PATH", "HOME", "LANG", "PYTHONPATH", "OMP_NUM_THREADS", "TMPDIR")
"""Variables that the commands see; the others might be settings."""

# --- a checkout with the run --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """A temporary folder with the run, its training files and a cache of its own."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / RUN

    def plain(self, text: str) -> str:
        """The text without what depends on the machine."""
        text = normalised(text, [(self.folder, "/site"), (REPO_ROOT, "/repository")])
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
        text = re.sub(r"(last step) \S+ ago", r"\1 TIME ago", text)
        return "\n".join(line.rstrip() for line in text.split("\n")).strip("\n")


@contextmanager
def checkout(release: str) -> Generator[Checkout]:
    """A checkout with the run of a release, as the current folder."""
    before, environ = Path.cwd(), os.environ.copy()
    with tempfile.TemporaryDirectory(prefix="views") as name:
        made = Checkout(folder=Path(name).resolve())
        shutil.copytree(RUNS[release], made.run)
        config = made.run / "config.yaml"
        text = config.read_text(encoding="utf-8")
        config.write_text(text.replace("/checkout", str(made.folder)), encoding="utf-8")
        _write_rows(made)
        kept = {name: value for name, value in environ.items() if name in _KEPT}
        os.environ.clear()
        os.environ |= kept | {"XDG_CACHE_HOME": str(made.folder / "cache")}
        os.environ |= {"COLUMNS": "120", "LINES": "50", "TERM": "xterm-256color"}
        os.chdir(made.folder)
        try:
            yield made
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ |= environ


def _write_rows(made: Checkout) -> None:
    """Training files of as many rows as the run's plan has, with the ids that its ledger names."""
    entries = [json.loads(line) for line in (made.run / "ledger.jsonl").read_text().splitlines()]
    ids = {(one["source"], one["row"]): one["row_id"] for one in entries if "row_id" in one}
    sizes: dict[str, int] = next(one["plan"]["sizes"] for one in entries if "plan" in one)
    for source, rows in sizes.items():
        records = [
            {
                "data_source": source,
                "agent_name": "math_agent",
                "prompt": [{"role": "user", "content": "1 + 1?"}],
                "ability": source,
                "reward_model": {"style": "rule", "ground_truth": '{"answer": "2"}'},
                "extra_info": {
                    "split": "train",
                    "index": row,
                    "row_id": ids.get((source, row), f"{source}:{row:016x}"),
                    "extras": "{}",
                },
            }
            for row in range(rows)
        ]
        path = made.folder / "data" / "demo" / "seed0" / f"{source}_train.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(records, schema=ROW_TYPES), path)


# --- commands -----------------------------------------------------------------------------------


def said(made: Checkout, words: str, **environment: str) -> str:
    """What a command of `verl-mixed` prints, with its exit code; it runs in this process."""
    from verl_mixed.cli import main as verl_mixed

    out, errors = io.StringIO(), io.StringIO()
    before = os.environ.copy()
    os.environ |= environment
    try:
        with redirect_stdout(out), redirect_stderr(errors):
            try:
                code = verl_mixed(shlex.split(words))
            except SystemExit as error:  # of argparse
                code = int(str(error.code))
    finally:
        os.environ.clear()
        os.environ |= before
    settings = "".join(f"{name}={value} " for name, value in environment.items())
    lines = [f"$ {settings}verl-mixed {words}", f"exit {code}"]
    for name, text in (("stdout", out.getvalue()), ("stderr", errors.getvalue())):
        if plain := made.plain(text):
            shown = outlined(json.loads(plain)) if plain.startswith("{") else plain
            lines += [f"{name}:", *(f"| {line}" for line in shown.split("\n"))]
    return "\n".join(lines)


View = Callable[[Checkout], str]


def command(words: str, **environment: str) -> View:
    """The view of a command that only prints."""
    return lambda made: said(made, words, **environment)


def report(made: Checkout) -> str:
    """The page of `report` as text, with the data of its charts."""
    printed = said(made, f"report {RUN}")
    page = (made.run / "report.html").read_text(encoding="utf-8")
    return f"{printed}\n\n{made.plain(words_of(page))}\n\n{charts_of(page)}"


def table(made: Checkout) -> str:
    """The CSV file of `report`, a line a metric."""
    printed = said(made, f"report {RUN} --csv")
    head, *rows = [line.split(",") for line in (made.run / "report.csv").read_text().splitlines()]
    return "\n".join(
        [printed, "", *(", ".join(column) for column in zip(head, *rows, strict=True))]
    )


def pages(made: Checkout) -> str:
    """The comparison of `report` for two runs: the run and its first half."""
    shutil.copytree(made.run, made.folder / "runs" / "half")
    metrics = made.folder / "runs" / "half" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[: (len(lines) + 1) // 2]))
    printed = said(made, f"report {RUN} runs/half --output both.html")
    return f"{printed}\n\n{made.plain(words_of((made.folder / 'both.html').read_text()))}"


def viewer_file(made: Checkout) -> str:
    """The file of `view --html`: what stands in it besides the scripts."""
    printed = re.sub(r"\d+\.\d MB", "N MB", said(made, f"view {RUN} --html view.html"))
    page = (made.folder / "view.html").read_text(encoding="utf-8")
    block = _script(page, 'type="application/json"')
    return f"{printed}\n\n{made.plain(words_of(page))}\n\n{made.plain(outlined(json.loads(block)))}"


ASKED = (
    *("/", "/api/run", "/api/trajectories", "/api/trajectories?source=math&limit=1&offset=1"),
    *("/api/trajectories?outcome=solved&step=1", "/api/trajectories?reward_min=0.5&text=answer"),
    *(
        "/api/trajectories?outcome=tool%20error",
        "/api/trajectories?step=x",
        "/api/trajectories?limit=-1",
    ),
    *("/api/trajectories/9.9", "/api/nothing", "/viewer.css"),
)
"""Addresses of the viewer. The trajectories themselves are in its file."""


def viewer_server(made: Checkout) -> str:
    """The answers of the viewer's server."""
    words = [sys.executable, "-m", "verl_mixed", "view", RUN, "--port", "0"]
    path = os.pathsep.join([str(REPO_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        # A shell's job in the background ignores SIGINT, and so do all that it starts.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        tail = line + server.stdout.readline()
        try:
            address = line.split()[0].rstrip("/")
            parts = [f"$ verl-mixed view {RUN} --port 0"]
            parts += [_answer(made, address, place) for place in ASKED]
            parts.append(_answer(made, address, "/api/run", host="evil.invalid"))
            server.send_signal(signal.SIGINT)
            rest, errors = server.communicate(timeout=60)
        finally:
            server.kill()
    port = address.rpartition(":")[2]
    tail = re.sub(r"\b\w[\w.-]*@[\w.-]+", "USER@HOST", (tail + rest).replace(port, "PORT"))
    lines = [f"| {each}" for each in made.plain(f"{tail}{errors}").split("\n")]
    return "\n\n".join(["\n".join([parts[0], f"exit {server.returncode}", *lines]), *parts[1:]])


def _answer(made: Checkout, address: str, place: str, host: str = "") -> str:
    request = urllib.request.Request(address + place, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            status, kind, body = response.status, response.headers["Content-Type"], response.read()
    except urllib.error.HTTPError as error:
        status, kind, body = error.code, error.headers["Content-Type"], error.read()
    text = body.decode()
    if kind.startswith("application/json"):
        text = outlined(json.loads(text))
    elif kind.startswith("text/html"):
        text = words_of(text)
    elif status == 200:
        text = f"({'some' if text else 'no'} text)"
    return f"GET {place}{f' of {host}' if host else ''}: {status} {kind}\n{made.plain(text)}"


def profile(made: Checkout) -> str:
    """`profile` from the ledger, and the files that it writes."""
    printed = [said(made, f"profile {RUN}")]
    for path in sorted(made.folder.glob("data/**/*.profile.jsonl")):
        printed += ["", f"{path.relative_to(made.folder)}:", path.read_text().rstrip("\n")]
    return "\n".join(printed)


# --- runs with a fault --------------------------------------------------------------------------


def audit_of(change: Callable[[Path], object]) -> View:
    """The audit after a change of the run's files, which is taken back."""

    def view(made: Checkout) -> str:
        whole = made.folder / "whole"
        shutil.copytree(made.run, whole)
        try:
            change(made.run)
            return said(made, f"audit {RUN}")
        finally:
            shutil.rmtree(made.run)
            whole.rename(made.run)

    return view


def _edit(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(change(lines)), encoding="utf-8")


def _without_a_prompt(run: Path) -> None:
    _edit(run / "ledger.jsonl", lambda lines: [*lines[:5], *lines[6:]])


def _with_a_prompt_twice(run: Path) -> None:
    _edit(run / "ledger.jsonl", lambda lines: [*lines[:6], *lines[5:]])


def _with_another_row(run: Path) -> None:
    def change(lines: list[str]) -> list[str]:
        return [
            re.sub(r'"row": \d+', '"row": 1', line) if i == 5 else line
            for i, line in enumerate(lines)
        ]

    _edit(run / "ledger.jsonl", change)


def _with_another_mask(run: Path) -> None:
    _edit(
        run / "trajectories" / "1.jsonl",
        lambda lines: [
            line.replace('"response_mask": [1,', '"response_mask": [0,') for line in lines
        ],
    )


def _with_a_broken_line(run: Path) -> None:
    _edit(run / "metrics.jsonl", lambda lines: [lines[0], "{\n", *lines[1:]])


def _without_ledger(run: Path) -> None:
    (run / "ledger.jsonl").unlink()


# --- all views ----------------------------------------------------------------------------------


def views(release: str) -> dict[str, View]:
    """Name -> view, quick ones first. Those that write into the checkout come last."""
    return {
        "audit": command(f"audit {RUN}"),
        "audit of no run": command("audit runs/none"),
        "audit without a prompt": audit_of(_without_a_prompt),
        "audit with a prompt twice": audit_of(_with_a_prompt_twice),
        "audit with another row": audit_of(_with_another_row),
        "audit with another mask": audit_of(_with_another_mask),
        "audit with a broken line of metrics": audit_of(_with_a_broken_line),
        "audit without a ledger": audit_of(_without_ledger),
        "watch, lines": command(f"watch {RUN} --once"),
        "watch, screen": command(f"watch {RUN} --once", FORCE_COLOR="1"),
        "watch, narrow screen": command(
            f"watch {RUN} --once", FORCE_COLOR="1", COLUMNS="60", LINES="24"
        ),
        "watch of no run": command("watch runs/none"),
        "limiter": command(f"limiter {RUN}"),
        "limiter, JSON": command(f"limiter {RUN} --json"),
        "diagnose": command(f"diagnose {RUN}"),
        "diagnose, JSON": command(f"diagnose {RUN} --json"),
        "diagnose of no run": command("diagnose runs/none"),
        "stop": command(f"stop {RUN}"),
        "export": command(f"export {RUN}"),
        "export of a step": command(f"export {RUN} --step 1"),
        "export of the best": command(f"export {RUN} --step best"),
        "evaluate, compared": command(
            f"evaluate --compare {RUN}@0 {RUN}@{_last_validation(release)}"
        ),
        "evaluate, compared files": command(
            "evaluate --compare "
            f"{RUN}/validation/0.jsonl {RUN}/validation/{_last_validation(release)}.jsonl"
        ),
        "evaluate of a step": command(f"evaluate {RUN} --step 3"),
        "plan, compared with the run's": command(
            f"plan mixed.sources.math.ratio=0.2 --batches 3 --diff {RUN}/config.yaml",
            PROFILE="laptop",
        ),
        "plan, JSON": command(
            f"plan --batches 2 --json --diff {RUN}/config.yaml", PROFILE="laptop"
        ),
        "view, the server": viewer_server,
        "view, a file": viewer_file,
        "view, chosen": command(
            f"view {RUN} --html chosen.html --source math --step 1 --reward 0:0.5"
        ),
        "view, an unknown source": command(f"view {RUN} --html chosen.html --source chess"),
        "report": report,
        "report, table": table,
        "report of two": pages,
        "profile": profile,
    }


def _last_validation(release: str) -> int:
    steps = [int(path.stem) for path in (RUNS[release] / "validation").glob("*.jsonl")]
    return max(steps, default=0)


def blocks(release: str, chosen: Sequence[str] | None = None) -> dict[str, str]:
    """Name -> text of the views of a release; `chosen` are some of them."""
    every = views(release)
    with checkout(release) as made:
        return {name: every[name](made) for name in (chosen or every)}


def file_of(release: str) -> str:
    return f"views_{release.replace('.', '_')}.txt"


# --- reducing pages to text ---------------------------------------------------------------------


class _Words(HTMLParser):
    """The words of a page, a line for each element that begins a line, a table's row in one."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._words: list[str] = []
        self._skipped = 0
        self._cells: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "style"):
            self._skipped += 1
        elif tag == "tr":
            self._flush()
            self._cells = []
        elif tag not in ("b", "small", "span", "br", "td", "th", "code", "i", "em", "a"):
            self._flush()
        if "data-chart" in given:
            self._words.append(f"[chart {given['data-chart']}: {given.get('aria-label')}]")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._skipped -= 1
        elif tag in ("td", "th") and self._cells is not None:
            self._cells.append(self._taken())
        elif tag == "tr" and self._cells is not None:
            self.lines.append(" | ".join(self._cells))
            self._cells = None
        elif tag not in ("b", "small", "span", "code", "i", "em", "a"):
            self._flush()

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self._words += data.split()

    def _taken(self) -> str:
        text = " ".join(self._words)
        self._words = []
        return text

    def _flush(self) -> None:
        if self._cells is None and (text := self._taken()):
            self.lines.append(text)


_OF_CONFIG = re.compile(r"^(key \| .*\n)((?:.+ \| .*\n?){100,})", re.MULTILINE)
"""The table of all keys in a report."""


def words_of(page: str) -> str:
    """The words and tables of a page; of a table of all config keys only the number of rows."""
    parser = _Words()
    parser.feed(page)
    parser.close()
    text = "\n".join(parser.lines)
    return _OF_CONFIG.sub(lambda found: f"{found[1]}({len(found[2].splitlines())} rows)\n", text)


def _script(page: str, attributes: str) -> str:
    """The text of the script with these attributes."""
    found = re.search(rf"<script [^>]*{re.escape(attributes)}[^>]*>(.*?)</script>", page, re.DOTALL)
    assert found, attributes
    return found[1]


def charts_of(page: str) -> str:
    """The data of a report's charts: a line a curve, `step value` or `step value low`."""
    charts = json.loads(_script(page, 'id="charts"'))["own"]
    lines: list[str] = []
    for number, chart in enumerate(charts):
        lines.append(f"chart {number}: {chart['title']}")
        series = next(
            one["from"]["data"]["values"] for one in chart["transform"] if "lookup" in one
        )
        for one in series:
            points = [row[1:] for row in chart["data"]["values"] if row[0] == one["series"]]
            shown = ", ".join(" ".join(map(str, point)) for point in points)
            lines.append(f"  {one['curve']} ({one['kind']}): {shown}")
    return "\n".join(lines)


def outlined(value: Any, indent: str = "") -> str:
    """JSON as text with a line for each entry; lists of numbers and texts stay on one line."""
    return "\n".join(_outline(value, indent))


def _outline(value: Any, indent: str) -> Iterator[str]:
    entries: Sequence[tuple[str, Any]]
    if isinstance(value, dict):
        entries = [(f"{name}: ", each) for name, each in value.items()]
    else:
        entries = [("- ", each) for each in value]
    for head, each in entries:
        if isinstance(each, dict | list) and any(
            isinstance(one, dict | list) for one in _inner(each)
        ):
            yield f"{indent}{head.rstrip()}"
            yield from _outline(each, f"{indent}  ")
        else:
            yield f"{indent}{head}{json.dumps(each)}"


def _inner(value: Mapping[str, Any] | Sequence[Any]) -> Sequence[Any]:
    """What makes a value be shown on lines of its own."""
    if isinstance(value, Mapping):
        return [value] if len(value) > 6 else list(value.values())
    return value


def make() -> dict[str, str]:
    """File name -> text, of the releases whose run is there."""
    return {
        file_of(release): joined(blocks(release), NOTE.format(release=release))
        for release, folder in RUNS.items()
        if folder.is_dir()
    }


if __name__ == "__main__":
    sys.exit(main(make, __doc__))
