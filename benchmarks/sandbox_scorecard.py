"""Hostile programs against each rung of the sandbox: what was contained, and what leaked.

    python -m benchmarks.sandbox_scorecard [--rung bubblewrap] [--program WORDS]

Prints a Markdown table, program x rung. The programs and the judge are those of
`tests/agent_loop/tools/hostile/`. Exit: 0 all contained, 1 something leaked, 2 no rung stands here.
"""

import argparse
import asyncio
import sys

from agent_loop.tools.sandbox import SandboxUnavailable, choose_sandbox
from tests.agent_loop.tools.hostile import PROGRAMS
from tests.agent_loop.tools.hostile.judge import Host, Judge, Verdict
from tests.agent_loop.tools.hostile.program import ALL


async def verdicts(rung: str, words: str) -> dict[str, Verdict]:
    """Of every program that runs on a rung.

    Raises:
        SandboxUnavailable: it does not stand on this machine.
    """
    with Host() as host:
        sandbox = choose_sandbox(rung)  # pyright: ignore[reportArgumentType]
        try:
            judge = await Judge(sandbox, host).begin()
            return {
                hostile.name: await judge.judge(hostile)
                for hostile in PROGRAMS
                if rung in hostile.rungs and words in hostile.name
            }
        finally:
            sandbox.close()


def cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return "-"
    if not verdict.findings:
        return f"contained ({verdict.observed})"
    return f"**LEAKED**: {'; '.join(verdict.findings)}".replace("|", "\\|").replace("\n", " ")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rung", choices=ALL, action="append")
    parser.add_argument("--program", default="", help="only those whose name holds this")
    asked = parser.parse_args()
    columns: dict[str, dict[str, Verdict]] = {}
    for rung in asked.rung or ALL:
        try:
            columns[rung] = asyncio.run(verdicts(rung, asked.program))
        except SandboxUnavailable as error:
            print(f"{rung} is left out: {error}", file=sys.stderr)
    if not columns:
        return 2
    print(f"| category | program | {' | '.join(columns)} |")
    print(f"| --- | --- |{' --- |' * len(columns)}")
    for hostile in PROGRAMS:
        cells = [cell(column.get(hostile.name)) for column in columns.values()]
        if set(cells) != {"-"}:
            print(f"| {hostile.category} | {hostile.name} | {' | '.join(cells)} |")
    leaks = 0
    totals = []
    for column in columns.values():
        leaked = sum(bool(verdict.findings) for verdict in column.values())
        leaks += leaked
        totals.append(f"{len(column) - leaked} of {len(column)} contained")
    print(f"| | **total** | {' | '.join(totals)} |")
    return int(leaks > 0)


if __name__ == "__main__":
    sys.exit(main())
