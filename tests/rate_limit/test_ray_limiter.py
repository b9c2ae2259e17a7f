"""The limiter between drivers, actors and threads of a real Ray, which are killed too."""

import asyncio
import concurrent.futures
import os
import pickle
import select
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Generator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rate_limit.gcra import LimiterTimeout
from rate_limit.ray_limiter import NAMESPACE, RayRateLimiter, end, names, snapshot_of
from rate_limit.snapshot import Snapshot
from rate_limit.state_file import boottime_ns

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
FAST: dict[str, Any] = {"per_minute": 60_000, "burst": 20}
SLOW: dict[str, Any] = {"per_minute": 1, "burst": 1}


class Worker:
    """A process of the cluster that calls."""

    def __init__(self, limiter: RayRateLimiter):
        self.limiter = limiter

    def pid(self) -> int:
        return os.getpid()

    def acquire(self, calls: int, timeout_s: float | None = None) -> int:
        for _ in range(calls):
            self.limiter.acquire(timeout_s=timeout_s)
        return calls

    def try_acquire(self) -> bool:
        return self.limiter.try_acquire()


@pytest.fixture(scope="module")
def cluster() -> Generator[str]:
    """A Ray of this file's own; its address."""
    from tests.fakes.real_ray import own_ray

    with own_ray(2) as address:
        yield address


@pytest.fixture
def make(cluster: str, request: pytest.FixtureRequest) -> Generator[Callable[..., RayRateLimiter]]:
    """Limiters named after the test; their actor ends with it."""
    import ray

    name = request.node.name
    made: list[RayRateLimiter] = []

    def limiter(**limits: Any) -> RayRateLimiter:
        made.append(RayRateLimiter(name, **limits))
        return made[-1]

    yield limiter
    for limiter_made in made:
        limiter_made.close()
    ray.kill(actor_of(made[0]))


def actor_of(limiter: RayRateLimiter) -> Any:
    import ray

    return ray.get_actor(f"rate-limit:{limiter.name}", namespace=NAMESPACE)


def workers(limiter: RayRateLimiter, number: int) -> list[Any]:
    import ray

    kind: Any = ray.remote(Worker)
    return [kind.options(num_cpus=0).remote(limiter) for _ in range(number)]


def until(holds: Callable[[Snapshot], bool], limiter: RayRateLimiter) -> Snapshot:
    """Ask until it holds."""
    while not holds(snapshot := limiter.snapshot()):
        pass
    return snapshot


def least_ns(limiter: RayRateLimiter, calls: int) -> int:
    """The shortest time in which so many calls may pass."""
    return limiter.rate.for_calls_ns(calls - limiter.rate.burst)


DRIVER = """
import sys
import urllib.request
import ray
from rate_limit.ray_limiter import RayRateLimiter
ray.init(address=sys.argv[1], log_to_driver=False)
limiter = RayRateLimiter(sys.argv[2], per_minute=float(sys.argv[3]), burst=20)
for _ in range(300):
    limiter.acquire()
limiter.close()
"""


def driver(address: str, name: str, per_minute: float) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, address, name, str(per_minute)],
        stderr=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )


def test_two_drivers_share_one_limit(cluster: str, make: Callable[..., RayRateLimiter]):
    limiter = make(**FAST)
    began_ns = boottime_ns()
    with driver(cluster, limiter.name, 60_000) as one, driver(cluster, limiter.name, 60_000) as two:
        for process in (one, two):
            _, errors = process.communicate()
            assert process.returncode == 0, errors
    assert boottime_ns() - began_ns >= least_ns(limiter, 600)
    assert limiter.snapshot().sources[""].granted == 600


async def test_entering_the_limiter_waits_for_one_call(make: Callable[..., RayRateLimiter]):
    limiter = make(**FAST)
    with limiter as waited_s:
        assert waited_s >= 0.0
    async with limiter as waited_s:
        assert waited_s >= 0.0
    assert limiter.snapshot().sources[""].granted == 2


def test_a_driver_with_other_limits_is_refused(cluster: str, make: Callable[..., RayRateLimiter]):
    limiter = make(**FAST)
    with driver(cluster, limiter.name, 7) as process:
        _, errors = process.communicate()
    assert process.returncode == 1
    assert "ValueError: cannot limit by per_minute=7.0 burst=20" in errors
    assert "has per_minute=60000.0 burst=20" in errors
    assert "use the same limits everywhere, or another name" in errors


def test_an_ended_limiter_is_made_anew_empty_and_with_other_limits(
    make: Callable[..., RayRateLimiter],
):
    first = make(per_minute=600, burst=5)
    first.acquire(source="nq")
    assert snapshot_of(first.name).granted == 1 and first.name in names()
    end(first.name)
    second = make(per_minute=6, burst=9)
    assert snapshot_of(second.name).burst == 9
    assert not second.try_acquire()
    end("never made")
    with pytest.raises(ValueError, match="no limiter 'never made'"):
        snapshot_of("never made")


def test_prometheus_finds_the_limiter_among_the_metrics_of_its_node(
    make: Callable[..., RayRateLimiter],
):
    import ray

    limiter = make(per_minute=60, burst=3)  # Ray publishes every ten seconds
    node = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    wanted = f'limiter="{limiter.name}"'
    while True:
        limiter.acquire(source="nq")
        with urllib.request.urlopen(url, timeout=30) as answer:
            lines = [line for line in answer.read().decode().splitlines() if wanted in line]
        if any('source="nq"' in line for line in lines):
            break
    assert any(line.startswith("ray_limiter_source_granted{") for line in lines)


def test_without_ray_the_error_says_what_to_do():
    program = "from rate_limit.ray_limiter import RayRateLimiter; RayRateLimiter('x', 60, 1)"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "RuntimeError: cannot reach limiter 'x': Ray is not initialised" in ran.stderr


@pytest.mark.parametrize("restarts", [True, False])
def test_when_the_actor_is_killed_everybody_goes_on_within_the_rate(
    make: Callable[..., RayRateLimiter], restarts: bool
):
    import ray

    began_ns = boottime_ns()
    limiter = make(**FAST)
    done = [worker.acquire.remote(700) for worker in workers(limiter, 2)]
    until(lambda snapshot: snapshot.granted >= 200, limiter)
    ray.kill(actor_of(limiter), no_restart=not restarts)
    limiter.acquire()
    assert ray.get(done) == [700, 700]
    assert boottime_ns() - began_ns >= least_ns(limiter, 1401)


@pytest.mark.parametrize("restarts", [True, False])
def test_the_bucket_of_an_actor_that_was_killed_is_empty(
    make: Callable[..., RayRateLimiter], restarts: bool, caplog: pytest.LogCaptureFixture
):
    import ray

    limiter = make(per_minute=1, burst=9)
    actor = actor_of(limiter)
    pid: Any = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    process = os.pidfd_open(pid)
    ray.kill(actor, no_restart=not restarts)
    select.select([process], [], [])  # until then it may still answer, from its own burst
    os.close(process)
    assert not limiter.try_acquire()
    assert limiter.snapshot().granted == 0
    assert len([record for record in caplog.records if "actor=lost" in record.message]) <= 1


def test_a_killed_worker_holds_up_nobody(make: Callable[..., RayRateLimiter]):
    import ray

    began_ns = boottime_ns()
    limiter = make(**FAST)
    doomed, other = workers(limiter, 2)
    ray.get(doomed.acquire.remote(200))  # it holds spare slots then, and waits for more
    pid: Any = ray.get(doomed.pid.remote())
    doomed.acquire.remote(10**6)
    os.kill(pid, signal.SIGKILL)
    assert ray.get(other.acquire.remote(500)) == 500
    assert boottime_ns() - began_ns >= least_ns(limiter, 700)


def test_the_places_of_a_killed_worker_are_given_up(make: Callable[..., RayRateLimiter]):
    import ray

    limiter = make(per_minute=30, burst=1)
    doomed, other = workers(limiter, 2)
    pid: Any = ray.get(doomed.pid.remote())
    doomed.acquire.options(name="waits").remote(3)
    until(lambda snapshot: snapshot.waiting == 1, limiter)
    os.kill(pid, signal.SIGKILL)
    assert ray.get(other.acquire.remote(1)) == 1


def test_a_pause_reaches_those_who_wait_in_other_processes(make: Callable[..., RayRateLimiter]):
    import ray

    limiter = make(per_minute=6, burst=1)
    (worker,) = workers(limiter, 1)
    waits = worker.acquire.remote(2, timeout_s=60.0)
    until(lambda snapshot: snapshot.waiting == 1, limiter)
    limiter.penalise(3600.0)
    with pytest.raises(LimiterTimeout, match=r"beyond timeout_s=60\.0"):
        ray.get(waits)
    assert ray.get(worker.try_acquire.remote()) is False
    snapshot = limiter.snapshot()
    assert 0 < snapshot.paused_s <= 3600
    assert snapshot.penalties == 1
    assert snapshot.sources[""].refused >= 1


def test_a_refused_call_consumes_nothing(make: Callable[..., RayRateLimiter]):
    limiter = make(**SLOW)
    assert limiter.acquire() >= 0
    for _ in range(20):
        with pytest.raises(LimiterTimeout, match="wait longer or raise the rate"):
            limiter.acquire(timeout_s=0.5)
        assert not limiter.try_acquire()
    snapshot = limiter.snapshot()
    assert (snapshot.granted, snapshot.sources[""].refused) == (1, 40)


def test_threads_share_the_rate(make: Callable[..., RayRateLimiter]):
    limiter = make(**FAST)
    began_ns = boottime_ns()
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        waits = list(threads.map(lambda _: limiter.acquire(), range(300)))
    assert boottime_ns() - began_ns >= least_ns(limiter, 300)
    assert min(waits) >= 0
    assert limiter.snapshot().sources[""].granted == 300


def test_event_loops_share_the_rate_and_go_on(make: Callable[..., RayRateLimiter]):
    limiter = make(**FAST)
    ticks = count()

    async def tick() -> None:
        while True:
            next(ticks)
            await asyncio.sleep(0.001)

    async def work() -> None:
        ticking = asyncio.ensure_future(tick())
        await asyncio.gather(*(limiter.acquire_async(source="loop") for _ in range(200)))
        ticking.cancel()

    began_ns = boottime_ns()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: asyncio.run(work()), range(2)))
    assert boottime_ns() - began_ns >= least_ns(limiter, 400)
    assert next(ticks) > 10
    assert limiter.snapshot().sources["loop"].granted == 400


async def test_a_cancelled_waiter_leaves_its_line(make: Callable[..., RayRateLimiter]):
    limiter = make(**SLOW)
    await limiter.acquire_async()
    waiting = asyncio.ensure_future(limiter.acquire_async())
    while (await asyncio.to_thread(limiter.snapshot)).waiting == 0:
        pass
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    while (await asyncio.to_thread(limiter.snapshot)).waiting:
        pass
    assert (await asyncio.to_thread(limiter.snapshot)).granted == 1


def test_a_pickled_limiter_is_the_same_limit(make: Callable[..., RayRateLimiter]):
    limiter = make(per_minute=1, burst=3, shares={"a": 2.0})
    again = pickle.loads(pickle.dumps(limiter))
    assert again.rate == limiter.rate
    assert again.try_acquire(2, source="a")  # half of the burst is for late slots
    assert not limiter.try_acquire(source="a")
    again.close()
    assert not again.try_acquire()  # it opens again
    again.close()


def test_closing_tells_those_who_wait(make: Callable[..., RayRateLimiter]):
    limiter = make(**SLOW)
    limiter.acquire()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        waits = threads.submit(limiter.acquire)
        until(lambda snapshot: snapshot.waiting == 1, limiter)
        limiter.close()
        with pytest.raises(RuntimeError, match="was closed while a caller waited"):
            waits.result()


def test_a_wrong_number_of_calls_is_refused(make: Callable[..., RayRateLimiter]):
    with pytest.raises(ValueError, match="n must be at least 1"):
        make(**SLOW).acquire(0)
