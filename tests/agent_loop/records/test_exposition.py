"""The step's metrics as Prometheus reads them from a Ray node."""

import re
import urllib.request

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from agent_loop.records.exposition import Exposition, Series, series_of

SOURCES = ("taco", "nq", "openai/gsm8k", "openai")


@pytest.mark.parametrize(
    ("metric", "name", "labels"),
    [
        ("mixed/nq/reward/mean", "mixed_source_reward_mean", {"source": "nq"}),
        (
            "mixed/nq/tools/run code/latency_s/p95",
            "mixed_source_tools_latency_s_p95",
            {"source": "nq", "tool": "run code"},
        ),
        (
            "mixed/nq/reward_parts/f1",
            "mixed_source_reward_parts",
            {"source": "nq", "part": "f1"},
        ),
        ("mixed/nq/evicted/stale", "mixed_source_evicted", {"source": "nq", "outcome": "stale"}),
        (
            "mixed/nq/infra_errors/retrieve",
            "mixed_source_infra_errors",
            {"source": "nq", "tool": "retrieve"},
        ),
        ("mixed/openai/gsm8k/count", "mixed_source_count", {"source": "openai/gsm8k"}),
        ("mixed/openai/pass_rate", "mixed_source_pass_rate", {"source": "openai"}),
        ("mixed/tools/code/calls", "mixed_tools_calls", {"tool": "code"}),
        ("mixed/ratio_error/max", "mixed_ratio_error_max", {}),
        ("mixed/limiter/granted", "mixed_limiter_granted", {}),
        ("timing_s/gen", "mixed_timing_s", {"phase": "gen"}),
        ("actor/grad_norm", "verl_actor_grad_norm", {}),
    ],
)
def test_what_a_name_varies_over_is_a_label(metric: str, name: str, labels: dict[str, str]):
    assert series_of(metric, SOURCES) == Series(name, labels)


@pytest.mark.parametrize("metric", ["val-core/nq/acc/mean@1", "mixed", "other", ""])
def test_other_names_are_not_exported(metric: str):
    assert series_of(metric, SOURCES) is None


@given(st.lists(st.text(st.characters(exclude_characters="/"), min_size=1), min_size=1, max_size=5))
def test_every_name_is_one_that_prometheus_takes(parts: list[str]):
    series = series_of("/".join(["mixed", *parts]), SOURCES)
    assert series is not None
    assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", series.name)
    assert all(re.fullmatch(r"[a-z]+", label) for label in series.labels)


def exported(url: str) -> dict[tuple[str, str], float]:
    """(name, source or phase) -> value, of what is ours."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, sample.labels.get("source") or sample.labels.get("phase", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("run") == "demo"
    }


@pytest.mark.ray
@pytest.mark.slow
def test_a_node_exports_the_last_step_until_the_next_and_a_gap_for_what_it_lacks():
    import ray
    from ray.util.metrics import Gauge

    from tests.fakes.real_ray import shut_down

    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        _system_config={"metrics_report_interval_ms": 1000},
    )
    try:
        node = ray.nodes()[0]
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        reward = "ray_mixed_source_reward_mean"
        exposition = Exposition("demo", ["taco", "nq"])
        exposition.show({"mixed/taco/reward/mean": 0.25, "mixed/nq/reward/mean": 0.5})
        while exported(url).get((reward, "nq")) != 0.5:
            pass
        exposition.show({"mixed/taco/reward/mean": 0.75, "timing_s/gen": 3.0})
        while (now := exported(url)).get((reward, "taco")) != 0.75:
            pass
        assert (reward, "nq") not in now
        assert now["ray_mixed_timing_s", "gen"] == 3
        once = Gauge("once", "Ray forgets it, which tells the time.", ("run",))
        once.set(1.0, {"run": "demo"})
        while ("ray_once", "") not in exported(url):
            pass
        while ("ray_once", "") in (now := exported(url)):
            pass
        assert now[reward, "taco"] == 0.75
        exposition.close()
    finally:
        shut_down()
