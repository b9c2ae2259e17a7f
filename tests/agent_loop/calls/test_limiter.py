"""Which limiter a run has, with which limits, and its numbers in metrics and Prometheus."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from ray.exceptions import GetTimeoutError, RayActorError

from agent_loop.calls import lock_probe
from agent_loop.calls.limiter import (
    limiter_metrics,
    make_limiter,
    metrics_now,
    rate_of,
    resolve_backend,
    state_path,
)
from agent_loop.calls.own_limits import open_own_limiters, own_name, own_state_path
from config.schema import MixedConfig, RateLimitConfig, SourceConfig, ToolConfig
from config.tool_entries import ToolEntry
from rate_limit.file_limiter import FileRateLimiter
from rate_limit.gcra import Rate
from tool_server import limiter_collector
from tool_server.limiter_collector import LimiterCollector


def tools_with(**values: Any) -> ToolConfig:
    return ToolConfig(server_url="http://127.0.0.1:9", **values)


def mixed_in(folder: Path, **limits: Any) -> MixedConfig:
    return MixedConfig(
        sources={"taco": SourceConfig(ratio=1), "nq": SourceConfig(ratio=1)},
        experiment="here",
        run_dir=str(folder),
        rate_limit=RateLimitConfig(**limits),
    )


def raising(error: Exception) -> Callable[..., Any]:
    def act(*_: object) -> Any:
        raise error

    return act


def test_the_knobs_are_those_of_the_tool_config(tmp_path: Path):
    tools = tools_with(rate_limit_per_minute=120, burst=7, request_interval=0.25)
    limiter = make_limiter(tools, mixed_in(tmp_path))
    assert limiter.rate == Rate(per_minute=120, burst=7, min_interval_s=0.25)


def test_a_strict_window_takes_the_burst_off_the_rate(tmp_path: Path):
    tools = tools_with(rate_limit_per_minute=600, burst=100)
    assert rate_of(tools, mixed_in(tmp_path, strict_window_s=60)).per_minute == 500
    with pytest.raises(ValueError, match="lower the burst"):
        rate_of(tools, mixed_in(tmp_path, strict_window_s=10))


def test_the_file_is_the_runs_own_or_the_one_that_runs_share(tmp_path: Path):
    assert make_limiter(tools_with(), mixed_in(tmp_path)).snapshot().burst == 100
    assert (tmp_path / "rate_limit.state").exists()
    shared = tools_with(rate_limit_file=str(tmp_path / "common"))
    make_limiter(shared, mixed_in(tmp_path / "a")).acquire()
    assert make_limiter(shared, mixed_in(tmp_path / "b")).snapshot().granted == 1


def test_another_run_with_other_limits_is_refused_or_followed(tmp_path: Path):
    file = str(tmp_path / "common")
    first = make_limiter(tools_with(rate_limit_file=file), mixed_in(tmp_path))
    other = tools_with(rate_limit_file=file, rate_limit_per_minute=60)
    with pytest.raises(ValueError, match="give every process the same limits"):
        make_limiter(other, mixed_in(tmp_path))
    make_limiter(other, mixed_in(tmp_path, on_config_change="adopt"))
    first.try_acquire()
    assert first.rate.per_minute == 60


@pytest.mark.parametrize(("shared", "change"), [(None, "adopt"), ("common", "refuse")])
def test_only_the_runs_own_file_takes_the_limits_of_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: str | None, change: str
):
    monkeypatch.setattr(lock_probe, "alive_nodes", lambda: {"id": "address"})
    mixed = mixed_in(tmp_path)
    settings = resolve_backend(tools_with(rate_limit_file=shared), mixed)
    assert (settings.backend, settings.on_config_change) == ("file", change)


def test_shares_and_adaptation_reach_the_limiter(tmp_path: Path):
    mixed = mixed_in(tmp_path, shares={"taco": 3, "nq": 1}, adaptive=True)
    limiter = make_limiter(tools_with(), mixed)
    assert isinstance(limiter, FileRateLimiter)
    assert limiter.rate.weights == (("", 1), ("nq", 1), ("taco", 3))
    assert limiter.adaptive


def test_metrics_are_of_all_and_of_each_source(tmp_path: Path):
    limiter = make_limiter(tools_with(rate_limit_per_minute=600), mixed_in(tmp_path))
    limiter.acquire(3, source="nq")
    limiter.penalise()
    metrics = limiter_metrics(limiter.snapshot())
    assert metrics == {
        "mixed/limiter/granted": 3,
        "mixed/limiter/waiting": 0,
        "mixed/limiter/waited_s": 0.0,
        "mixed/limiter/utilisation": 3 / 600,
        "mixed/limiter/penalties": 1,
        "mixed/limiter/rate_factor": 1.0,
        "mixed/limiter/abandoned": 0,
        "mixed/nq/limiter/granted": 3,
        "mixed/nq/limiter/waited_s": 0.0,
        "mixed/nq/limiter/refused": 0,
    }


@pytest.mark.parametrize("error", [OSError, ValueError, RuntimeError, RayActorError])
def test_a_limiter_that_cannot_be_read_has_no_metrics_and_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog, error: type[Exception]
):
    limiter = make_limiter(tools_with(), mixed_in(tmp_path))
    assert metrics_now(limiter) == limiter_metrics(limiter.snapshot())
    monkeypatch.setattr(limiter, "snapshot", raising(error()))
    assert metrics_now(limiter) == {}
    (record,) = caplog.records
    assert error.__name__ in record.getMessage()


def test_prometheus_sees_the_limiter_as_it_is_when_it_looks(tmp_path: Path):
    registry = prometheus_client.CollectorRegistry()
    registry.register(LimiterCollector(tmp_path / "rate_limit.state"))
    assert prometheus_client.generate_latest(registry) == b""
    limiter = make_limiter(tools_with(burst=2, rate_limit_per_minute=60_000), mixed_in(tmp_path))
    for _ in range(3):
        limiter.acquire(source="nq")
    limiter.snapshot()  # writes the counters; else those of the last 10 ms may not be in the file
    seen = prometheus_client.generate_latest(registry).decode()
    assert "limiter_granted_total 3.0" in seen
    assert 'limiter_calls_total{source="nq"} 3.0' in seen
    assert 'limiter_waiting{source="nq"} 0.0' in seen
    assert 'limiter_wait_seconds_bucket{le="+Inf",source="nq"} 3.0' in seen
    assert 'limiter_wait_seconds_count{source="nq"} 3.0' in seen
    assert "limiter_burst 2.0" in seen


def test_prometheus_goes_on_whatever_reading_a_limiter_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
):
    monkeypatch.setattr(limiter_collector, "snapshot_of", raising(KeyError("a bug")))
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(LimiterCollector(tmp_path / "rate_limit.state"))
    caplog.clear()
    assert prometheus_client.generate_latest(registry) == b""
    (record,) = caplog.records
    assert "KeyError: 'a bug'" in record.getMessage()


def test_prometheus_goes_on_without_a_limiter_that_cannot_be_read(tmp_path: Path, caplog):
    (tmp_path / "rate_limit.state").write_bytes(b"junk")
    registry = prometheus_client.CollectorRegistry()
    registry.register(LimiterCollector(tmp_path / "rate_limit.state"))
    assert prometheus_client.generate_latest(registry) == b""
    assert "rate_limit.state" in caplog.text


class FakeRay:
    """Nodes of which some are dead; calls are answered when `get` asks for the answer."""

    def __init__(self, nodes: dict[str, bool]):
        self._nodes = nodes
        self.waited_s = 0.0
        """The time that dead nodes took."""

        self.killed = 0

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": n, "NodeManagerAddress": n[0], "Alive": True} for n in self._nodes]

    def remote(self, kind: type) -> Any:
        def options(scheduling_strategy: Any, **_: object) -> Any:
            alive = self._nodes[scheduling_strategy.node_id]
            return SimpleNamespace(remote=lambda path: FakeProbe(kind(path), alive))

        return SimpleNamespace(options=options)

    def get(self, answer: Callable[[], Any] | None, timeout: float) -> Any:
        if answer is None:
            self.waited_s += timeout
            raise GetTimeoutError
        return answer()

    def wait(self, answers: list[Any], num_returns: int, timeout: float) -> None:
        there = [answer for answer in answers if answer is not None]
        for answer in there:
            answer()
        if len(there) < num_returns:
            self.waited_s += timeout

    def kill(self, probe: object) -> None:
        self.killed += 1


class FakeProbe:
    def __init__(self, probe: object, alive: bool):
        self._probe, self._alive = probe, alive

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._probe, name)
        answer = (lambda *values: lambda: method(*values)) if self._alive else lambda *_: None
        return SimpleNamespace(remote=answer)


def test_dead_nodes_are_named_and_the_probe_waits_for_none_of_them_to_tidy_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ray = FakeRay({56 * "a": False, 56 * "b": True, 56 * "c": False})
    monkeypatch.setattr(lock_probe, "ray", ray)
    problems = lock_probe.lock_problems(tmp_path)
    assert [problem.split(":")[0] for problem in problems] == ["node a", "node c"]
    assert ray.waited_s == 2 * lock_probe.TIMEOUT_S + lock_probe.LEAVE_TIMEOUT_S
    assert (list(tmp_path.iterdir()), ray.killed) == ([], 3)


# --- limits of single tools -----------------------------------------------------------------------

ENTRIES = [
    ToolEntry(tool="search", rate="6000/min"),
    ToolEntry(tool="run_code", slots=2),
    ToolEntry(tool="search", rate="6000/min", retry=1),
    ToolEntry(mcp="python -m server --port 1", rate="1/h"),
]


def test_each_tool_with_a_rate_has_one_limiter_beside_the_run_s(tmp_path: Path):
    tools, mixed = tools_with(), mixed_in(tmp_path)
    limiters = open_own_limiters(ENTRIES, tools, mixed)
    assert [*limiters] == [own_name("search"), own_name("python -m server --port 1")]
    assert [own.rate for own in limiters.values()] == [
        Rate(per_minute=6000, burst=1),
        Rate(per_minute=1 / 60, burst=1),
    ]
    folder = state_path(tools, mixed).with_suffix(".tools")
    for name, own in limiters.items():
        assert isinstance(own, FileRateLimiter) and own.path == folder / f"{name}.state"
        assert re.fullmatch(r"[\w-]+", name)


def test_targets_that_differ_in_a_sign_have_limits_of_their_own():
    names = {own_name(target) for target in ("a b", "a_b", "a-b", "x" * 60, "x" * 61)}
    assert len(names) == 5 and max(map(len, names)) <= 49


def test_a_start_ends_the_actors_of_the_one_before_for_each_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ended: list[str] = []
    monkeypatch.setattr("rate_limit.ray_limiter.end", ended.append)
    monkeypatch.setattr("agent_loop.calls.own_limits.own_limiter", lambda *_: None)
    tools = tools_with()
    for on_change in ("refuse", "adopt"):
        mixed = mixed_in(tmp_path, backend="ray", on_config_change=on_change)
        open_own_limiters(ENTRIES[:2], tools, mixed)
    assert ended == [str(own_state_path("search", tools, mixed_in(tmp_path)))]


def test_the_metrics_of_a_tool_s_limiter_have_its_name(tmp_path: Path):
    (limiter,) = open_own_limiters(ENTRIES[:1], tools_with(), mixed_in(tmp_path)).values()
    for _ in range(3):
        limiter.acquire(source="nq")
    snapshot = limiter.snapshot()
    found = metrics_now(limiter, "search-1")
    assert found == limiter_metrics(snapshot, "search-1")
    assert found["mixed/limiter/search-1/granted"] == 3.0
    assert found["mixed/limiter/search-1/utilisation"] == snapshot.utilisation
    assert {name.rpartition("/")[2] for name in found} == {
        "granted",
        "waiting",
        "waited_s",
        "utilisation",
    }
