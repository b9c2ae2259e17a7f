"""A rate limit for all processes of a Ray cluster: a named actor leases slots
(`rate_limit.leases`).

Each process talks to the actor from one separate thread, so that neither other threads nor event
loops wait for Ray. A caller takes a leased slot; or it sleeps until its slot is known, and then
until the slot. Requests that arrive meanwhile are sent together.

If the actor is killed or its node is lost, Ray starts it again, or the next process that asks makes
another one. The new actor finds in the cluster's store that it is not the first, and starts with an
empty bucket. Waiting callers ask again, in the same order within their process. If a process is
killed, its slots expire, and its callers lose their places after `leases.SILENCE_NS`.

The limiter does not promise the instant of a call: a process that wakes late passes late. It does
not promise the complete burst at once, because up to half of it is reserved for slots that are used
late. It does not promise that a pause (`penalise`) starts at once: callers that have a slot, at
most `leases.HORIZON_NS` ahead, still pass.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

from rate_limit.gcra import SECOND_NS, YEAR_NS, LimiterTimeout, Rate, pause_ns
from rate_limit.lease_pool import Caller, LeasePool
from rate_limit.leases import Answer, Ask, Keeper, Limits
from rate_limit.queues import Place, TaskPlace, ThreadPlace
from rate_limit.snapshot import Snapshot
from rate_limit.state_file import boottime_ns
from rate_limit.waiting import RateLimiter

_log = logging.getLogger(__name__)

NAMESPACE = "verl-mixed"

_LISTEN_S = 1.0  # longest time until the actor answers
_REPORT_S = 1.0  # longest time until calls that used a lease are reported
_GRACE_S = 2.0  # time after its timeout that a caller waits for the actor's refusal
_CONNECT_S = 60.0
_RETRY_S = 0.1


class RayRateLimiter(RateLimiter):
    """A rate limit that all processes of the Ray cluster with the same `name` share.

    It is safe with threads, in asyncio, and when pickled to other processes of the cluster. The
    slot of a cancelled caller goes to the next caller of this process, if one comes in time.

    Args:
        name: name of the limit.
        per_minute, burst, min_interval_s: as in `Rate`.
        adaptive: many overloads (`penalise`) halve the rate, which then recovers.
        shares: source -> weight of its share of the rate, as in `Rate`; None for first come, first
            served.

    Raises:
        ValueError: a limit is out of range, or the name belongs to other limits.
        RuntimeError: Ray is not initialised, or the actor does not answer.
    """

    def __init__(
        self,
        name: str,
        per_minute: float,
        burst: int = 1,
        min_interval_s: float = 0.0,
        *,
        adaptive: bool = False,
        shares: Mapping[str, float] | None = None,
    ):
        rate = Rate(
            per_minute=per_minute, burst=burst, min_interval_s=min_interval_s, shares=shares
        )
        self.__setstate__((name, Limits(rate, adaptive)))
        self._actor = _connect(name, self._limits)

    def __getstate__(self) -> tuple[str, Limits]:
        return self.name, self._limits

    def __setstate__(self, state: tuple[str, Limits]) -> None:
        self.name: str = state[0]
        self._limits: Limits = state[1]
        self._lock = threading.Lock()
        self._pool = LeasePool(self.name, self._limits.rate)
        self._agent: _Agent | None = None
        self._actor: Any = None  # connected at the first call, which must not be in an event loop

    @property
    def rate(self) -> Rate:
        return self._limits.rate

    def acquire(self, n: int = 1, timeout_s: float | None = None, source: str = "") -> float:
        """As `RateLimiter.acquire`; returns 0.0 if there was a leased slot.

        Raises:
            LimiterTimeout: also if the actor does not answer in time.
            ValueError: also if the name now belongs to other limits.
        """
        if self._pass_now(n, source):
            return 0.0
        place = ThreadPlace()
        caller = self._enter(n, timeout_s, source, place)
        try:
            place.wait(_patience_s(timeout_s))
            while (left_s := self._left_s(caller)) > 0:
                time.sleep(left_s)
        except BaseException:
            self._leave(caller)
            raise
        return self._passed(caller)

    async def acquire_async(
        self, n: int = 1, timeout_s: float | None = None, source: str = ""
    ) -> float:
        if self._pass_now(n, source):
            return 0.0
        place = TaskPlace()
        caller = self._enter(n, timeout_s, source, place)
        try:
            await place.wait(_patience_s(timeout_s))
            while (left_s := self._left_s(caller)) > 0:  # noqa: ASYNC110 (a sleep may end early)
                await asyncio.sleep(left_s)
        except BaseException:
            self._leave(caller)
            raise
        return self._passed(caller)

    def penalise(self, retry_after_s: float = 0.0) -> None:
        """`FileRateLimiter.penalise`."""
        self._call("penalise", pause_ns(retry_after_s)).result()

    async def penalise_async(self, retry_after_s: float = 0.0) -> None:
        await asyncio.wrap_future(self._call("penalise", pause_ns(retry_after_s)))

    def snapshot(self) -> Snapshot:
        """The counts of all processes; those of other processes are up to a second old."""
        return self._call("snapshot").result()

    def close(self) -> None:
        """Report the counts and end the thread; waiting callers fail, and the next call starts
        again."""
        with self._lock:
            agent, self._agent = self._agent, None
        if agent is not None:
            agent.stop()

    def _pass_now(self, n: int, source: str) -> bool:
        pool = self._pool
        with self._lock:
            if not pool.pass_now(n, source, boottime_ns()):
                return False
            if pool.is_low(source):
                self._wake_agent()
        return True

    def _enter(self, n: int, timeout_s: float | None, source: str, place: Place) -> Caller:
        if n < 1 or self.rate.for_calls_ns(n) > YEAR_NS:
            raise ValueError(
                f"cannot acquire n={n} from limiter {self.name!r}: n must be at least 1, and pass "
                "within a year at this rate"
            )
        now_ns = boottime_ns()
        caller = Caller(n, source, now_ns, timeout_s, place.call)
        with self._lock:
            self._pool.enter(caller, now_ns)
            if self._pool.must_ask:
                self._wake_agent()
        return caller

    def _left_s(self, caller: Caller) -> float:
        """Seconds until a caller's slot, after it was woken."""
        if caller.error is not None:
            raise caller.error
        if caller.slot is None:
            waited_s = (boottime_ns() - caller.entered_ns) / SECOND_NS
            raise LimiterTimeout(
                f"no answer from the actor of limiter {self.name!r} in {waited_s:.1f} s: it is "
                "dead, starting or unreachable; look for it with `ray list actors`"
            )
        return (caller.slot.from_ns - boottime_ns()) / SECOND_NS

    def _leave(self, caller: Caller) -> None:
        with self._lock:
            if caller.error is not None:
                self._pool.refused(caller)
            else:
                self._pool.leave(caller, boottime_ns())
            if self._pool.must_ask or self._pool.must_report:
                self._wake_agent()

    def _passed(self, caller: Caller) -> float:
        with self._lock:
            return self._pool.passed(caller, boottime_ns())

    def _wake_agent(self) -> "_Agent":
        """Under the lock."""
        agent = self._agent
        if agent is None:
            agent = self._agent = _Agent(
                self.name, self._limits, self._lock, self._pool, self._actor
            )
        agent.wake()
        return agent

    def _call(self, method: str, *args: object) -> "concurrent.futures.Future[Any]":
        with self._lock:
            agent = self._wake_agent()
        return agent.call(method, *args)


class _Agent:
    """The thread of a process that talks to the actor, with its own event loop."""

    def __init__(
        self, name: str, limits: Limits, lock: threading.Lock, pool: LeasePool, actor: Any
    ):
        self._name, self._limits = name, limits
        self._lock, self._pool, self._actor = lock, pool, actor
        self._process = uuid.uuid4().hex
        self._work, self._listening = asyncio.Event(), asyncio.Event()
        self._asking = asyncio.Lock()
        self._woken = False
        self._stopping = False
        self._asks = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name=f"rate-limit:{name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread, because there is a request or a report. The lock must be held."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._work.set)

    def call(self, method: str, *args: object) -> "concurrent.futures.Future[Any]":
        """Call a method of the actor, after reporting the counts of this process."""
        return asyncio.run_coroutine_threadsafe(self._call(method, *args), self._loop)

    def stop(self) -> None:
        """Send the last report and end."""
        with self._lock:
            self._stopping = True
            self.wake()
        self._thread.join()

    async def _call(self, method: str, *args: object) -> Any:
        from ray.exceptions import RayActorError

        while True:
            await self._exchange()
            actor = self._reach()
            try:
                return await getattr(actor, method).remote(*args)
            except RayActorError as error:
                await self._lost(actor, error)

    def _live(self) -> None:
        try:
            self._loop.run_until_complete(self._run())
        finally:
            self._loop.close()

    async def _run(self) -> None:
        listener = asyncio.ensure_future(self._listen())
        while not self._stopping:
            with self._lock:
                timeout_s = _REPORT_S if self._pool.must_report else None
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._work.wait(), timeout_s)
            self._work.clear()
            with contextlib.suppress(Exception):  # the waiting callers raise it
                await self._exchange()
        with contextlib.suppress(Exception):  # the last counts are not reported
            await self._exchange()
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)
        with self._lock:
            self._pool.fail(
                RuntimeError(f"limiter {self._name!r} was closed while a caller waited")
            )

    async def _exchange(self) -> None:
        """Send the requests of this process to the actor."""
        from ray.exceptions import RayActorError

        async with self._asking:
            try:
                actor = self._reach()
                with self._lock:
                    self._woken = False
                    self._asks += 1
                    asked_ns = boottime_ns()
                    ask = self._pool.ask(asked_ns)
                answer = await actor.ask.remote(self._process, ask)
            except RayActorError as error:
                await self._lost(self._actor, error)
                return
            except Exception as error:
                self._actor = None
                with self._lock:
                    self._woken = False
                    self._pool.fail(error)
                raise
            with self._lock:
                self._pool.served(answer, asked_ns, boottime_ns())
                if self._pool.must_ask:
                    self.wake()
        self._listening.set()

    async def _listen(self) -> None:
        """Fetch the actor's answers to requests that were not served at once."""
        from ray.exceptions import RayError

        while True:
            await self._listening.wait()
            with self._lock:
                actor, asks = self._actor, self._asks
                if actor is None or not self._pool.must_listen:
                    self._listening.clear()
                    continue
            asked_ns = boottime_ns()
            try:
                answer = await actor.collect.remote(self._process)
            except RayError as error:
                await self._lost(actor, error)
                continue
            with self._lock:
                if answer.known or asks == self._asks:
                    self._pool.hear(answer, asked_ns, boottime_ns())
                if self._pool.must_ask:
                    self.wake()

    def _reach(self) -> Any:
        """The actor; finding it first may block this thread's own loop."""
        if self._actor is None:
            self._actor = _connect(self._name, self._limits)
        return self._actor

    async def _lost(self, actor: Any, error: Exception) -> None:
        """Send the waiting requests to a new actor, because the actor died."""
        if actor is not None and actor is self._actor:
            cause = str(error).partition("\n")[0]
            _log.warning("limiter=%r actor=lost, asking its successor: %s", self._name, cause)
            self._actor = None
        await asyncio.sleep(_RETRY_S)
        with self._lock:
            self._pool.ask_again()
            self.wake()


class _KeeperActor:
    """The Ray actor that holds the `Keeper`, with timers."""

    def __init__(self, name: str, limits: Limits):
        self._keeper = Keeper(limits, boottime_ns(), fresh=_is_first(name))
        self._gauges = _Gauges(name)
        self._published_ns = 0
        self._news: dict[str, asyncio.Event] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def limits(self) -> Limits:
        return self._keeper.limits

    async def ask(self, process: str, ask: Ask) -> Answer:
        answer = self._keeper.ask(process, ask, boottime_ns())
        self._tell()
        return answer

    async def collect(self, process: str) -> Answer:
        """The answers for a process; waits until there is one."""
        asked_ns = boottime_ns()
        if process not in self._keeper.news:
            news = self._news[process] = asyncio.Event()
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(news.wait(), _LISTEN_S)
            if self._news.get(process) is news:
                del self._news[process]
        now_ns = boottime_ns()
        if now_ns - self._published_ns >= SECOND_NS:  # every process calls once a second
            self._published_ns = now_ns
            self._gauges.set(self._keeper.snapshot(now_ns))
        return self._keeper.answer(process, now_ns, held_ns=now_ns - asked_ns)

    async def penalise(self, pause_ns: int) -> None:
        self._keeper.penalise(pause_ns, boottime_ns())
        self._tell()

    async def snapshot(self) -> Snapshot:
        return self._keeper.snapshot(boottime_ns())

    def _advance(self) -> None:
        self._keeper.advance(boottime_ns())
        self._tell()

    def _tell(self) -> None:
        """Wake the processes that have answers, and set a timer for the others."""
        for process in self._keeper.news:
            if news := self._news.get(process):
                news.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._keeper.next_ns is not None:
            delay_s = (self._keeper.next_ns - boottime_ns()) / SECOND_NS
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._advance)


class _Gauges:
    """The limiter's metrics for Prometheus on each Ray node: `ray_limiter_*`.

    Ray adapter: `ray.util.metrics.Gauge`.
    """

    OF_ALL = ("granted", "utilisation", "penalties", "rate_factor", "paused_s", "abandoned")
    OF_A_SOURCE = ("granted", "waiting", "waited_s", "refused")

    def __init__(self, name: str):
        from ray.util.metrics import Gauge

        words = "of rate_limit.snapshot.Snapshot"
        self._tags = {"limiter": name}
        self._of_all = {
            field: Gauge(f"limiter_{field}", words, tag_keys=("limiter",)) for field in self.OF_ALL
        }
        self._of_a_source = {
            field: Gauge(f"limiter_source_{field}", words, tag_keys=("limiter", "source"))
            for field in self.OF_A_SOURCE
        }

    def set(self, snapshot: Snapshot) -> None:
        for field, gauge in self._of_all.items():
            gauge.set(getattr(snapshot, field), tags=self._tags)
        for name, source in snapshot.sources.items():
            for field, gauge in self._of_a_source.items():
                gauge.set(getattr(source, field), tags={**self._tags, "source": name or "(none)"})


def snapshot_of(name: str) -> Snapshot:
    """What the limiter with this name has done so far, in this process's Ray cluster.

    Raises:
        ValueError: there is no limiter with this name.
    """
    return _ray().get(_existing(name).snapshot.remote(), timeout=_CONNECT_S)


def names() -> list[str]:
    """Names of the limiters in this process's Ray cluster."""
    from ray.util import list_named_actors

    actors: Any = list_named_actors(all_namespaces=True)
    ours = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    prefix = _actor_name("")
    return [actor.removeprefix(prefix) for actor in ours if actor.startswith(prefix)]


def end(name: str) -> None:
    """End the limiter with this name, if there is one.

    The next process that needs it makes a new one with an empty bucket. Processes that use the old
    one continue with the new one, or get an error if its limits differ.
    """
    with contextlib.suppress(ValueError):
        _ray().kill(_existing(name))


def _existing(name: str) -> Any:
    try:
        return _ray().get_actor(_actor_name(name), namespace=NAMESPACE)
    except ValueError as error:
        raise ValueError(
            f"no limiter {name!r} in this Ray cluster; look for actors named rate-limit:* with "
            "`ray list actors`"
        ) from error


def _ray() -> Any:
    """Import Ray when it is needed; the package works without Ray."""
    import ray

    return ray


def _actor_name(name: str) -> str:
    return f"rate-limit:{name}"


def _is_first(name: str) -> bool:
    """Whether this is the first actor of this limit in the cluster; True only once."""
    from ray.experimental.internal_kv import _internal_kv_put  # pyright: ignore[reportPrivateUsage]

    key = f"{NAMESPACE}/rate-limit/{name}".encode()
    return not _internal_kv_put(key, b"made", overwrite=False)


def _connect(name: str, limits: Limits) -> Any:
    """The actor of a limit; it is created if there is none.

    Raises:
        RuntimeError: Ray is not initialised, or the actor does not answer.
        ValueError: the name belongs to other limits.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    if not ray.is_initialized():
        raise RuntimeError(
            f"cannot reach limiter {name!r}: Ray is not initialised in this process; call "
            "ray.init() first, or limit one host with FileRateLimiter"
        )
    kind: Any = ray.remote(_KeeperActor)
    options = kind.options(
        name=_actor_name(name),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=100_000,
    )
    deadline_s = time.monotonic() + _CONNECT_S
    while True:
        try:
            actor = options.remote(name, limits)
            theirs = ray.get(actor.limits.remote(), timeout=_CONNECT_S)
            break
        except (GetTimeoutError, RayActorError) as error:
            if time.monotonic() > deadline_s:
                raise RuntimeError(
                    f"no answer from the actor of limiter {name!r} in {_CONNECT_S} s: it cannot "
                    "start or be reached; look for it with `ray list actors`"
                ) from error
            time.sleep(_RETRY_S)
    if theirs != limits:
        raise ValueError(
            f"cannot limit by {limits}: limiter {name!r} of this cluster has {theirs}; use the "
            "same limits everywhere, or another name"
        )
    return actor


def _patience_s(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else timeout_s + _GRACE_S
