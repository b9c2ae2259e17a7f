"""A model must be told the form in which its agent reads actions and answers."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from samplers.rows.schema import SCHEMA
from tests.verl_mixed.conftest import RunEnviron
from verl_mixed.checks.config.formats import ACTIONS, format_problems
from verl_mixed.checks.config.prompts import first_prompts, is_unused_template
from verl_mixed.launch.plan import make_plan
from verl_mixed.run.compose import compose_config, resolve

MATH = "mixed.sources.math"


@pytest.fixture
def bare(run_environ: RunEnviron, tmp_path: Path) -> RunEnviron:
    """A run of math alone, whose rows say nothing about tags."""
    for split in ("train", "val"):
        rewrite(
            tmp_path / f"math_{split}.parquet", [{"role": "user", "content": "What is 15 + 27?"}]
        )
    files = {
        key: str(tmp_path / f"math_{key[:-6].lower()}.parquet")
        for key in ("TRAIN_FILES", "VAL_FILES")
    }
    return run_environ | files | {"TACO_RATIO": "0"}


def rewrite(path: Path, prompt: list[dict[str, Any]]) -> None:
    rows = [row | {"prompt": prompt} for row in pq.read_table(path).to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)


def found(environ: RunEnviron, *overrides: str) -> list[str]:
    return list(format_problems(make_plan(overrides, environ).config))


@pytest.mark.parametrize(
    ("overrides", "forms"),
    [
        ([], r"<code>, <answer>, \boxed:"),
        ([f"{MATH}.prompt=null"], r"<code>, <answer>, \boxed:"),
        ([f"{MATH}.system_prompt=Think"], r"<code>, <answer>, \boxed:"),
        ([f"{MATH}.agent=code_execution_agent"], "<code>, <answer>:"),
        ([f"{MATH}.agent=search_agent"], "<search>, <answer>:"),
        ([f"{MATH}.prompt={{system: 'Write {{search_start_tag}}'}}"], r"<code>, <answer>, \boxed:"),
    ],
)
def test_a_prompt_without_the_form_of_its_agent_is_named(
    bare: RunEnviron, overrides: list[str], forms: str
):
    (problem,) = found(bare, *overrides)
    assert problem.startswith("source='math' with agent=") and forms in problem
    assert "set prompts=instructed" in problem


@pytest.mark.parametrize(
    "overrides",
    [
        ["prompts=instructed"],
        ["prompts=few_shot", f"{MATH}.prompt=null"],
        *([["prompts=instructed", f"{MATH}.prompt=null", f"{MATH}.agent={agent}_agent"]
           for agent in ("code_execution", "search", "math", "react")]),
        [f"{MATH}.agent=react_agent", f"{MATH}.system_prompt=S", f"{MATH}.prompt={{system: T}}"],
        [f"{MATH}.prompt={{user: '{{question}} Answer in \\\\boxed{{}}'}}"],
        [f"{MATH}.prompt={{user: '{{answer_start_tag}} {{question}}'}}"],
        [f"{MATH}.prompt={{}}"],
        [f"{MATH}.agent=single_turn_agent"],
    ],
)  # fmt: skip
def test_a_prompt_with_the_form_or_of_an_agent_that_is_not_ours_is_good(
    bare: RunEnviron, overrides: list[str]
):
    assert found(bare, *overrides) == []


def test_the_demo_model_has_learnt_its_tags(bare: RunEnviron, tmp_path: Path):
    (tmp_path / "model").mkdir()
    environ = bare | {"MODEL_PATH": str(tmp_path / "model")}
    assert len(found(environ)) == 1
    (tmp_path / "demo.json").write_text(json.dumps({}))
    assert found(environ) == []


def test_instructions_of_the_user_s_own_must_name_react_s_lines(bare: RunEnviron, tmp_path: Path):
    file = tmp_path / "loops.yaml"
    loop = {"name": "mine", "_target_": "agent_loop.react_agent_loop.ReactAgentLoop"}
    file.write_text(json.dumps([loop | {"system_prompt": "Use {tools}"}]))
    key = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    (problem,) = found(bare, f"{key}={file}", f"{MATH}.agent=mine")
    assert problem.endswith(
        "describe these lines in the system_prompt of mine, or leave {tools} out"
    )
    file.write_text(
        json.dumps([loop | {"system_prompt": "Use {tools}. Write Final Answer: last."}])
    )
    assert found(bare, f"{key}={file}", f"{MATH}.agent=mine") == []


def test_a_start_and_check_say_it(bare: RunEnviron):
    plan = make_plan([], bare)
    assert [problem for problem in plan.problems() if "earns no reward" in problem]


def test_the_first_prompt_is_what_the_parts_say(bare: RunEnviron, tmp_path: Path):
    said = [{"role": "system", "content": "ROW"}, {"role": "user", "content": "Q"}]
    rewrite(tmp_path / "math_train.parquet", said)
    plan = make_plan([f"{MATH}.agent=react_agent", f"{MATH}.system_prompt=SOURCE"], bare)
    assert first_prompts(plan.config)["math"].startswith(
        "system: SOURCE\n\nROW\n\nAnswer the question. You may use these tools:\nrun_code: run"
    )


def test_the_actions_are_those_of_the_classes():
    pytest.importorskip("verl")
    from hydra.utils import get_class

    for target, actions in ACTIONS.items():
        assert tuple(get_class(target).actions) == actions


def test_a_run_of_before_goes_on_if_no_source_takes_the_new_templates():
    run = ["prompts=instructed", "mixed.run_dir=/x"]
    config = resolve(compose_config(run), complete=False)
    key = "data.prompts.search_agent.system"
    assert is_unused_template(key, config)
    assert not is_unused_template("mixed.prompts.search.system", config)
    config["mixed"]["sources"]["nq"]["prompt"] = None
    assert not is_unused_template(key, config)
