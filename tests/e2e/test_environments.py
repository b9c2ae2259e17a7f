"""A mixture of tools, puzzles and games on the real trainer, over faults and kills."""

from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent_loop.records.mask_audit import audit_masks
from tests.e2e.jobs import ROOT, Job, job_of
from tests.e2e.test_training import finish_over_kills
from tests.fakes.pinned_environment import cache_of, python_beside, python_with
from tests.json_lines import read_lines
from verl_mixed.run.audit import audit_run, describe
from verl_mixed.run.compose import load_config
from verl_mixed.run.state import RunFolder

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.environments,
    pytest.mark.timeout(1500),
]

STEPS = 5
QUOTAS = {"taco": 2, "nq": 2, "math": 2, "sums": 2, "mastermind": 2, "risky": 2}
"""Of a batch of 12."""

WORLDS = ROOT / "tests/fakes/environments.py"
PUZZLES = ROOT / "tests/fakes/reasoning/requirements.txt"
GAMES = ROOT / "tests/fakes/environment_hubs/games.txt"
FAULTS = {
    "hangs": ("infra_error", "no answer from"),
    "crashes": ("infra_error", "its process ended with exit code 7"),
    "floods": ("infra_error", "the most is 1 MiB"),
    "lies": ("infra_error", "done='yes'"),
}


@pytest.fixture(scope="module")
def mixture(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Three processes are killed at three moments, and the command goes on."""
    python = python_beside(PUZZLES, cache_of([PUZZLES], "reasoning"))
    games = python_with(GAMES, cache_of([GAMES], "environments"))
    work = tmp_path_factory.mktemp("mixture")
    game = "{game: Mastermind-v0, code_length: 2, num_numbers: 3, max_turns: 3}"
    overrides = [
        "data.train_batch_size=12",
        *("data.max_prompt_length=384", "data.max_response_length=512"),
        "mixed.infra_error_limit=1",
        *(f"mixed.sources.{name}.ratio=1" for name in ("taco", "nq", "math")),
        "+mixed.sources.sums={ratio: 1, agent: math_agent, prompt: maths, kind: reasoning_gym}",
        "+mixed.sources.sums.kind_options={task: chain_sum, size: 60, val_size: 4}",
        "+mixed.sources.mastermind={ratio: 1, kind: seeds, max_turns: 3}",
        "+mixed.sources.mastermind.kind_options={size: 60, val_size: 4}",
        f"+mixed.sources.mastermind.environment={{use: textarena, options: {game}}}",
        f"+mixed.sources.mastermind.environment.python={games}",
        "+mixed.sources.risky={ratio: 1, kind: seeds}",
        "+mixed.sources.risky.kind_options={size: 60, val_size: 4}",
        f"+mixed.sources.risky.environment={{use: '{WORLDS}:Risky', timeout: 2}}",
        "ray_kwargs.ray_init.include_dashboard=false",
    ]
    job = job_of("worlds", demo, work, overrides, STEPS)
    job.command[0] = str(python)
    finish_over_kills(job)
    return job


def lines_of(job: Job) -> list[dict[str, Any]]:
    files = sorted((job.folder / "trajectories").glob("*.jsonl"))
    return [line for path in files for line in read_lines(path)]


def test_each_batch_is_exact_and_every_prompt_is_accounted_for(mixture: Job):
    trained = [line for line in mixture.ledger() if line.get("outcome") == "trained"]
    for step in range(1, STEPS + 1):
        assert Counter(line["source"] for line in trained if line["step"] == step) == QUOTAS
    report = audit_run(RunFolder(mixture.folder), load_config(mixture.folder / "config.yaml"))
    assert report.ok, describe(report)
    assert audit_masks(mixture.folder).problems == []


def test_each_fault_of_an_environment_is_typed_and_counted(mixture: Job):
    lines = lines_of(mixture)
    assert {line["source"] for line in lines if line["fault"]} <= {"risky"}
    risky = [line for line in lines if line["source"] == "risky"]
    assert {line["fault_tool"] for line in risky if line["fault"]} == {"Risky"}
    for line in risky:
        if line["fault"] is None:
            assert line["stop_reason"] == "answered" and line["reward"] == 0.5
        else:
            assert line["stop_reason"] == "infra_error" and not any(line["response_mask"])
            assert any(words in line["fault"] for _, words in FAULTS.values()), line["fault"]
    for line in read_lines(mixture.folder / "metrics.jsonl"):
        if line["step"] == 0:  # the validation before training
            continue
        rate = line["metrics"]["mixed/risky/infra_error_rate"]
        own = [each for each in risky if each["step"] == line["step"]]
        assert rate == pytest.approx(sum(each["fault"] is not None for each in own) / len(own))


def test_the_steps_of_a_game_and_their_rewards_are_in_the_trajectory(mixture: Job):
    played = [line for line in lines_of(mixture) if line["source"] == "mastermind"]
    assert played and all(line["calls"] for line in played)
    for line in played:
        rewards = [call["reward"] for call in line["calls"] if "reward" in call]
        assert line["reward"] == pytest.approx(sum(rewards))


def test_nothing_of_an_environment_is_left(mixture: Job):
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    left = [c for c in commands if any(w.endswith((":Risky", ":TextArenaGame")) for w in c)]
    assert left == []
