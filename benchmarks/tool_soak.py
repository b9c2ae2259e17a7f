"""Whether the tool server holds: hundreds of callers at once, and what is left of it afterwards.

    python -m benchmarks.tool_soak [--seconds 60] [--callers 512]

A real server process is asked for programs, passages, arithmetic and algebra over HTTP, one program
in ten being hostile. After each quarter of the time the server is left alone and looked at, idle.
Printed are the answers, and what those looks saw: resident memory of the server and of all it
started, descriptors, processes. The first quarter is warm-up.
Whatever a program started must be gone.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import psutil

ROOT = Path(__file__).parents[1]
PASSAGES = 2000
WORDS = ("amber", "bridge", "castle", "delta", "ember", "forest", "garden", "harbor", "island")
START_S, SETTLE_S = 120.0, 60.0
PARTS = 4

HOSTILE = [
    "while True: pass",
    "import os\nfor _ in range(20):\n    if os.fork() == 0:\n        import time; time.sleep(600)",
    "import subprocess, sys\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', 'MARK'],"
    " start_new_session=True)",
    "print('x' * 10**7)",
    "x = 'x' * 10**11",
    "import os; os.kill(os.getpid(), 9)",
]

HOSTILE_S = 0.3
"""Time limit of a hostile program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, and what makes its answer good."""

    tool: str
    payload: dict[str, Any]
    good: Callable[[dict[str, Any]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The idle server at one moment."""

    calls: int
    """Answered until then."""

    server_mb: float
    """Resident memory of the server's own process."""

    tree_mb: float
    """And of all its processes together; what they share counts for each."""

    descriptors: int
    processes: int


@dataclass(slots=True)
class Account:
    """What happened to the calls."""

    latencies_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Tool -> answered calls."""

    bad: Counter[str] = field(default_factory=Counter)
    """What went wrong -> calls."""

    @property
    def calls(self) -> int:
        return sum(map(len, self.latencies_s.values())) + self.bad.total()


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """A soak's outcome."""

    account: Account
    looks: Sequence[Look]
    """After each part."""

    elapsed_s: float
    strays: int
    """Processes of programs that outlived them, seen with the server idle or ended."""


def asks(mark: str, seed: int) -> Iterator[Ask]:
    """An endless mixture of requests.

    Args:
        mark: a word in the command line of what programs leave behind.
        seed: another one, another order.
    """
    dice = random.Random(seed)
    while True:
        a, b = dice.randrange(10**6), dice.randrange(10**6)
        kind = dice.random()
        if kind < 0.35:
            yield Ask(
                tool="calculate",
                payload={"expression": f"{a}*{b}"},
                good=lambda body, right=str(a * b): body.get("result") == right,
            )
        elif kind < 0.45:
            yield Ask(
                tool="calculate",
                payload={"expression": f"2x = {2 * a}"},
                good=lambda body, right=f"x = {a}": body.get("result") == right,
            )
        elif kind < 0.75:
            query = " ".join(dice.choices(WORDS, k=2))
            yield Ask(
                tool="retrieve",
                payload={"queries": [query], "topk": 3, "return_scores": True},
                good=lambda body: len(body.get("result", [[]])[0]) == 3,
            )
        elif kind < 0.975:
            yield Ask(
                tool="run_code",
                payload={"code": f"print({a} + {b})", "language": "python", "run_timeout": 60},
                good=lambda body, right=f"{a + b}\n": (
                    (body.get("run_result") or {}).get("stdout") == right
                ),
            )
        else:
            yield Ask(
                tool="run_code",
                payload={
                    "code": dice.choice(HOSTILE).replace("MARK", mark),
                    "language": "python",
                    "run_timeout": HOSTILE_S,
                },
                good=lambda body: body.get("status") in ("Success", "Failed"),
            )


async def load(url: str, callers: int, source: Iterator[Ask], account: Account) -> None:
    """Have so many callers ask until the source ends, each for one thing at a time."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)

    async def call() -> None:
        for ask in source:
            began = time.monotonic()
            try:
                async with session.post(f"/{ask.tool}", json=ask.payload) as answer:
                    status, text = answer.status, await answer.text()
            except aiohttp.ClientError as error:
                account.bad[f"{ask.tool}: {type(error).__name__}"] += 1
                continue
            # a program that got no processor until its time limit has no verdict
            is_starved = status == 503 and ask.payload.get("run_timeout") == HOSTILE_S
            if (status == 200 and ask.good(json.loads(text))) or (
                is_starved and "the machine is overloaded" in text
            ):
                account.latencies_s[ask.tool].append(time.monotonic() - began)
            else:
                account.bad[f"{ask.tool}: {status} {text[:200]}"] += 1

    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        await asyncio.gather(*(call() for _ in range(callers)))


def until(deadline: float, source: Iterator[Ask]) -> Iterator[Ask]:
    """What comes before a monotonic time."""
    return itertools.takewhile(lambda _: time.monotonic() < deadline, source)


async def look(server: psutil.Process, calls: int) -> Look:
    """The server once no client is connected any more."""
    deadline = time.monotonic() + SETTLE_S
    while any(one.status != psutil.CONN_LISTEN for one in server.net_connections("tcp")):
        assert time.monotonic() < deadline, "the server keeps connections of clients that left"
        await asyncio.sleep(0.01)
    tree = [server, *server.children(recursive=True)]
    return Look(
        calls=calls,
        server_mb=server.memory_info().rss / 2**20,
        tree_mb=sum(map(_resident, tree)) / 2**20,
        descriptors=server.num_fds(),
        processes=len(tree),
    )


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


def left_behind(mark: str) -> list[psutil.Process]:
    """Processes anywhere on this machine whose command line has the mark."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if mark in (process.info["cmdline"] or [])]


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[str, psutil.Process]]:
    """A server process: its URL, and it. Ended with SIGTERM."""
    corpus, ready = folder / "corpus.jsonl", folder / "ready.json"
    dice = random.Random(0)
    with corpus.open("w") as lines:
        for number in range(PASSAGES):
            text = f'"{number}"\n' + " ".join(dice.choices(WORDS, k=30))
            lines.write(json.dumps({"id": str(number), "contents": text}) + "\n")
    words = ["--port", "0", "--corpus", str(corpus), "--ready-file", str(ready), *options]
    command = [sys.executable, "-m", "verl_mixed", "serve-tools", "--no-token", *words]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "server.log").read_text())
            time.sleep(0.01)
        yield json.loads(ready.read_text())["url"], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def soak(
    callers: int,
    parts: Sequence[Callable[[Iterator[Ask]], Iterator[Ask]]],
    options: tuple[str, ...] = (),
) -> Soak:
    """Ask a new server.

    Args:
        callers: requests at once.
        parts: each cuts the endless source of requests to what is asked before the next look.
        options: of `serve-tools`.
    """
    mark = f"soak-{uuid4().hex}"
    source, account = asks(mark, seed=0), Account()

    async def run(url: str, server: psutil.Process) -> list[Look]:
        looks = []
        for part in parts:
            await load(url, callers, part(source), account)
            looks.append(await look(server, account.calls))
        return looks

    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), *options) as (url, server),
    ):
        began = time.monotonic()
        looks = asyncio.run(run(url, server))
        elapsed_s = time.monotonic() - began
        marked = left_behind(mark)
        family = server.children(recursive=True)
    _, alive = psutil.wait_procs(family, timeout=5)
    return Soak(
        account=account,
        looks=looks,
        elapsed_s=elapsed_s,
        strays=len({*marked, *left_behind(mark), *alive}),
    )


def table(result: Soak) -> str:
    """The figures, in Markdown."""
    rows = ["| tool | calls | p50 ms | p99 ms |", "| --- | --- | --- | --- |"]
    for tool, latencies_s in sorted(result.account.latencies_s.items()):
        cuts = statistics.quantiles(latencies_s, n=100) if len(latencies_s) > 1 else [0.0] * 99
        rows.append(
            f"| {tool} | {len(latencies_s)} | {cuts[49] * 1e3:.0f} | {cuts[98] * 1e3:.0f} |"
        )
    rows += [
        "",
        "| idle server |" + " |" * len(result.looks),
        "| --- |" + " --- |" * len(result.looks),
        _row("calls answered", (str(look.calls) for look in result.looks)),
        _row("resident MB, server", (f"{look.server_mb:.1f}" for look in result.looks)),
        _row("resident MB, all", (f"{look.tree_mb:.1f}" for look in result.looks)),
        _row("descriptors", (str(look.descriptors) for look in result.looks)),
        _row("processes", (str(look.processes) for look in result.looks)),
        "",
        f"{result.account.calls} calls in {result.elapsed_s:.0f} s "
        f"({result.account.calls / result.elapsed_s:.0f}/s), {result.account.bad.total()} without "
        f"their answer, {result.strays} stray processes",
    ]
    return "\n".join(rows + [f"- {count} x {why}" for why, count in result.account.bad.items()])


def _row(name: str, cells: Iterable[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description="Whether the tool server holds.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--callers", type=int, default=512)
    given = parser.parse_args()
    part_s = given.seconds / PARTS
    result = soak(given.callers, [lambda source: until(time.monotonic() + part_s, source)] * PARTS)
    print(table(result))
    return 1 if result.strays or result.account.bad else 0


if __name__ == "__main__":
    sys.exit(main())
