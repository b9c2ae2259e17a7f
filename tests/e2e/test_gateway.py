"""Agents behind the gateway on the real trainer: the tokens of the native loop, exact batches."""

import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from config.gateway import GATEWAY_LOOP
from tests.e2e.jobs import QUOTAS, ROOT, Job, finish, job_of, start
from tests.e2e.test_training import finish_over_kills
from tests.fakes.pinned_environment import cache_of, python_with
from tests.json_lines import read_lines
from verl_mixed.run.audit import audit_run, describe
from verl_mixed.run.compose import load_config
from verl_mixed.run.state import RunFolder

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.algorithm,
    pytest.mark.timeout(1500),
]

FORMS = {"taco": "tags", "nq": "native", "math": "native"}
AGENT = ROOT / "tests/fakes/agents_tools.py"
NATIVE = "tests.fakes.native_until_mistake.NativeUntilMistake"
SAME = ("prompt_ids", "response_ids", "response_mask", "log_probs", "reward", "advantage")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo whose model was taught native calls for a short time."""
    from verl_mixed.demo.model import prepare_demo
    from verl_mixed.demo.recipe import Recipe

    folder = tmp_path_factory.mktemp("demo") / "native"
    recipe = Recipe(
        traces=4000, min_steps=300, max_steps=300, floor=0.0, probe_prompts=2, forms=FORMS
    )
    prepare_demo(folder, 0, recipe=recipe, threads=1, progress=lambda line: None)
    return folder


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """The same sources, with the native loop and with a function behind the gateway."""
    done = {}
    for agent in ("native", "gateway"):
        work = tmp_path_factory.mktemp(agent)
        overrides = [
            *(f"mixed.sources.{name}.agent={agent}" for name in ("nq", "math")),
            *("mixed.sources.nq.tools=[search]", "mixed.sources.math.tools=[calculate]"),
            *("mixed.sources.nq.prompt={}", "mixed.sources.math.prompt={}"),
            f"agent_loops.gateway.function={AGENT}:solve",
            *(f"+agent_loops.native._target_={NATIVE}", "+agent_loops.native.topk=2"),
            # those of the laptop profile depend on the names of agents
            "data.max_response_length=160",
            "actor_rollout_ref.rollout.multi_turn.max_turn_length=40",
            "actor_rollout_ref.rollout.full_determinism=true",
            "ray_kwargs.ray_init.include_dashboard=false",
        ]
        job = job_of(agent, model, work, overrides, 1)
        finish(start(job.command, work, work / "out.txt"), work / "out.txt")
        done[agent] = job
    return done


def lines_of(job: Job) -> dict[Any, dict[str, Any]]:
    """(source, draw, session) -> line."""
    lines = read_lines(job.folder / "trajectories" / "1.jsonl")
    return {(line["source"], line["draw"], line["key"].split("_")[1]): line for line in lines}


def test_an_agent_behind_the_gateway_is_trained_as_the_native_loop_to_the_last_bit(
    runs: dict[str, Job],
):
    native, gateway = (lines_of(runs[agent]) for agent in ("native", "gateway"))
    assert native.keys() == gateway.keys()
    for key, line in native.items():
        other = gateway[key]
        assert other["fault"] is None and (other["rows"], other["cause"]) == (1, "")
        for name in SAME:
            assert other[name] == line[name], (key, name)
    assert sum(len(line["calls"]) for line in gateway.values() if line["source"] != "taco") > 9
    ours, theirs = (
        read_lines(runs[agent].folder / "metrics.jsonl")[-1]["metrics"]
        for agent in ("gateway", "native")
    )
    for name in ("actor/grad_norm", "actor/pg_loss", "actor/entropy"):
        assert ours[name] == theirs[name], name


def test_the_batch_is_exact_and_each_answer_is_trained_once(runs: dict[str, Job]):
    job = runs["gateway"]
    report = audit_run(RunFolder(job.folder), load_config(job.folder / "config.yaml"))
    assert report.ok, describe(report)


# --- a mixture of agents --------------------------------------------------------------------------

STEPS = 5
AGENTS = ROOT / "tests/fakes/agents"
SMOL = """
import sys

sys.path += {folders!r}
from nq_smolagents import solve
"""


@pytest.fixture(scope="module")
def mixture(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """taco by a loop of this project, nq by smolagents in a function, math by a shell script with
    curl in the sandbox; three processes are killed at three moments, and the command goes on."""
    pins = AGENTS / "requirements.txt"
    python = python_with(pins, cache_of([pins], "agents"))
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    work = tmp_path_factory.mktemp("mixture")
    work.chmod(0o755)
    # the trainer's own packages come first
    (work / "smol.py").write_text(SMOL.format(folders=[packages, str(AGENTS)]))
    overrides = [
        *("mixed.sources.nq.agent=smol", "mixed.sources.math.agent=gateway"),
        *("mixed.sources.nq.tools=[search]", "mixed.sources.math.tools=[calculate]"),
        *("mixed.sources.nq.prompt={}", "mixed.sources.math.prompt={}"),
        f"+agent_loops.smol._target_={GATEWAY_LOOP}",
        "+agent_loops.smol.function=smol.py:solve",
        "+agent_loops.smol.topk=2",
        *("+agent_loops.gateway.command='sh math.sh'", f"+agent_loops.gateway.cwd={AGENTS}"),
        "ray_kwargs.ray_init.include_dashboard=false",
    ]
    job = job_of("agents", model, work, overrides, STEPS)
    finish_over_kills(job)
    return job


@pytest.mark.agents
@pytest.mark.sandbox
def test_a_mixture_of_agents_is_exact_and_audited_over_kills(mixture: Job):
    trained = [line for line in mixture.ledger() if line.get("outcome") == "trained"]
    for step in range(1, STEPS + 1):
        assert Counter(line["source"] for line in trained if line["step"] == step) == QUOTAS
    report = audit_run(RunFolder(mixture.folder), load_config(mixture.folder / "config.yaml"))
    assert report.ok, describe(report)


@pytest.mark.agents
@pytest.mark.sandbox
def test_nothing_of_an_agent_is_left(mixture: Job):
    left = [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline"])
        if any("math.sh" in word for word in process.info.get("cmdline") or ())
    ]
    assert left == []


@pytest.mark.agents
@pytest.mark.sandbox
def test_the_agents_called_their_tools(mixture: Job):
    files = sorted((mixture.folder / "trajectories").glob("*.jsonl"))
    lines = [line for path in files for line in read_lines(path)]
    assert {line["fault"] for line in lines} == {None}
    called = Counter((line["source"], call["action"]) for line in lines for call in line["calls"])
    assert called["nq", "search"] > 9 and called["math", "calculate"] > 9
