"""What a program costs in our sandboxes, beside starting an interpreter for each.

    python -m benchmarks.sandbox [--runs 60] [--rounds 5]

Each way runs the same trivial program, checked by its output, two at a time as a server with two
workers does and one at a time for its latency; the ways take turns in every round. `bwrap` is what
a server does that starts bubblewrap anew for each program, with the same binds; the last rows need
numpy and sympy, imported by the program or loaded by the zygote before.
The program itself is what a result's `execution_time` is: from its order to its process being gone.
CPU is of the whole process tree, bubblewrap, zygotes and programs included.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tool_server.isolation.host import interpreter, readable_paths
from tool_server.sandbox import Sandbox, SandboxUnavailable, choose_sandbox
from tool_server.sandbox.bubblewrap import BubblewrapSandbox
from tool_server.sandbox.usage_monitor import descendants

TRIVIAL = "print(6 * 7)"
HEAVY = "import numpy, sympy\nprint(6 * 7)"
PACKAGES = ("numpy", "sympy")
AT_ONCE = 2


@dataclass
class Way:
    """One way to run a program."""

    name: str
    run: Callable[[], Awaitable[tuple[str, float]]]
    """What it printed, and the seconds between its start and its end; 0 where nobody says."""

    sandbox: Sandbox | None = None
    rates: list[float] = field(default_factory=list)
    latencies_ms: list[float] = field(default_factory=list)
    own_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)


def ways() -> list[Way]:
    """Those that work on this machine."""
    python = [interpreter(), "-I", "-S"]
    found = [Way("fresh python -I -S, not isolated", lambda: fresh([*python, "-c", TRIVIAL]))]
    for kind in ("bubblewrap", "landlock"):
        try:
            sandbox = choose_sandbox(kind, workers=AT_ONCE)
        except SandboxUnavailable as error:
            print(f"no {kind}: {error}", file=sys.stderr)
            continue
        if isinstance(sandbox, BubblewrapSandbox):
            bwrap = [*bwrap_argv(), *python, "-c", TRIVIAL]
            found.append(Way("fresh bwrap and python", lambda argv=bwrap: fresh(argv)))
        found.append(ours(f"ours: {kind}", sandbox, TRIVIAL))
    found.append(
        Way(
            "fresh python, numpy and sympy, not isolated",
            lambda: fresh([sys.executable, "-c", HEAVY]),
        )
    )
    try:
        loaded = choose_sandbox("auto", workers=AT_ONCE, packages=PACKAGES)
    except SandboxUnavailable as error:
        print(f"no numpy and sympy: {error}", file=sys.stderr)
    else:
        found.append(ours(f"ours: {loaded.name}, numpy and sympy loaded", loaded, HEAVY))
    return found


def ours(name: str, sandbox: Sandbox, code: str) -> Way:
    async def run() -> tuple[str, float]:
        result = await sandbox.run_python(code)
        return result.stdout, result.execution_time_s

    return Way(name, run, sandbox)


def bwrap_argv() -> list[str]:
    """bubblewrap with the namespaces and the binds that our zygotes have."""
    argv = ["bwrap", "--unshare-all", "--die-with-parent", "--clearenv"]
    for link in ("/bin", "/lib", "/lib64"):
        argv += ["--symlink", os.readlink(link), link] if os.path.islink(link) else []
    for path in readable_paths():
        argv += ["--ro-bind", path, path]
    return [*argv, "--dev", "/dev", "--tmpfs", "/box", "--chdir", "/box", "--"]


async def fresh(argv: list[str]) -> tuple[str, float]:
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return out.decode(), 0.0


def cpu_s(way: Way) -> float:
    """Of this process, its ended children, and the way's zygotes with what they have run."""
    total = sum(os.times()[:4])
    ticks = os.sysconf("SC_CLK_TCK")
    for zygote in filter(None, way.sandbox._zygotes if way.sandbox else ()):
        for pid in (zygote.process.pid, *descendants(zygote.process.pid)):
            try:
                with open(f"/proc/{pid}/stat") as file:
                    fields = file.read().rsplit(")", 1)[1].split()
            except OSError:
                continue
            total += sum(map(int, fields[11:15])) / ticks  # utime stime cutime cstime
    return total


async def measure(way: Way, runs: int) -> None:
    """One round."""

    async def once() -> float:
        out, own_s = await way.run()
        if out != "42\n":
            raise RuntimeError(f"{way.name} printed {out!r}")
        return own_s

    await once()
    for _ in range(runs // 4):
        started = time.perf_counter()
        way.own_ms.append(1e3 * await once())
        way.latencies_ms.append(1e3 * (time.perf_counter() - started))

    left = iter(range(runs))

    async def worker() -> None:
        for _ in left:
            await once()

    cpu, started = cpu_s(way), time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    way.rates.append(runs / (time.perf_counter() - started))
    way.cpu_ms.append(1e3 * (cpu_s(way) - cpu) / runs)


async def measure_all(found: list[Way], rounds: int, runs: int) -> None:
    for _ in range(rounds):
        for way in found:
            await measure(way, runs if "sympy" not in way.name or way.sandbox else runs // 10)


def show(found: list[Way]) -> None:
    """The table, in Markdown."""
    base = next((way for way in found if way.name.startswith("fresh bwrap")), found[0])
    per_second = statistics.median(base.rates)
    print(
        f"| two at a time | programs/s | of {base.name} | p50, alone | p95, alone "
        "| p50 of the program itself | CPU each |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for way in found:
        rate = statistics.median(way.rates)
        p50, p95 = (statistics.quantiles(way.latencies_ms, n=20)[i] for i in (9, 18))
        own = statistics.median(way.own_ms)
        print(
            f"| {way.name} | {rate:.0f} | {rate / per_second:.2f}x | {p50:.1f} ms | {p95:.1f} ms "
            f"| {f'{own:.1f} ms' if own else '-'} | {statistics.median(way.cpu_ms):.1f} ms |"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=60, help="programs a round")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    found = ways()
    asyncio.run(measure_all(found, arguments.rounds, arguments.runs))
    version = ".".join(map(str, sys.version_info[:3]))
    print(
        f"{os.cpu_count()} cores, Python {version}. Medians of {arguments.rounds} rounds of "
        f"{arguments.runs} programs, the ways taking turns.\n"
    )
    show(found)
    for way in found:
        if way.sandbox is not None:
            way.sandbox.close()


if __name__ == "__main__":
    main()
