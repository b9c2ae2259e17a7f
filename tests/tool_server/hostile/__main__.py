"""Judge programs in one sandbox, as the user of this process: a line of JSON a verdict."""

import asyncio
import json
import sys

from tests.tool_server.hostile import PROGRAMS
from tests.tool_server.hostile.judge import Host, Judge
from tool_server.sandbox import SandboxKind, SandboxUnavailable, choose_sandbox
from tool_server.sandbox import sandbox as sandbox_module


def say(**line: object) -> None:
    print(json.dumps(line), flush=True)


async def main(kind: SandboxKind, names: list[str]) -> None:
    # A verdict is not refused because the machine is busy with other tests.
    sandbox_module.WALL_FACTOR = 1000
    with Host() as host:
        try:
            sandbox = choose_sandbox(kind)
        except SandboxUnavailable as error:
            return say(unavailable=str(error))
        try:
            judge = await Judge(sandbox, host).begin()
            by_name = {hostile.name: hostile for hostile in PROGRAMS}
            for name in names:
                verdict = await judge.judge(by_name[name])
                say(program=name, findings=verdict.findings, observed=verdict.observed)
        finally:
            sandbox.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))  # pyright: ignore[reportArgumentType]
