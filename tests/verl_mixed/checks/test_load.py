"""What a step asks of engines, agent loop workers and TransferQueue, by hand."""

from typing import Any

import pytest

from config.lookup import at
from verl_mixed.checks.config.load import (
    MOST_PER_WORKER,
    WORKERS_KEY,
    load_warnings,
    loop_workers,
    rate_warnings,
    step_load,
    worker_problems,
)
from verl_mixed.checks.config.numbers import number_problems

ROLLOUT = "actor_rollout_ref.rollout"


def config_of(**changes: Any) -> dict[str, Any]:
    """A resolved config of 8 GPUs; `__` stands for a dot."""
    keys = {
        "data.train_batch_size": 256,
        "data.max_prompt_length": 1000,
        "data.max_response_length": 8000,
        f"{ROLLOUT}.n": 8,
        f"{ROLLOUT}.nnodes": 0,
        f"{ROLLOUT}.n_gpus_per_node": 8,
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"{ROLLOUT}.max_num_seqs": 200,
        f"{ROLLOUT}.agent.num_workers": None,
        f"{ROLLOUT}.multi_turn.max_assistant_turns": 4,
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 8,
        "trainer.v1.trainer_mode": "mixed_sync",
        "trainer.v1.colocate_async.num_warmup_batches": 1,
        "trainer.v1.separate_async.num_warmup_batches": 2,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 8,
        "transfer_queue.backend.SimpleStorage.total_storage_size": None,
    }
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    config: dict[str, Any] = {}
    for key, value in keys.items():
        *path, last = key.split(".")
        section = config
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return config


SIZES = ("data__train_batch_size", f"{ROLLOUT}.n", "trainer__nnodes", "trainer__v1__trainer_mode")


@pytest.mark.parametrize(
    ("batch", "n", "nodes", "mode", "workers"),
    [
        (20, 8, 1, "mixed_sync", 8),  # verl's default
        (1024, 16, 1, "mixed_sync", 8),  # exactly 2,048 each
        (1025, 16, 1, "mixed_sync", 9),
        (1024, 16, 1, "mixed_colocate_async", 16),  # a batch ahead
        (1024, 16, 1, "mixed_separate_async", 24),  # two ahead
        (256, 8, 64, "mixed_sync", 64),  # one a node
        (256, 8, 30, "mixed_separate_async", 32),  # nodes that only generate count too
        (0, 8, 1, "mixed_sync", None),
    ],
)
def test_workers_follow_nodes_and_trajectories_at_once(
    batch: int, n: int, nodes: int, mode: str, workers: int | None
) -> None:
    config = config_of(**dict(zip(SIZES, (batch, n, nodes, mode), strict=True)))
    at(config, ROLLOUT)["nnodes"] = 2
    assert loop_workers(config) == workers
    if workers is not None:
        load = step_load(config)
        assert load is not None and load.per_worker <= MOST_PER_WORKER


def test_a_number_of_workers_is_used_as_it_is_and_named_where_it_is_too_small() -> None:
    config = config_of(data__train_batch_size=1024, **{WORKERS_KEY: 3})
    assert loop_workers(config) == 3
    (found,) = load_warnings(config)
    assert found.status == "warning"
    assert found.words.startswith(f"{WORKERS_KEY}=3: up to 2,731 trajectories at once in each")
    assert found.remedy == "set it to null, or to 4 or more"
    assert [*load_warnings(config_of(data__train_batch_size=1024))] == []
    (problem,) = [p for p in number_problems(config_of(**{WORKERS_KEY: 0})) if WORKERS_KEY in p]
    assert problem.startswith(f"{WORKERS_KEY}=0: want a whole number >= 1, or null")
    assert loop_workers(config_of(**{WORKERS_KEY: 0})) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # 2,048 trajectories: 1000 + 4000 tokens, rows of 24 kB + 288 kB, 1,000 tokens a turn
        (
            {},
            {
                "trajectories": 2048,
                "tokens": 2048 * 5000,
                "row_bytes": 312_000,
                "per_worker": 256,
                "engines": 8,
                "turns_per_s": 8 * 200 / 20,  # engines decode 1,600; a turn takes 20 s
                "worker_load": 10 * 0.003,  # 2 ms and 1 us for each of 1,000 tokens
                "passes": 2,
            },
        ),
        (
            {f"{ROLLOUT}.tensor_model_parallel_size": 4, f"{ROLLOUT}.max_num_seqs": 2000},
            {"engines": 2, "turns_per_s": 2048 / 20},
        ),
        (
            # two workers have 1,000 requests each open at an engine that could decode 2,001
            {
                f"{ROLLOUT}.tensor_model_parallel_size": 8,
                f"{ROLLOUT}.max_num_seqs": 2001,
                WORKERS_KEY: 2,
            },
            {"engines": 1, "open_per_worker": 1000, "turns_per_s": 2000 / 20},
        ),
        (
            {"trainer__v1__trainer_mode": "mixed_colocate_async"},
            {"trajectories": 2048, "per_worker": 512},
        ),
        (
            {
                "trainer__v1__trainer_mode": "mixed_separate_async",
                f"{ROLLOUT}.nnodes": 3,
                f"{ROLLOUT}.tensor_model_parallel_size": 2,
            },
            {"engines": 12, "per_worker": 768},
        ),
        ({"algorithm__rollout_correction__bypass_mode": True}, {"passes": 1}),
        ({"algorithm__use_kl_in_reward": True}, {"passes": 3}),
    ],
)
def test_the_estimate_of_a_step(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    load = step_load(config_of(**changes))
    assert load is not None
    for name, value in expected.items():
        found = getattr(load, name)
        assert (found() if callable(found) else found) == pytest.approx(value), name


def test_the_estimate_says_what_it_assumes_in_few_lines() -> None:
    load = step_load(config_of())
    assert load is not None
    lines = list(load.lines())
    assert len(lines) <= 10
    assert lines[0] == ("a step: 256 prompts x 8 = 2,048 trajectories, 10.2M tokens, at most 18.4M")
    assert lines[2] == (
        "engines: 8, for 256 trajectories each; an engine takes 984 requests at once (123 from "
        "each agent loop worker, where the others wait) and decodes 200 of them (max_num_seqs); "
        "80.0 turns a second in all"
    )
    assert lines[3] == (
        "agent loop workers: 8, for 256 trajectories each (an event loop serves 2,048); 10.0 turns "
        "a second each, 3.0% of a core"
    )
    assert lines[4].endswith("no limit; 639 MB of memory, at most 1.2 GB")
    assert lines[5].startswith("through TransferQueue: 1.9 GB a step, at most 3.7 GB")
    assert lines[-1].startswith("assumed: ") and "50%" in lines[-1]


@pytest.mark.parametrize(
    ("workers", "max_num_seqs", "most"), [(984, 256, None), (985, 256, 984), (1025, 1024, 1024)]
)
def test_more_workers_than_a_server_has_slots_for_are_a_problem(
    workers: int, max_num_seqs: int, most: int | None
) -> None:
    changes = {WORKERS_KEY: workers, f"{ROLLOUT}.max_num_seqs": max_num_seqs}
    found = [*worker_problems(config_of(**changes))]
    assert len(found) == (most is not None)
    for problem in found:
        assert problem.startswith(f"{WORKERS_KEY}={workers}: a rollout server takes {most} ")
        assert problem.endswith(f"; set it to {most} or less")
    assert [*worker_problems(config_of(**{**changes, f"{ROLLOUT}.max_num_seqs": None}))] == []
    assert [*worker_problems(config_of(**{**changes, WORKERS_KEY: "many"}))] == []


@pytest.mark.parametrize("key", ["data__max_prompt_length", f"{ROLLOUT}.max_num_seqs"])
def test_a_wrong_number_has_no_estimate(key: str) -> None:
    assert step_load(config_of(**{key: "many"})) is None


@pytest.mark.parametrize(
    ("per_minute", "interval_s", "more", "said"),
    [
        (6000, 0.0, {}, None),
        (12_000, 0.005, {}, None),
        (60_000, 0.005, {"enable_global_rate_limit": False}, None),
        (60_000, 0.005, {}, ("=60000 ", "0.005 s", "12,000 a", "INTERVAL=0.001 ", "MINUTE=12000")),
        (7000, 0.009, {}, ("=7000 ", "6,666.67 a", "INTERVAL=0.00857 ", "MINUTE=6660")),
    ],
)
def test_a_rate_that_the_interval_cannot_reach_is_said_with_both_figures(
    per_minute: float, interval_s: float, more: dict[str, Any], said: tuple[str, ...] | None
) -> None:
    tools = {"server_url": "http://a", "request_interval": interval_s, **more}
    mixed = {"sources": {"a": {"ratio": 1}}, "experiment": "x", "run_dir": "/x"}
    config = {"mixed": mixed, "actor_rollout_ref": {"rollout": {"multi_turn": {}}}}
    at(config, f"{ROLLOUT}.multi_turn")["tool_config"] = {
        **tools,
        "rate_limit_per_minute": per_minute,
    }
    found = [f"{each.words}; {each.remedy}" for each in rate_warnings(config)]
    assert len(found) == (said is not None)
    assert [words for words in said or () if words not in found[0]] == []
