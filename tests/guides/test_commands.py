"""AgentFly's commands and options, as typed: each key reaches the run, or is refused by name."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from config.lookup import at, files_at
from config.schema import ConfigError
from tests.guides.conftest import Planned
from tests.guides.table import (
    COMMANDS,
    MEANS,
    NOTHING,
    OPTIONS,
    PAIRS,
    REFUSED,
    TOOLS,
    TYPED_TAGS,
)
from tests.verl_mixed.conftest import REPO_ROOT
from verl_mixed.checks.config.prompts import first_prompts
from verl_mixed.run.compose import verl_folder
from verl_mixed.run.sections import agent_loops

pytestmark = pytest.mark.slow

WITH_DATA = (
    "data.train_files=data/train.json data.val_files=data/val.json data.train_batch_size=4 "
    "agent.model_name_or_path=a/b trainer.n_gpus_per_node=1"
)
"""What an option of a list needs around it; the option itself wins."""

OWN_TEST = ("agent.tools", "data.train_files", "data.val_files")
WORDS = [
    (name, word)
    for name, command in COMMANDS.items()
    for word in shlex.split(command)
    if not word.startswith(OWN_TEST)
]


def plain(value: Any) -> Any:
    return [plain(each) for each in value] if isinstance(value, list) else _text(value)


def _text(value: Any) -> Any:
    return getattr(value, "text", value)


def assert_sets(planned: Planned, typed: str, key: str, value: Any, word: str) -> None:
    plan, said = planned(typed)
    if key == NOTHING:
        shown = word.partition("=")[0]
        assert f"  {shown} = " in said and "-> nothing: " in said.split(f"  {shown} = ")[1]
    else:
        assert at(plan.config, key) == value


@pytest.mark.parametrize(("command", "word"), WORDS)
def test_each_word_of_a_command_reaches_the_run(planned: Planned, command: str, word: str) -> None:
    override = OverridesParser.create().parse_override(word)
    typed = str(override.key_or_group)
    key, convert = MEANS.get(typed, (typed, lambda value: value))

    assert_sets(planned, COMMANDS[command], key, convert(plain(override.value())), word)


LACKS = {"training guide, code": "ground_truth needs the lists `inputs` and `outputs`"}
"""Command -> what rows in the guide's format (question, answer) lack: `code_reward` runs tests."""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_accepted_as_a_whole(planned: Planned, command: str) -> None:
    plan, _ = planned(COMMANDS[command])
    problems = plan.problems(machine=False)

    # one sentence for each file of rows
    assert all(LACKS.get(command, "a problem") in problem for problem in problems), problems
    assert len(problems) == (2 if command in LACKS else 0)
    (train,) = (word for word in shlex.split(COMMANDS[command]) if word.startswith("data.train_f"))
    assert Path(train.partition("=")[2]).stem in files_at(plan.config, "data.train_files")[0]


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in LACKS])
def test_the_right_answers_earn_a_command_s_reward(planned: Planned, command: str) -> None:
    plan, _ = planned(COMMANDS[command])
    examples = plan.reward_examples()

    assert len(examples) == 3
    named = at(plan.config, "mixed.sources.json.reward") or "exact_match"
    assert {each.reward for each in examples} == {named}
    for each in examples:
        assert each.score == 1 and each.wrong is not None and each.wrong < 1, each


def test_the_code_agent_is_asked_for_what_its_reward_compares(planned: Planned) -> None:
    plan, _ = planned(COMMANDS["training example"])
    prompt = first_prompts(plan.config)["json"]

    assert "write a Python program between <code>" in prompt
    assert "Write the final answer alone" in prompt and "judged by tests" not in prompt


def test_the_code_agent_takes_the_guides_rows_with_a_reward_that_compares(planned: Planned) -> None:
    plan, _ = planned(f"{COMMANDS['training guide, code']} agent.reward_name=exact_match_reward")

    assert plan.problems(machine=False) == []


@pytest.mark.parametrize(("command", "expected"), TOOLS.items())
def test_the_list_of_tools_is_exact(
    planned: Planned, command: str, expected: tuple[str, list[str] | None]
) -> None:
    plan, _ = planned(COMMANDS[command])
    agent, tools = expected

    assert at(plan.config, "mixed.sources.json.agent") == agent
    if tools is not None:
        loops, _ = agent_loops(plan.config)
        assert loops is not None and loops[agent]["tool_names"] == tools


def what_of(word: str) -> str:
    """What an option is about: two options about the same cannot stand in one command."""
    name = word.partition("=")[0].rpartition(".")[2]
    same = {
        "agent_type": "agent",
        "tools": "agent",
        "model_name_or_path": "model",
        "path": "model",
        "max_tokens": "max_tokens_per_turn",
        "total_epochs": "total_training_steps",
        "resume_from_path": "resume_mode",
    }
    return same.get(name, name)


def commands_of(options: Sequence[str]) -> dict[str, str]:
    """Option -> a command with it, of as few commands as the options allow."""
    groups: list[dict[str, str]] = []
    for typed in options:
        about = {what_of(word): typed for word in shlex.split(typed)}
        group = next((one for one in groups if not about.keys() & one.keys()), None)
        if group is None:
            groups.append(group := {})
        group |= about
    found: dict[str, str] = {}
    for group in groups:
        around = [word for word in shlex.split(WITH_DATA) if what_of(word) not in group]
        command = " ".join([shlex.join(around), *dict.fromkeys(group.values())])
        found |= dict.fromkeys(group.values(), command)
    return found


TRIED: dict[str, list[Any]] = {}
for _, _key, _value in [*OPTIONS, *PAIRS]:
    TRIED.setdefault(_key, []).append(_value)
COMMAND_OF = commands_of([typed for typed, _, _ in [*OPTIONS, *PAIRS]])


@pytest.mark.parametrize(("typed", "key", "value"), [*OPTIONS, *PAIRS])
def test_each_option_reaches_the_run(planned: Planned, typed: str, key: str, value: Any) -> None:
    assert_sets(planned, COMMAND_OF[typed], key, value, shlex.split(typed)[-1])


@pytest.mark.parametrize("key", [key for key in TRIED if key != NOTHING])
def test_each_key_is_tried_with_a_value_that_is_not_there_without_it(
    planned: Planned, key: str
) -> None:
    plan, _ = planned(WITH_DATA)

    assert any(at(plan.config, key) != value for value in TRIED[key])


@pytest.mark.parametrize(("typed", "word"), REFUSED)
def test_what_cannot_work_is_refused_with_the_word_that_works(
    planned: Planned, typed: str, word: str
) -> None:
    try:
        plan, _ = planned(f"{WITH_DATA} {typed}")
        problems = plan.problems(machine=False)
    except ConfigError as error:
        problems = error.problems

    assert problems, "it was accepted"
    assert any(word in problem for problem in problems), problems


@pytest.mark.parametrize(("typed", "key", "value"), TYPED_TAGS)
def test_tags_are_typed_without_quotes_for_hydra(
    planned: Planned, typed: str, key: str, value: str
) -> None:
    plan, _ = planned(f"{WITH_DATA} {shlex.quote(typed)}")

    assert at(plan.config, key) == value


@pytest.mark.parametrize(
    "program",
    [("-m", "verl.trainer.main_ppo"), (str(verl_folder() / "trainer" / "main_ppo.py"),)],
    ids=("module", "file"),
)
def test_verls_own_command_says_what_to_type(program: Sequence[str]) -> None:
    words = shlex.split(COMMANDS["tutorial 6, quick_start.py"])

    done = subprocess.run(
        [sys.executable, *program, *words],
        env={**os.environ, "PYTHONPATH": str(REPO_ROOT)},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 2
    assert "verl-mixed train" in done.stderr
