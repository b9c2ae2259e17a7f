"""The Grafana dashboard and the Prometheus settings use only series that are really exported."""

import itertools
import json
import shutil
import tempfile
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import aiohttp
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from agent_loop.calls.limiter import limiter_metrics
from agent_loop.records.exposition import Exposition, series_of
from agent_loop.records.source_metrics import (
    eviction_metrics,
    loop_lag_metrics,
    source_metrics,
    validation_metrics,
)
from agent_loop.records.token_metrics import TokenSums, token_metrics
from agent_loop.records.trajectory_record import Call, StopReason, TrajectoryRecord, Turn
from agent_loop.turns.trajectory import Trajectory
from agent_loop.turns.turn_loop import Rollout
from rate_limit.file_limiter import FileRateLimiter
from rate_limit.ray_limiter import RayRateLimiter
from rate_limit.snapshot import Snapshot, SourceSnapshot
from tests.fakes.engine import trained_of
from tests.fakes.records import record
from tests.listening import listening
from tests.verl_mixed.views.dashboard import FOLDER, PANELS, Use, uses, variables, variables_used
from tool_server.app import app_runner, create_app
from tool_server.settings import ServerSettings

PROMETHEUS = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
SERVER, TRAINER, RAY = ("tool_", "limiter_", "process_"), ("ray_mixed_", "ray_verl_"), ("ray_",)

OF_VERL = (
    "actor/entropy",
    "actor/grad_norm",
    "actor/ppo_kl",
    "perf/throughput",
    "rollout_corr/rollout_is_mean",
    "timing_s/gen",
    "timing_s/step",
    "training/global_step",
)
OF_THE_TRAINER = ("mixed/ratio_error/max", "mixed/ratio_error/cumulative_max")
"""Both are in the metrics of every run: tests/e2e."""

Exported = Mapping[str, set[str]]
"""Name of a series -> its labels."""


def uses_of(prefixes: tuple[str, ...]) -> list[Use]:
    return [use for use in uses() if use.name.startswith(prefixes)]


def not_in(exported: Exported, wanted: list[Use]) -> list[str]:
    """Uses of a series that is not exported, or of a label that the series does not have."""
    return [
        f"{use.where}: {use.name} by {sorted(use.labels)}, exported: {exported.get(use.name)}"
        for use in wanted
        if not use.labels <= exported.get(use.name, frozenset())
    ]


def exported_in(scraped: str) -> dict[str, set[str]]:
    """Series of a scrape -> their labels, as Prometheus stores them."""
    found: dict[str, set[str]] = defaultdict(lambda: {"job", "instance"})
    for family in text_string_to_metric_families(scraped):
        for sample in family.samples:
            found[sample.name].update(sample.labels)
    return dict(found)


def trajectory(uid: str) -> TrajectoryRecord:
    rollout = Rollout(trajectory=Trajectory([1]), stop_reason=StopReason.ANSWERED, answer="4")
    rollout.trajectory.add_model_tokens([5, 6], [-0.5, -0.1])
    call = Call(turn=1, action="code", arguments="1 + 3", tool="calculate", status="ok", attempts=1)
    rollout.calls.append(call)
    rollout.turns.append(Turn(tokens=2, min_global_steps=0, max_global_steps=0))
    trained = trained_of(rollout, "math", uid)
    trained.loop_lag_s = 0.01
    return trained


def step_metrics() -> dict[str, float]:
    """The metrics of a step in which every kind of event happened."""
    tokens = TokenSums(
        key="a_0_0",
        source="math",
        tokens=2,
        advantage=2.0,
        strength=2.0,
        moving=2,
        entropy=1.0,
        kl=0.1,
    )
    limiter = Snapshot(
        per_minute=60.0,
        burst=1,
        granted=1,
        utilisation=0.1,
        penalties=0,
        rate_factor=1.0,
        paused_s=0.0,
        abandoned=0,
        sources={"math": SourceSnapshot(granted=1)},
    )
    return {
        **dict.fromkeys((*OF_VERL, *OF_THE_TRAINER), 1.0),
        **loop_lag_metrics([trajectory("a")]),
        **source_metrics([trajectory("a"), trajectory("b")]),
        **token_metrics([tokens]),
        **eviction_metrics([("math", "filtered")]),
        **validation_metrics([record("math")]),
        **limiter_metrics(limiter),
    }


@pytest.fixture
async def tool_server(tmp_path: Path) -> AsyncIterator[str]:
    """A tool server that has answered one request, and a limiter that has granted one call."""
    limited = tmp_path / "rate_limit.state"
    FileRateLimiter(limited, per_minute=60, burst=3).acquire(source="math")
    app = create_app(ServerSettings(port=0, limiter_path=limited))
    async with listening(app_runner(app)) as address:
        yield address


async def test_every_series_of_the_tool_server_is_in_its_metrics(tool_server: str):
    async with aiohttp.ClientSession(tool_server) as session:
        async with session.post("/calculate", json={"expression": "1 + 3"}) as answer:
            assert answer.status == 200
        async with session.get("/metrics") as answer:
            exported = exported_in(await answer.text())
    wanted = uses_of(SERVER)
    assert {use.name for use in wanted} >= {"tool_seconds_bucket", "limiter_waiting"}
    assert not_in(exported, wanted) == []


def test_every_series_of_the_trainer_is_one_that_a_step_exports():
    exported: dict[str, set[str]] = defaultdict(lambda: {"run"})
    for name in step_metrics():
        if series := series_of(name, ["math"]):
            exported[f"ray_{series.name}"] |= series.labels.keys()
    assert not_in(exported, uses_of(TRAINER)) == []


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[Path]:
    """RAY_TEMP_DIR of a running Ray."""
    from tests.fakes.real_ray import own_ray

    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # a short path: sockets lie in it
    with own_ray(
        1,
        include_dashboard=True,
        dashboard_port=0,
        object_store_memory=80_000_000,
        _temp_dir=str(folder),
    ):
        yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_prometheus_finds_every_series_of_ray_where_its_settings_say(ray_folder: Path):
    from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES

    (job,) = (job for job in PROMETHEUS["scrape_configs"] if job["job_name"] == "ray")
    (named,) = job["file_sd_configs"][0]["files"]
    targets = ray_folder / Path(named).name
    exposition = Exposition("trial", ["math"])
    limiter = RayRateLimiter("trial", per_minute=60, burst=3)
    of_gpus = {f"ray_{name}" for name in METRICS_GAUGES if "gpu" in name or "gram" in name}
    wanted = [use for use in uses_of(RAY) if use.name not in of_gpus]
    exported: dict[str, set[str]] = {}
    for _ in range(200):  # Ray publishes every ten seconds
        if not not_in(exported, wanted):
            break
        exposition.show(step_metrics())
        limiter.acquire(source="math")  # one a second
        for place in json.loads(targets.read_text())[0]["targets"] if targets.exists() else []:
            url = f"http://{place}/metrics"
            # it is listed before it listens
            with suppress(OSError, HTTPException), urllib.request.urlopen(url, timeout=30) as told:
                exported |= exported_in(told.read().decode())
    limiter.close()
    assert not_in(exported, wanted) == []


def test_every_query_is_promql_over_series_that_somebody_exports():
    strays = [use for use in uses() if not use.name.startswith((*SERVER, *RAY))]
    assert strays == []


def test_every_variable_that_is_used_is_defined_and_the_other_way_round():
    assert variables_used() == variables()


def test_panels_have_ids_of_their_own_and_words():
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    graphs = [panel for panel in PANELS if panel["type"] != "row"]
    assert all(panel["title"] and panel["description"] and panel["targets"] for panel in graphs)
    for panel in graphs:
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


def test_no_panel_lies_on_another_or_beyond_the_grid():
    seats: dict[tuple[int, int], str] = {}
    for panel in PANELS:
        at = panel["gridPos"]
        for x, y in itertools.product(range(at["w"]), range(at["h"])):
            seat = (at["x"] + x, at["y"] + y)
            assert seat[0] < 24 and seat not in seats, f"{panel['title']} on {seats.get(seat)}"
            seats[seat] = panel["title"]
