"""What one rate over all processes of a host costs, and how well it holds: ours beside its peers.

    python -m benchmarks.rate_limiter

Every measurement is a fresh process that forks the workers; they open the limiter, meet at a
barrier and call until a timer ends them all. CPU time is user + system of the workers, from the
barrier to the timer. The limiters take turns within each round. Prints markdown; README.md has the
environment.
"""

import argparse
import asyncio
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.limiter_peers import (
    ASYNCIO,
    BLOCKING,
    KINDS,
    PACED,
    WAITING,
    FastenersGcra,
    FilelockAsyncNoThread,
    FilelockGcra,
    Floor,
    Limit,
    Limiter,
    LimitsRedis,
    Ours,
    Place,
    Pyrate,
)

UNREACHED = Limit(per_second=5e10 / 60, burst=10**6)
"""A rate so high that nobody waits for it."""

PACE = Limit(per_second=1000, burst=100)
"""The rate held for accuracy and fairness."""

SLOW = Limit(per_second=20, burst=1)
"""The rate that everybody waits for."""

CPU_PROCESSES = (1, 8, 32)
ASYNCIO_PROCESSES, COROUTINES = 8, 64
PACED_PROCESSES = 32

BURST_S = 1.0
"""The burst and the start are over after this long; rate and fairness count from here on."""

WINDOW_NS = 10**9

MISSING_MODULE_EXIT = 3

Figures = dict[str, Any]
"""What one measurement found, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One measurement."""

    what: str
    """A key of `LOOPS`."""

    label: str
    processes: int
    seconds: float


# --- in a worker ---------------------------------------------------------------


class _TimeUp(KeyboardInterrupt):
    """Ends the loop wherever it is, asleep or not; of this kind because asyncio lets it through."""


@dataclass(slots=True)
class Work:
    """What one worker did until its time was up."""

    calls: int = 0
    cpu_ns: int = 0
    wall_ns: int = 0
    granted_ns: list[int] = field(default_factory=list)
    """When each call passed, CLOCK_BOOTTIME; only where the measurement is about that."""


def _now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _count(limiter: Limiter, work: Work) -> None:
    acquire = limiter.acquire
    while True:
        acquire()
        work.calls += 1


def _note_times(limiter: Limiter, work: Work) -> None:
    acquire, note = limiter.acquire, work.granted_ns.append
    while True:
        acquire()
        note(_now_ns())


def _count_async(limiter: Limiter, work: Work) -> None:
    async def call() -> None:
        acquire = limiter.acquire_async
        while not work.wall_ns:  # a coroutine that has not begun yet must not begin after the end
            await acquire()
            work.calls += 1

    async def all_calls() -> None:
        await asyncio.gather(*(call() for _ in range(COROUTINES)))

    asyncio.run(all_calls())


@dataclass(frozen=True, slots=True)
class Loop:
    """How a worker calls, and the rate it calls at."""

    run: Callable[[Limiter, Work], None]
    limit: Limit
    warm_calls: int
    """Calls made before the clock starts: they open connections and load scripts."""


LOOPS = {
    "cpu": Loop(_count, UNREACHED, warm_calls=20),
    "asyncio": Loop(_count_async, UNREACHED, warm_calls=0),
    "paced": Loop(_note_times, PACE, warm_calls=0),
    "waiting": Loop(_count, SLOW, warm_calls=0),
}


def _work(order: Order, place: Place, barrier: Any, sender: Connection) -> None:
    """Open the limiter, meet the others, call until the timer; sends `Work`."""
    loop = LOOPS[order.what]
    limiter = KINDS[order.label](place, loop.limit)
    for _ in range(loop.warm_calls):
        limiter.acquire()
    work = Work()
    ended: list[Work] = []

    def stop(*_: object) -> None:
        if not ended:  # the first time: what follows is cleaning up
            work.cpu_ns = time.process_time_ns() - cpu_ns
            work.wall_ns = _now_ns() - wall_ns
            ended.append(replace(work, granted_ns=list(work.granted_ns)))
        raise _TimeUp

    signal.signal(signal.SIGALRM, stop)
    barrier.wait()
    cpu_ns, wall_ns = time.process_time_ns(), _now_ns()
    # Again every second, in case the first comes where Python swallows what is raised.
    signal.setitimer(signal.ITIMER_REAL, order.seconds, 1.0)
    try:
        loop.run(limiter, work)
    except _TimeUp:
        signal.setitimer(signal.ITIMER_REAL, 0)
    sender.send(asdict(ended[0]))
    sender.close()
    os._exit(0)  # no thread of a peer may hold us up


# --- in the process of one measurement -----------------------------------------


def most_in_window(sorted_ns: Sequence[int], window_ns: int) -> int:
    """Most times within any half-open window of this length, wherever it begins."""
    most = first = 0
    for last, now_ns in enumerate(sorted_ns):
        while now_ns - sorted_ns[first] >= window_ns:
            first += 1
        most = max(most, last - first + 1)
    return most


def _paced_figures(works: list[Work], start_ns: int, seconds: float) -> Figures:
    """Rate and fairness from `BURST_S` on; the fullest second of the whole run."""
    steady_ns = start_ns + int(BURST_S * 1e9)
    end_ns = start_ns + int(seconds * 1e9)
    steady = [sum(steady_ns < at <= end_ns for at in work.granted_ns) for work in works]
    mean = sum(steady) / len(steady)
    return {
        "rate": sum(steady) / (seconds - BURST_S),
        "most_in_second": most_in_window(
            sorted(at for work in works for at in work.granted_ns), WINDOW_NS
        ),
        "least_of_mean": min(steady) / mean,
        "most_of_mean": max(steady) / mean,
    }


def _measure(order: Order, place: Place) -> Figures:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(order.processes + 1)
    receivers: list[Connection] = []
    workers: list[Any] = []
    for _ in range(order.processes):
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(order, place, barrier, sender), daemon=True)
        worker.start()
        sender.close()
        receivers.append(receiver)
        workers.append(worker)
    barrier.wait(timeout=60)
    start_ns = _now_ns()
    works = [Work(**receiver.recv()) for receiver in receivers]
    for worker in workers:
        worker.join()
    if order.what == "paced":
        return _paced_figures(works, start_ns, order.seconds)
    calls = sum(work.calls for work in works)
    return {
        "calls": calls,
        "cpu_us": sum(work.cpu_ns for work in works) / 1e3 / max(calls, 1),
        "calls_per_s": calls / order.seconds,
        "cores": sum(work.cpu_ns / work.wall_ns for work in works),
    }


def _child(order: Order, place: Place) -> int:
    try:
        for library in ["redis"] * KINDS[order.label].needs_redis + [KINDS[order.label].library]:
            importlib.import_module(library)
    except ModuleNotFoundError as error:
        print(error.name)
        return MISSING_MODULE_EXIT
    print(json.dumps(_measure(order, place)))
    return 0


# --- in the process that was started -------------------------------------------


@dataclass(frozen=True, slots=True)
class Redis:
    """A Redis server of our own."""

    port: int

    def cpu_us(self) -> float:
        """CPU time it has used, user + system."""
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(b"INFO cpu\r\nQUIT\r\n")
            with connection.makefile() as lines:
                used = dict(line.strip().split(":") for line in lines if ":" in line)
        return 1e6 * (float(used["used_cpu_sys"]) + float(used["used_cpu_user"]))


@contextmanager
def _redis_server(folder: Path) -> Generator[Redis | None]:
    """A server on a free loopback port that stores nothing; None where there is no binary."""
    binary = shutil.which("redis-server")
    if binary is None:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    server = subprocess.Popen(
        [binary, *options, "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for_port(port)
        yield Redis(port)
    finally:
        server.terminate()
        server.wait()


def _wait_for_port(port: int) -> None:
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"redis-server does not answer on port={port} after 5 s")


class Results:
    """Figures of every round, per measurement and limiter."""

    def __init__(self, folder: Path, redis: Redis | None) -> None:
        self._folder, self._redis = folder, redis
        self._rounds: dict[tuple[str, str, int], list[Figures]] = {}
        self.missing: dict[str, str] = {}

    def measure(self, order: Order) -> None:
        """Run one measurement in a fresh process; a limiter found missing is not tried again."""
        if KINDS[order.label].needs_redis and self._redis is None:
            self.missing[order.label] = "no redis-server on the PATH"
        if order.label in self.missing:
            return
        place = Path(tempfile.mkdtemp(dir=self._folder))
        port = self._redis.port if self._redis else 0
        before_us = self._redis.cpu_us() if self._redis else 0.0
        command = [sys.executable, "-m", "benchmarks.rate_limiter", "--child"]
        done = subprocess.run(
            [*command, json.dumps(asdict(order)), str(place), str(port)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120 + 10 * order.seconds,
        )
        if done.returncode == MISSING_MODULE_EXIT:
            self.missing[order.label] = f"not installed (no module {done.stdout.split()[-1]})"
            return
        if done.returncode:
            raise RuntimeError(
                f"cannot measure {order}: exit={done.returncode}\n{done.stderr[-3000:]}"
            )
        figures = json.loads(done.stdout.splitlines()[-1])
        if self._redis and KINDS[order.label].needs_redis and "calls" in figures:
            server_us = self._redis.cpu_us() - before_us
            figures["server_us"] = server_us / max(figures["calls"], 1)
        key = order.what, order.label, order.processes
        self._rounds.setdefault(key, []).append(figures)

    def seen(self, what: str, kind: type[Limiter], processes: int, field: str) -> list[float]:
        """A figure of every round; empty where there is none."""
        rounds = self._rounds.get((what, kind.label, processes), [])
        return [figures[field] for figures in rounds if field in figures]

    def median(self, what: str, kind: type[Limiter], processes: int, field: str) -> float | None:
        seen = self.seen(what, kind, processes, field)
        return statistics.median(seen) if seen else None

    def against(self, kind: type[Limiter], by: type[Limiter], processes: int) -> float | None:
        """CPU per blocking acquire of `kind` over that of `by`."""
        return _ratio(
            self.median("cpu", kind, processes, "cpu_us"),
            self.median("cpu", by, processes, "cpu_us"),
        )


def _ratio(value: float | None, of: float | None) -> float | None:
    return None if value is None or not of else value / of


def _shown(text: Callable[[float], str], value: float | None) -> str:
    return "" if value is None else text(value)


def _microseconds(value: float) -> str:
    return f"{value:.3g} µs" if value < 100 else f"{value:,.0f} µs"


def _times(value: float) -> str:
    return f"{value:,.0f}x" if value >= 100 else f"{value:.3g}x"


def _fraction(value: float) -> str:
    return f"{value:.3f}"


def _table(
    kinds: Iterable[type[Limiter]],
    titles: Sequence[str],
    cells: Callable[[type[Limiter]], list[str]],
    missing: dict[str, str],
) -> list[str]:
    lines = [f"| | {' | '.join(titles)} |", f"| --- |{' ---: |' * len(titles)}"]
    for kind in kinds:
        row = [missing[kind.label]] if kind.label in missing else cells(kind)
        row += [""] * (len(titles) - len(row))
        lines.append(f"| {kind.label} | {' | '.join(row)} |")
    return [*lines, ""]


def _cpu_tables(results: Results) -> list[str]:
    lines: list[str] = []
    for processes in CPU_PROCESSES:

        def cells(kind: type[Limiter], processes: int = processes) -> list[str]:
            def median(field: str) -> float | None:
                return results.median("cpu", kind, processes, field)

            better = None if kind in (Floor, Ours) else results.against(kind, Ours, processes)
            return [
                _shown(_microseconds, median("cpu_us")),
                _shown(_microseconds, median("server_us")),
                _shown("{:,.0f}".format, median("calls_per_s")),
                _shown(_times, results.against(kind, Floor, processes)),
                _shown(_times, better),
            ]

        many = "1 process" if processes == 1 else f"{processes} processes"
        titles = ["CPU per acquire", "of the server, extra", "acquires per second"]
        titles += ["times the floor", "ours better: CPU"]
        lines += [f"**Blocking acquires, {many}, nobody waits for the rate**", ""]
        lines += _table(BLOCKING, titles, cells, results.missing)
    return lines


def _asyncio_table(results: Results) -> list[str]:
    def cells(kind: type[Limiter]) -> list[str]:
        def median(field: str, of: type[Limiter] = kind) -> float | None:
            return results.median("asyncio", of, ASYNCIO_PROCESSES, field)

        better = None if kind is Ours else _ratio(median("cpu_us"), median("cpu_us", Ours))
        return [
            _shown(_microseconds, median("cpu_us")),
            _shown("{:,.0f}".format, median("calls_per_s")),
            _shown(_times, better),
        ]

    titles = ["CPU per acquire", "acquires per second", "ours better: CPU"]
    return [
        f"**asyncio, {ASYNCIO_PROCESSES} processes of {COROUTINES} coroutines, nobody waits for "
        "the rate**",
        "",
        *_table(ASYNCIO, titles, cells, results.missing),
    ]


def _accuracy_table(results: Results) -> list[str]:
    def cells(kind: type[Limiter]) -> list[str]:
        most = results.seen("paced", kind, PACED_PROCESSES, "most_in_second")
        return [
            _shown("{:,.1f}/s".format, results.median("paced", kind, PACED_PROCESSES, "rate")),
            _shown("{:,.0f}".format, statistics.median(most) if most else None),
            _shown("{:,.0f}".format, max(most, default=None)),
        ]

    titles = ["steady rate", "most calls in any second", "in the worst round"]
    return [
        f"**Accuracy, {PACE.per_second:,.0f}/s with a burst of {PACE.burst}, "
        f"{PACED_PROCESSES} processes**; at most {_bound():,.0f} calls may pass in a second. "
        "Times are taken after the acquire has returned",
        "",
        *_table(PACED, titles, cells, results.missing),
    ]


def _fairness_table(results: Results) -> list[str]:
    def cells(kind: type[Limiter]) -> list[str]:
        return [
            _shown(_fraction, results.median("paced", kind, PACED_PROCESSES, field))
            for field in ("least_of_mean", "most_of_mean")
        ]

    titles = ["fewest calls of a process / mean", "most / mean"]
    return [
        f"**Fairness, {PACED_PROCESSES} processes at {PACE.per_second:,.0f}/s, burst drained**",
        "",
        *_table(PACED, titles, cells, results.missing),
    ]


def _waiting_table(results: Results) -> list[str]:
    def cells(kind: type[Limiter]) -> list[str]:
        return [
            _shown(_fraction, results.median("waiting", kind, PACED_PROCESSES, "cores")),
            _shown(
                "{:,.1f}/s".format, results.median("waiting", kind, PACED_PROCESSES, "calls_per_s")
            ),
        ]

    return [
        f"**Cost of waiting, {PACED_PROCESSES} processes at {SLOW.per_second:,.0f}/s in all**",
        "",
        *_table(WAITING, ["CPU, in cores", "calls passed"], cells, results.missing),
    ]


def _bound() -> float:
    return PACE.burst + PACE.per_second * WINDOW_NS / 1e9


SECTIONS: dict[str, tuple[list[type[Limiter]], Callable[[Results], list[str]]]] = {
    "cpu": (BLOCKING, _cpu_tables),
    "asyncio": (ASYNCIO, _asyncio_table),
    "accuracy": (PACED, _accuracy_table),
    "fairness": (PACED, _fairness_table),
    "waiting": (WAITING, _waiting_table),
}
"""Who is in it, and its tables."""


def _goal_lines(results: Results, sections: Sequence[str]) -> list[str]:
    """Goal, seen, met or missed; what was not measured has no line."""
    rows: list[tuple[str, str, bool]] = []

    def goal(text: str, seen: list[float | None], show: Callable[[float], str], met: Any) -> None:
        values = [value for value in seen if value is not None]
        if values:
            rows.append((text, " / ".join(map(show, values)), all(map(met, values))))

    if "cpu" in sections:
        at = " / ".join(map(str, CPU_PROCESSES)) + " processes"
        efficiency = [results.against(Floor, Ours, processes) for processes in CPU_PROCESSES]
        for least in (0.70, 0.85):
            goal(
                f"floor / ours, CPU, {at}: at least {least:.2f}",
                efficiency,
                "{:.2f}".format,
                least.__le__,
            )
        for kind, times in (
            (Pyrate, 35),
            (FastenersGcra, 5),
            (LimitsRedis, 12),
            (FilelockGcra, 15),
        ):
            goal(
                f"{kind.label} / ours, CPU, {at}: at least {times}x",
                [results.against(kind, Ours, processes) for processes in CPU_PROCESSES],
                _times,
                float(times).__le__,
            )
    if "asyncio" in sections:
        ours_us, theirs_us = (
            results.median("asyncio", kind, ASYNCIO_PROCESSES, "cpu_us")
            for kind in (Ours, FilelockAsyncNoThread)
        )
        goal("asyncio, CPU per acquire: at most 2 µs", [ours_us], _microseconds, (2.0).__ge__)
        times_better = _ratio(theirs_us, ours_us)
        goal(
            f"{FilelockAsyncNoThread.label} / ours: at least 40x",
            [times_better],
            _times,
            (40.0).__le__,
        )

    def paced(field: str) -> float | None:
        return results.median("paced", Ours, PACED_PROCESSES, field)

    if "accuracy" in sections:
        goal(
            f"steady rate: {PACE.per_second:,.0f}/s within 0.5 %",
            [paced("rate")],
            "{:,.1f}/s".format,
            lambda rate: abs(rate / PACE.per_second - 1) <= 0.005,
        )
        most = results.seen("paced", Ours, PACED_PROCESSES, "most_in_second")
        goal(
            f"most calls in any second of any round: at most {_bound():,.0f}",
            [max(most, default=None)],
            "{:,.0f}".format,
            _bound().__ge__,
        )
    if "fairness" in sections:
        goal(
            "calls of a process / mean: 0.95 to 1.10",
            [paced("least_of_mean"), paced("most_of_mean")],
            _fraction,
            lambda share: 0.95 <= share <= 1.10,
        )
    if "waiting" in sections:
        cores = results.median("waiting", Ours, PACED_PROCESSES, "cores")
        goal("waiting: at most 0.06 cores", [cores], _fraction, (0.06).__ge__)

    lines = ["| goal | seen | |", "| --- | ---: | --- |"]
    return lines + [
        f"| {text} | {seen} | {'met' if met else 'MISSED'} |" for text, seen, met in rows
    ]


def _version(kind: type[Limiter], missing: dict[str, str]) -> str:
    if kind.package is None or kind.label in missing:
        return ""
    return f" ({kind.package} {importlib.metadata.version(kind.package)})"


def _orders(sections: Sequence[str], quick: bool) -> Generator[Order]:
    """The measurements of one round; within each the limiters take turns."""
    loop_s, paced_s, waiting_s = (0.2, BURST_S + 2, 2.0) if quick else (1.0, BURST_S + 5, 5.0)
    if "cpu" in sections:
        for processes in CPU_PROCESSES:
            for kind in BLOCKING:
                yield Order(what="cpu", label=kind.label, processes=processes, seconds=loop_s)
    if "asyncio" in sections:
        for kind in ASYNCIO:
            yield Order(
                what="asyncio", label=kind.label, processes=ASYNCIO_PROCESSES, seconds=loop_s
            )
    if "accuracy" in sections or "fairness" in sections:
        for kind in PACED:
            yield Order(what="paced", label=kind.label, processes=PACED_PROCESSES, seconds=paced_s)
    if "waiting" in sections:
        for kind in WAITING:
            yield Order(
                what="waiting", label=kind.label, processes=PACED_PROCESSES, seconds=waiting_s
            )


def _report(results: Results, sections: Sequence[str], rounds: int) -> list[str]:
    """The whole output, as lines of markdown."""
    lines = [
        f"{os.cpu_count()} cores, Python {platform.python_version()}. Medians of {rounds} "
        "round(s), the limiters taking turns, each measurement in fresh processes. CPU is user + "
        "system of all workers. 'Ours better' is how many times less CPU ours takes; below 1x "
        "the other one is better.",
        "",
    ]
    for section in sections:
        lines += SECTIONS[section][1](results)
    kinds = dict.fromkeys(kind for section in sections for kind in SECTIONS[section][0])
    lines += [f"- {kind.label}{_version(kind, results.missing)}: {kind.note}." for kind in kinds]
    return [*lines, "", *_goal_lines(results, sections)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="times each is measured (5)")
    parser.add_argument("--only", choices=SECTIONS, help="one section instead of all")
    parser.add_argument("--quick", action="store_true", help="one short round, to try the script")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        order, folder, port = arguments.child
        place = Place(folder=Path(folder), redis_port=int(port))
        return _child(Order(**json.loads(order)), place)

    sections = (arguments.only,) if arguments.only else tuple(SECTIONS)
    rounds = 1 if arguments.quick else arguments.rounds
    with tempfile.TemporaryDirectory() as name, _redis_server(Path(name)) as redis:
        results = Results(Path(name), redis)
        for number in range(1, rounds + 1):
            print(f"round {number} of {rounds}", file=sys.stderr)
            for order in _orders(sections, arguments.quick):
                results.measure(order)
    print("\n".join(_report(results, sections, rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
