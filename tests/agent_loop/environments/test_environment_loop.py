"""The agent loop of environments, through our worker and verl's post-processing."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from agent_loop.calls.client import ToolClient
from agent_loop.environment_agent_loop import EnvironmentAgentLoop
from agent_loop.records.trajectory_record import line_of
from tests.agent_loop.environments.conftest import WORLDS
from tests.agent_loop.test_passed_on import TOKENIZER, rows_of
from tests.agent_loop.test_several_rows import audit, records_of
from tests.fakes.engine import record_in
from tests.fakes.environments import FAULTS
from tests.fakes.real_tokenizers import calling_tokenizer

END = "<|im_end|>"
CUT = "~"
"""At the end of a message that a limit of tokens cuts."""
CALL = '<tool_call>{"name": "%s", "arguments": {%s}}</tool_call>' + END


async def played(
    client: ToolClient, monkeypatch: Any, *texts: str, use: str = "Guess", **settings: Any
) -> dict[str, Any]:
    """The trajectory as a line of its file, with its reward; seed 3, so that the number is 4."""
    entry = {
        name: settings.pop(name)
        for name in ("options", "reward", "timeout", "where")
        if name in settings
    }
    environment = {"use": f"{WORLDS}:{use}", "where": "loop", **entry}
    (row,) = await rows_of(
        EnvironmentAgentLoop,
        monkeypatch,
        *texts,
        tools=client,
        environment=environment,
        **settings,
    )
    (record,) = records_of([row])
    shown = row["response_mask"].bool()
    return {
        **json.loads(line_of(record)),
        "record": record,
        "score": row["rm_scores"].sum().item(),
        "sampled": TOKENIZER.decode(row["responses"][shown]),
        "response": TOKENIZER.decode(row["responses"]),
        "prompt": TOKENIZER.decode(row["prompts"]),
        "rewards": [call.reward for call in record.calls],
    }


async def test_each_message_is_a_step_and_the_answer_is_a_users_message(
    client: ToolClient, tmp_path: Path, monkeypatch: Any
):
    line = await played(client, monkeypatch, f"2{END}", f"x{END}", f"4{END}")
    assert line["prompt"].count("a number from 1 to 9") == 1 and "You play." in line["prompt"]
    assert line["sampled"] == f"2{END}x{END}4{END}"
    asked, after = (
        f"<|im_start|>user\n{text}{END}" for text in ("higher", "error: write a number")
    )
    assert line["response"].index(asked) < line["response"].index(after)
    assert line["response"].endswith(f"assistant\n4{END}"), "what is not read is not appended"
    assert line["rewards"] == [0.25, None, 1.0] and line["score"] == 1.25
    assert [call["status"] for call in line["calls"]] == ["ok", "rejected", "ok"]
    assert line["stop_reason"] == "answered" and line["answer"] == "4"
    assert line["calls"][-1]["unread"] == "right"
    parts = line["reward_parts"]
    assert (parts["acc"], parts["x"], parts["steps"]) == (1.0, 2.0, 2.0)
    assert audit(tmp_path, [line["record"]]).problems == []


@pytest.mark.parametrize(
    ("texts", "settings", "stop_reason", "rewards"),
    [
        # the last turn is a step too, because it may have a reward
        (["2", "3"], {"max_turns": 2}, "max_turns", [0.25, 0.25]),
        (["2"], {"max_turns": 1}, "max_turns", [0.25]),
        (["more"] * 3, {"options": {"mode": "never ends"}}, "max_turns", [0.0] * 3),
        ([""], {}, "no_action", []),
        (["2"], {"max_response_length": 14}, "response_budget", [0.25]),
        (["<think>4</think> 3"], {"max_turns": 1}, "max_turns", [0.25]),
        (["<think>4"], {}, "no_action", []),
        # a message that the limit of one turn cuts is a step; one that the response's cuts is none
        (["2", f"3{CUT}"], {"max_turns": 2, "max_turn_length": 1}, "max_turns", [0.25, 0.25]),
        ([f"3{CUT}"], {"max_response_length": 1}, "response_budget", []),
    ],
)
async def test_an_episode_that_does_not_end_has_the_rewards_of_its_steps(
    texts: list[str],
    settings: Any,
    stop_reason: str,
    rewards: list[float],
    client: ToolClient,
    tmp_path: Path,
    monkeypatch: Any,
):
    whole = (text.removesuffix(CUT) if text.endswith(CUT) else text + END for text in texts)
    line = await played(client, monkeypatch, *whole, **settings)
    assert line["stop_reason"] == stop_reason and line["rewards"] == rewards
    assert line["score"] == sum(rewards) and line["fault"] is None
    assert audit(tmp_path, [line["record"]]).problems == []


@pytest.mark.parametrize("mode", [*FAULTS, "hangs", "no start"])
async def test_a_fault_of_the_environment_is_not_trained_and_is_named(
    mode: str, client: ToolClient, tmp_path: Path, monkeypatch: Any
):
    how = {"where": "process", "timeout": 1.0} if mode == "hangs" else {}
    line = await played(client, monkeypatch, f"2{END}", options={"mode": mode}, **how)
    assert line["stop_reason"] == "infra_error" and line["loop_error"] is None
    assert line["fault_tool"] == "Guess" and not any(line["response_mask"])
    assert line["score"] == 0.0 and line["reward_parts"]["infra_error"] == 1.0
    assert audit(tmp_path, [line["record"]]).problems == []


async def test_tools_of_an_environment_are_called_natively_and_text_is_a_step_too(
    client: ToolClient, tmp_path: Path, monkeypatch: Any
):
    template = calling_tokenizer("hermes").chat_template
    monkeypatch.setattr(TOKENIZER, "chat_template", template)
    texts = [CALL % ("look_up", '"order": "b"'), CALL % ("look_up", '"x": 1'), f"7{END}"]
    line = await played(client, monkeypatch, *texts, use="Orders", where="process")
    assert "look_up" in line["prompt"] and "7 pieces, call 1" in line["response"]
    assert line["sampled"] == "".join(texts)
    assert [call["status"] for call in line["calls"]] == ["ok", "rejected", "ok"]
    assert line["rewards"] == [0.5, None, 1.0] and line["score"] == 1.5
    assert line["stop_reason"] == "answered" and line["calls"][-1]["action"] == "step"
    assert audit(tmp_path, [line["record"]]).problems == []


async def test_a_named_reward_judges_the_last_action_and_the_rewards_are_recorded(
    client: ToolClient, monkeypatch: Any
):
    line = await played(client, monkeypatch, f"4{END}", reward="last")
    assert line["score"] == 1.0
    named = await rows_of(
        EnvironmentAgentLoop,
        monkeypatch,
        f"4{END}",
        tools=client,
        environment={"use": f"{WORLDS}:Guess", "where": "loop"},
        reward="exact_match",
    )
    parts = record_in(named[0]).reward_parts
    assert parts["loop_score"] == 1.0 and parts["score"] == named[0]["rm_scores"].sum().item()


async def test_info_never_sets_the_score(client: ToolClient, monkeypatch: Any):
    line = await played(client, monkeypatch, f"2{END}", options={"mode": "names the score"})
    parts = line["reward_parts"]
    assert (line["score"], parts["score"], parts["steps"], parts["format"]) == (0.5, 0.5, 1.0, 1.0)
    assert (parts["info_score"], parts["info_format"], parts["info_steps"]) == (250.0, 7.0, 9.0)
    assert "huge" not in parts and parts["acc"] == 0.0


@pytest.mark.parametrize("where", ["loop", "process"])
async def test_half_a_character_is_written_as_a_question_mark(
    where: str, client: ToolClient, monkeypatch: Any
):
    how = {"options": {"mode": "half a character"}, "where": where}
    line = await played(client, monkeypatch, f"2{END}", **how)
    assert line["calls"][0]["unread"] == "caf?" and line["score"] == 1.0
