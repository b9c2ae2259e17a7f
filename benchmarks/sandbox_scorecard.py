"""Hostile programs against the sandbox: what leaked on each rung, and how late `/health` answered.

    python -m benchmarks.sandbox_scorecard [--rung RUNG] [--program WORDS] [--health] [--summary]
    python -m benchmarks.sandbox_scorecard --health --summary-into README.md \
        --table-into benchmarks/README.md

A rung is a backend (bubblewrap or landlock) as root or as an ordinary user. Prints a Markdown table
with a line for each program, or with `--summary` for each category. The last two options write a
table between the two markers of a file. The programs and the judge are those of
`tests/tool_server/hostile/`.

With `--health` a tool server with two sandbox workers also runs each program. Meanwhile `/health`
is asked every 5 ms, and a neighbour runs a trivial program every 0.1 s.

Exit: 0 all contained and in time, 1 something leaked or was late, 2 no rung works here.
"""

import argparse
import asyncio
import base64
import json
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp

from tests.tool_server.hostile import PROGRAMS, Hostile
from tests.tool_server.hostile.judge import Host
from tests.tool_server.hostile.program import python
from tests.tool_server.hostile.rungs import (
    RUNGS,
    RungUnavailable,
    account,
    judged,
    missing,
    sandbox_of,
)
from tool_server.sandbox import Sandbox

MOST_MS = 50.0
"""Goal: the p99 of `/health` beside a program."""

PROBES = 100
"""Fewest probes beside a program; a short program is run again until there are so many."""

MARKERS = ("<!-- sandbox scorecard -->", "<!-- end of sandbox scorecard -->")
SERVER = "tool_server.app"
_SERVE = f"""
import sys
import {SERVER} as app
from tool_server.settings import ServerSettings
app.DRAIN_S = 0
app.serve(ServerSettings(port=0, sandbox=sys.argv[1], sandbox_workers=2))
"""


def verdicts(rung: str, programs: list[Hostile]) -> dict[str, list[str]]:
    """Program -> findings.

    Raises:
        RungUnavailable: the sandbox does not work on this machine.
    """
    with judged(rung, [hostile.name for hostile in programs]) as judge:
        return {hostile.name: judge.verdict(hostile.name)["findings"] for hostile in programs}


def health(rung: str, programs: list[Hostile]) -> dict[str, tuple[float, str]]:
    """Program -> p99 of `/health` in ms beside it, and what went wrong with the neighbour."""
    with (
        account(rung, SERVER, "sympy") as own,  # whose version /calculate asks for
        Host() as host,
        subprocess.Popen(
            [*own.command, "-c", _SERVE, sandbox_of(rung)],
            env=dict(own.env),
            cwd="/",
            stdout=subprocess.PIPE,
            text=True,
        ) as server,
    ):
        try:
            assert server.stdout is not None
            url = server.stdout.readline().partition("url=")[2].partition(" ")[0]
            if not url:
                raise RungUnavailable("the tool server did not start")
            backend = SimpleNamespace(has_processes=sandbox_of(rung) == "bubblewrap")
            told = host.told(cast(Sandbox, backend)) | {"server": server.pid}
            return asyncio.run(beside_all(url, programs, told, host.secret))
        finally:
            server.terminate()
            server.communicate()


async def beside_all(
    url: str, programs: list[Hostile], told: dict[str, Any], secret: str
) -> dict[str, tuple[float, str]]:
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as client:
        return {each.name: await beside(client, each, told, secret) for each in programs}


async def beside(
    client: aiohttp.ClientSession, hostile: Hostile, told: dict[str, Any], secret: str
) -> tuple[float, str]:
    """p99 of `/health` in ms while a program runs, and what went wrong with the neighbour."""
    times_ms: list[float] = []
    wrong: list[str] = []

    async def probe() -> None:
        began = time.perf_counter()
        async with client.get("/health") as answer:
            await answer.read()
        times_ms.append(1000 * (time.perf_counter() - began))

    async def neighbour() -> None:
        answer = json.loads(await _run(client, code="print(6 * 7)", language="python"))
        stdout = answer["run_result"]["stdout"]
        if stdout != "42\n":
            wrong.append(f"the neighbour got {stdout!r}")

    async def attack() -> None:
        codes = filter(None, (hostile.code, hostile.beside))
        await asyncio.gather(*(_send(client, hostile, code, told, secret) for code in codes))

    others = [asyncio.create_task(_every(*each)) for each in ((0.005, probe), (0.1, neighbour))]
    while len(times_ms) < PROBES:
        await attack()
    for each in others:
        each.cancel()
    for result in await asyncio.gather(*others, return_exceptions=True):
        if isinstance(result, Exception):
            wrong.append(f"{type(result).__name__}: {result}")
    times_ms.sort()
    return times_ms[len(times_ms) * 99 // 100], "; ".join(wrong[:1])


async def _every(period_s: float, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Start an action on schedule, also if earlier ones still wait: so a stall counts in full."""
    tasks: set[asyncio.Task[None]] = set()
    try:
        while True:
            tasks.add(asyncio.create_task(action()))
            await asyncio.sleep(period_s)
            for done in [task for task in tasks if task.done()]:
                tasks.remove(done)
                done.result()
    finally:
        await asyncio.gather(*tasks)


async def _send(
    client: aiohttp.ClientSession, hostile: Hostile, code: str, told: dict[str, Any], secret: str
) -> None:
    code = code.replace("@SECRET@", secret)
    is_python = hostile.language in ("python", "cell")
    await _run(
        client,
        code=python(code, told) if is_python else code,
        language="python" if is_python else hostile.language,
        run_timeout=hostile.limits.wall_s,
        memory_limit_MB=hostile.limits.memory_mb,
        files={path: base64.b64encode(each).decode() for path, each in hostile.files.items()},
        **({"session": hostile.name} if hostile.language == "cell" else {}),
        **({"fetch_files": hostile.fetch} if hostile.fetch else {}),
    )


async def _run(client: aiohttp.ClientSession, **asked: Any) -> bytes:
    """The answer as it came: decoding 20 MB would keep the probes of this process waiting."""
    async with client.post("/run_code", json=asked) as answer:
        return await answer.read()


def cell(findings: list[str] | None, late: tuple[float, str] | None) -> str:
    """What a table says of a program on a rung."""
    if findings is None:
        return "-"
    text = "contained"
    if findings:
        text = f"**LEAKED**: {'; '.join(findings)}".replace("|", "\\|").replace("\n", " ")
    if late:
        p99_ms, wrong = late
        text += f", {p99_ms:.0f} ms" if p99_ms < MOST_MS else f", **{p99_ms:.0f} ms**"
        text += f", **{wrong}**" if wrong else ""
    return text


def table(
    columns: dict[str, dict[str, list[str]]], times: dict[str, dict[str, tuple[float, str]]]
) -> str:
    lines = [f"| category | program | {' | '.join(columns)} |", "| --- " * (2 + len(columns)) + "|"]
    for hostile in PROGRAMS:
        cells = [
            cell(columns[rung].get(hostile.name), times.get(rung, {}).get(hostile.name))
            for rung in columns
        ]
        if set(cells) != {"-"}:
            lines.append(f"| {hostile.category} | {hostile.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(
    columns: dict[str, dict[str, list[str]]], times: dict[str, dict[str, tuple[float, str]]]
) -> str:
    lines = [f"| category | {' | '.join(columns)} |", "| --- " * (1 + len(columns)) + "|"]
    categories = {hostile.category: None for hostile in PROGRAMS}
    for category in (*categories, "total"):
        names = [each.name for each in PROGRAMS if category in (each.category, "total")]
        cells = []
        for rung, column in columns.items():
            own = [column[name] for name in names if name in column]
            text = f"{own.count([])} of {len(own)}" if own else "-"
            if late := [times[rung][name][0] for name in names if name in times.get(rung, {})]:
                text += f", {max(late):.0f} ms"
            cells.append(text)
        lines.append(f"| {category} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rung", choices=RUNGS, action="append")
    parser.add_argument("--program", default="", help="only those whose name holds this")
    parser.add_argument("--health", action="store_true", help="measure /health beside each program")
    parser.add_argument("--summary", action="store_true", help="a line for each category")
    parser.add_argument("--table-into", type=Path, help="a file with markers, gets the table")
    parser.add_argument("--summary-into", type=Path, help="a file with markers, gets the summary")
    asked = parser.parse_args()
    columns: dict[str, dict[str, list[str]]] = {}
    times: dict[str, dict[str, tuple[float, str]]] = {}
    for rung in sorted(asked.rung or RUNGS):
        programs = [
            hostile
            for hostile in PROGRAMS
            if sandbox_of(rung) in hostile.rungs and asked.program in hostile.name
        ]
        try:
            if why := missing(rung):
                raise RungUnavailable(why)
            columns[rung] = verdicts(rung, programs)
            if asked.health:
                times[rung] = health(rung, programs)
        except RungUnavailable as error:
            print(f"{rung} is left out: {error}", file=sys.stderr)
    if not columns:
        return 2
    print((summary if asked.summary else table)(columns, times))
    for path, render in ((asked.table_into, table), (asked.summary_into, summary)):
        if path:
            before, rest = path.read_text().split(MARKERS[0])
            after = rest.split(MARKERS[1])[1]
            text = f"{MARKERS[0]}\n\n{render(columns, times)}\n\n{MARKERS[1]}"
            path.write_text(before + text + after)
    leaks = any(findings for column in columns.values() for findings in column.values())
    late = any(ms >= MOST_MS or wrong for each in times.values() for ms, wrong in each.values())
    return int(leaks or late)


if __name__ == "__main__":
    sys.exit(main())
