"""Each row of the table in docs/masks.md: how a trajectory ends, and what is trained of it."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")

import torch

from agent_loop.records.mask_audit import mask_problems
from agent_loop.records.source_metrics import source_metrics
from agent_loop.records.trajectory_record import TrajectoryRecord
from agent_loop.row import Row
from agent_loop.tool_actions import run_code
from agent_loop.training.advantage import compute_state_masked_grpo_advantage
from agent_loop.training.alarms import drift_problems, faults_by_group
from agent_loop.training.verl_adapters.engine_client import RecordingClient, turns_of_trajectory
from agent_loop.turn_agent_loop import judged_outputs
from agent_loop.turns.tags import Action
from agent_loop.turns.turn_loop import Generated, Observation, Rollout, Stop
from agent_loop.watchdog import Watchdog, waits_for
from config.schema import MixedConfig
from tests.agent_loop.rewards.test_judging import CODE_ROW, MIXED, SETTINGS, Tools
from tests.agent_loop.test_loop_worker import ROW as LOOP_ROW
from tests.agent_loop.test_loop_worker import Hanging, VerlsClient, worker_of
from tests.agent_loop.turns.test_deadlines import CODEC, after, raising, trajectory_of
from tests.fakes.engine import record_in
from tests.fakes.virtual_loop import run_virtual
from tool_server.wire.protocol import (
    ToolCall,
    ToolRejected,
    ToolResult,
    ToolTimeout,
    ToolUnavailable,
)

COUNTED = ("reward/mean", "truncated_rate", "deadline_rate", "infra_error_rate", "loop_error_rate")
ROW = CODE_ROW | {"data_source": "taco", "extra_info": {"row_id": "taco:1"}}
CODE, ANSWER = "<code>a</code>", "<answer>print(2)</answer>"


def table() -> dict[str, dict[str, str]]:
    """What happened -> the cells of its row in docs/masks.md."""
    text = (Path(__file__).parents[3] / "docs" / "masks.md").read_text()
    lines = text.split("## How a trajectory ends")[1].split("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    head, _, *body = rows
    return {row[0]: dict(zip(head, row, strict=True)) for row in body}


async def waiting(what: str, action: Action) -> Observation:
    waits_for(what)
    return await after()(action)


def answering(ids: list[int], stop_reason: str) -> Any:
    """An engine whose server gives this answer."""

    class Client:
        async def _acquire_server(self) -> None: ...

        async def generate(self, request_id: str, **_: Any) -> Any:
            return SimpleNamespace(
                token_ids=ids, log_probs=[-0.5], stop_reason=stop_reason, extra_fields={}
            )

    async def generate(prompt_ids: list[int], *, max_tokens: int, stop: Stop) -> Generated:
        await RecordingClient(Client()).generate("id", prompt_ids=prompt_ids)
        raise AssertionError("this is no answer")

    return generate


async def next_cell(action: Action) -> Observation:
    """A cell after others, in an interpreter that the tool server has started anew."""

    class Server:
        async def call(self, call: ToolCall) -> ToolResult:
            session = {"id": "s", "new": True, "ended_by_program": False}
            return ToolResult(body={"status": "Success", "run_result": {}, "session": session})

    return await run_code(Server(), action.content, "", "s", session_began=True)


async def silent(prompt_ids: list[int], *, max_tokens: int, stop: Stop) -> Generated:
    return await asyncio.Event().wait()  # pyright: ignore


def row_of(begins: str) -> dict[str, str]:
    return next(cells for what, cells in table().items() if what.startswith(begins))


def run(*turns: str, act: Any = None, engine: Any = None, **limits: Any) -> Awaitable[Rollout]:
    given = {} if engine is None else {"generate": engine}
    return trajectory_of(act or after(a=1), list(turns), limits=limits, **given)


DEAD = ToolUnavailable("no answer after 3 attempts", tool="search")
NO_TOOL = Tools()
Scenario = tuple[Callable[[], Awaitable[Rollout]], Tools, dict[str, Any]]
SCENARIOS: dict[str, list[Scenario]] = {
    "the model answered": [(lambda: run(ANSWER), NO_TOOL, {})],
    "a turn without an action and without an answer": [(lambda: run("well"), NO_TOOL, {})],
    "a malformed action, a call that the tool refused": [
        (lambda: run("</code>", ANSWER), NO_TOOL, {}),
        (lambda: run(CODE, ANSWER, act=raising(ToolRejected("no", tool="run_code"))), NO_TOOL, {}),
        (lambda: run(CODE, ANSWER), NO_TOOL, {}),
    ],
    "the turns were used up": [(lambda: run(CODE, max_turns=1), NO_TOOL, {})],
    "the tokens were used up": [(lambda: run("so " * 200), NO_TOOL, {})],
    "turns or tokens were used up, with": [
        (lambda: run(CODE, max_turns=1), NO_TOOL, {"on_truncated": "mask"})
    ],
    "a call failed after all retries": [(lambda: run(CODE, act=raising(DEAD)), NO_TOOL, {})],
    "a program had not ended after four times": [
        # tests/tool_server/test_sandbox.py: the server answers 500
        (lambda: run(CODE, act=raising(ToolUnavailable("500", tool="run_code"))), NO_TOOL, {})
    ],
    "the engine failed, aborted": [
        (lambda: run(engine=answering([1], "abort")), NO_TOOL, {}),
        (lambda: run(engine=answering([1], "aborted")), NO_TOOL, {}),
        (lambda: run(engine=answering([], "completed")), NO_TOOL, {}),
    ],
    "`trajectory_s` or `step_s` passed": [
        (lambda: run(engine=silent), NO_TOOL, {}),
        (lambda: run(engine=silent, timeout_name="step_s"), NO_TOOL, {}),
    ],
    "the same; the longest wait was for the limiter": [
        (lambda: run(CODE, act=lambda action: waiting("limiter", action)), NO_TOOL, {})
    ],
    "the same; the longest wait was for a tool server": [
        (lambda: run(CODE, act=lambda action: waiting("server", action)), NO_TOOL, {})
    ],
    "the same; the longest wait was for tools": [(lambda: run(CODE, act=after()), NO_TOOL, {})],
    "the same, before the first turn": [(lambda: run(CODE, timeout_s=0), NO_TOOL, {})],
    "the tool server ended the persistent interpreter": [
        (lambda: run(CODE, act=next_cell), NO_TOOL, {})
    ],
    "no verdict within `reward_s`": [(lambda: run(ANSWER), Tools(takes_s=1e6), {})],
    "the tool of the judge failed": [
        (lambda: run(ANSWER), Tools(ToolUnavailable("dead", tool="run_code")), {})
    ],
    "math-verify reached its limit": [
        # tests/agent_loop/rewards/test_rewards_math.py: the judge raises this
        (lambda: run(ANSWER), Tools(ToolTimeout("no verdict", tool="math_verify")), {})
    ],
    "the code of a loop or of a reward raised": [
        (lambda: run(CODE, act=raising(KeyError("k"))), NO_TOOL, {}),
        (lambda: run(ANSWER), Tools(KeyError("k")), {}),
    ],
}


def trained(output: Any, source: str, member: int = 0, reward: float = 0.0) -> TrajectoryRecord:
    """A trajectory as the trainer reads it, whole."""
    record = record_in(output.as_dict())
    record.key, record.source, record.row_id = f"u_{member}_0", source, f"{source}:1"
    record.reward = reward
    record.prompt_tokens, record.response_tokens = len(output.prompt_ids), len(output.response_ids)
    return record


def is_in_baseline(mask: list[int]) -> bool:
    """Whether the reward of a trajectory changes the advantages of the others of its group."""

    def of_others(reward: float) -> torch.Tensor:
        rows = [torch.tensor(each, dtype=torch.float32) for each in (mask, [1], [1])]
        masks = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        rewards = torch.zeros_like(masks)
        rewards[:, 0] = torch.tensor([reward, 0.0, 1.0])
        index = np.array(["u"] * 3)
        return compute_state_masked_grpo_advantage(rewards, masks, index)[0][1:]

    return not torch.equal(of_others(0.0), of_others(5.0))


def assert_is(said: dict[str, str], output: Any, source: str) -> None:
    """The cells of a row are what the output, the metrics and the audits say."""
    trajectory = trained(output, source)
    mask = output.response_mask
    assert said["stop reason"] == f"`{trajectory.stop_reason}`"
    assert said["mask"] == str(max(mask))
    assert said["baseline"] == ("in" if is_in_baseline(mask) else "out")
    metrics = source_metrics([trajectory])
    prefix = f"mixed/{source}/"
    short = {name.removeprefix(prefix): value for name, value in metrics.items()}
    counted = {name for name in COUNTED if name in short and (name == "reward/mean" or short[name])}
    counted |= {name for name in short if name.startswith("infra_errors/")}
    assert set(re.findall(r"`(.+?)`", said["counted as"])) == counted
    faults = [fault for group in faults_by_group([trajectory]) for fault in group.faults]
    assert bool(faults) == trajectory.is_lost == ("infra_errors/" in said["counted as"])
    parts = output.extra_fields["reward_extra_info"]
    assert bool(parts["infra_error"] or parts["loop_error"]) == trajectory.is_lost
    assert mask_problems(trajectory) == []
    assert drift_problems(trajectory, CODEC.decode) == []


def test_every_row_of_the_table_has_a_scenario():
    rows = list(table())
    assert len(rows) == len(SCENARIOS)
    for begins in SCENARIOS:
        assert sum(what.startswith(begins) for what in rows) == 1, begins


@pytest.mark.parametrize("begins", SCENARIOS)
def test_what_happens_to_a_trajectory_is_what_the_table_says(begins: str):
    said = row_of(begins)
    for make, tools, changed in SCENARIOS[begins]:
        mixed = MixedConfig.model_validate(MIXED | changed)

        async def judged(make: Any = make, tools: Any = tools, mixed: MixedConfig = mixed) -> Any:
            own = replace(SETTINGS, mixed=mixed)
            return (await judged_outputs([await make()], Row.from_columns(ROW), tools, own, 0))[0][
                1
            ]

        output, _ = run_virtual(judged())
        assert_is(said, output, "taco")


class SilentClient(VerlsClient):
    async def generate(self, *_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("client_of_verl", "begins"),
    [
        (VerlsClient, "the same; the longest wait was for tools, or in a loop of verl"),
        (SilentClient, "`trajectory_s` or `step_s` passed, in any loop"),
    ],
)
def test_a_loop_of_another_project_that_is_late_is_what_the_table_says(
    client_of_verl: type[VerlsClient], begins: str, monkeypatch: pytest.MonkeyPatch
):
    async def client(*_: Any) -> Any:
        return SimpleNamespace(for_source=lambda *_: None)

    async def late() -> Any:
        worker, turns = worker_of(Hanging, client_of_verl()), list[Any]()
        turns_of_trajectory.set(turns)
        watchdog = Watchdog(60.0, asyncio.get_running_loop().time)
        with watchdog.watch("nq", "nq:1"):
            return (
                await worker._host(
                    Row.from_columns(LOOP_ROW | {"agent_name": "loop"}), {}, LOOP_ROW, turns
                )
            )[-1]

    monkeypatch.setattr("agent_loop.training.verl_adapters.loop_worker.shared_client", client)
    output, _ = run_virtual(late())
    assert_is(row_of(begins), output, "nq")


def test_a_source_may_mask_what_others_train():
    sources: Any = MIXED["sources"] | {"taco": {"ratio": 1, "on_truncated": "mask"}}
    settings = replace(SETTINGS, mixed=MixedConfig.model_validate(MIXED | {"sources": sources}))

    async def mask_of(source: str) -> int:
        row = Row.from_columns(ROW | {"data_source": source})
        rollouts = [await run(CODE, max_turns=1)]
        (_, output), *_ = await judged_outputs(rollouts, row, NO_TOOL, settings, 0)
        return max(output.response_mask)

    assert [run_virtual(mask_of(source))[0] for source in ("nq", "taco")] == [1, 0]
