"""Code of the user's own that would fail in a run is refused before it, with Python's error."""

import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from tests.verl_mixed.conftest import REPO_ROOT, ProblemsWith, RunEnviron
from verl_mixed.checks.config.own_code import own_code_problems
from verl_mixed.launch.plan import make_plan

MATH = "mixed.sources.math"
ROLLOUT = "actor_rollout_ref.rollout"

FAULTS = {
    # what the file is -> words of the message, most of them Python's
    "raise KeyError('of the file')": "KeyError: 'of the file'",
    "raise SystemExit('of the file')": "SystemExit: of the file",
    "def Name(:": "SyntaxError: ",
    "import nowhere_at_all": "No module named 'nowhere_at_all'",
    "x = 1": "no ",
    "Name = 5": "no |of type int",
    "": "no |absent",
}
# places where a module is all that is needed
NEEDS_NO_NAME = ("external_lib", "custom_backend_module")

PLACES = {
    # the key that is named -> what is typed; {m} is the module, {f} its file
    "agent_loops.mine": "++agent_loops.mine._target_={m}.Name",
    "mixed.agent_loops.mine": "++mixed.agent_loops.mine._target_={m}.Name " + f"{MATH}.agent=mine",
    f"{MATH}.reward": f"{MATH}.reward={{f}}:Name",
    f"{MATH}.tools": f"{MATH}.agent=native_agent ++{MATH}.tools=['{{f}}:Name']",
    f"{MATH}.tools: verl": f"{MATH}.agent=native_agent ++{MATH}.tools=[{{{{verl:'{{f}}'}}}}]",
    "source='math' with agent='tool_agent'": f"{MATH}.agent=tool_agent "
    f"{ROLLOUT}.multi_turn.function_tool_path={{f}}",
    f"{MATH}.environment": f"{MATH}.agent=null ++{MATH}.environment={{f}}:Name "
    f"++{MATH}.prompt={{{{}}}} {MATH}.reward=loop",
    "agent_loops.gateway": "++agent_loops.gateway.function={f}:Name",
    "actor_rollout_ref.model.external_lib": "actor_rollout_ref.model.external_lib={m}",
    f"{ROLLOUT}.checkpoint_engine.custom_backend_module": f"{ROLLOUT}.checkpoint_engine"
    ".custom_backend_module={m}",
    "trainer.checkpoint_callback_class": "trainer.checkpoint_callback_class={m}.Name",
    "actor_rollout_ref.actor.optim": "actor_rollout_ref.actor.optim.optimizer_impl={m} "
    "actor_rollout_ref.actor.optim.optimizer=Name",
}

NUMBERS = count()


def own_module(folder: Path, text: str) -> str:
    """A new module, whose name no other test has imported; without text it is not there."""
    name = f"own_code_{next(NUMBERS)}"
    if text:
        (folder / f"{name}.py").write_text(f"{text}\n")
    return name


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (key, text)
        for key in PLACES
        for text in FAULTS
        if not (key.endswith(NEEDS_NO_NAME) and text in ("x = 1", "Name = 5"))
    ],
)
def test_code_that_cannot_be_loaded_is_named_with_its_key_and_pythons_error(
    common_plan: tuple[object, Path], problems_with: ProblemsWith, key: str, text: str
) -> None:
    module = own_module(common_plan[1], text)
    typed = PLACES[key].format(m=module, f=common_plan[1] / f"{module}.py")

    found = [each for each in problems_with(*typed.split()) if each.startswith(key)]

    assert len(found) == 1, found
    assert any(words in found[0] for words in FAULTS[text].split("|")), found


HINT = """\
from __future__ import annotations
def Name(x: Undefined) -> str: "Does it."
"""
ENVIRONMENT = """\
class Name:
    def __init__(self): raise {error}
    def reset(self): ...
    def step(self, action): ...
"""


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        (f"{MATH}.tools", HINT, "name 'Undefined' is not defined; each argument needs a type hint"),
        (f"{MATH}.environment", ENVIRONMENT.format(error="KeyError(5)"), "raised KeyError: 5"),
        (f"{MATH}.environment", ENVIRONMENT.format(error="SystemExit(5)"), "raised SystemExit: 5"),
    ],
)
def test_what_tools_and_environments_raise_when_they_are_tried_is_one_line(
    common_plan: tuple[object, Path], problems_with: ProblemsWith, key: str, text: str, said: str
) -> None:
    file = common_plan[1] / f"{own_module(common_plan[1], text)}.py"

    found = problems_with(*PLACES[key].format(f=file).split())

    assert any(each.startswith(key) and said in each for each in found), found


LOOP = "from verl.experimental.agent_loop.agent_loop import AgentLoopBase\n"
GOOD = LOOP + "class Name(AgentLoopBase):\n    async def run(self, sampling_params, **columns): ..."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD, None),
        (
            "class Name:\n    def __init__(self, **settings): ...\n    async def run(self): ...",
            None,
        ),
        ("def Name(**settings): ...", None),  # a function may make the loop
        ("class Outer:\n    pass\nclass Name(Outer): ...", "the class has no run"),
        (f"{LOOP}class Name(AgentLoopBase): ...", "the class lacks run"),
        (
            "class Name:\n    def __init__(self, tools): ...\n    async def run(self): ...",
            "got an unexpected keyword argument",
        ),
        (
            f"{GOOD}\n    def __init__(self, depth, **settings): ...",
            "missing a required argument: 'depth'",
        ),
        (f"{GOOD}\n    def __init__(self, colour, **settings): ...", None),
    ],
)
def test_a_class_that_a_worker_could_not_make_or_run_is_refused(
    common_plan: tuple[object, Path], problems_with: ProblemsWith, text: str, said: str | None
) -> None:
    typed = f"_target_: {own_module(common_plan[1], text)}.Name, colour: red"

    found = problems_with(f"++agent_loops.mine={{{typed}}}", f"{MATH}.agent=mine")

    assert [str(said) in each for each in found] == [True] * (said is not None), found


@pytest.mark.parametrize("target", ["agent_loop.nowhere.Loop", "verl.Nothing"])
def test_a_class_of_this_project_or_verl_that_is_not_there_is_refused(
    problems_with: ProblemsWith, target: str
) -> None:
    (found,) = problems_with(f"++agent_loops.mine._target_={target}")

    assert "cannot be imported (AttributeError: module " in found


@pytest.mark.parametrize(("agent", "refused"), [("math_agent", False), ("mine", True)])
def test_an_agent_of_the_file_is_tried_if_a_source_uses_it(
    run_environ: RunEnviron, tmp_path: Path, agent: str, refused: bool
) -> None:
    shipped = (REPO_ROOT / "config" / "agent_loops.yaml").read_text()
    (tmp_path / "loops.yaml").write_text(f"{shipped}\n- {{name: mine, _target_: nowhere.Loop}}\n")
    file = f"{ROLLOUT}.agent.agent_loop_config_path=loops.yaml"

    config = make_plan([file, f"{MATH}.agent={agent}"], run_environ).config

    found = [*own_code_problems(config)]
    assert ["loops.yaml': mine: _target_='nowhere.Loop': no module" in each for each in found] == (
        [True] * refused
    )


@pytest.mark.parametrize(("machine", "refused"), [(True, True), (False, False)])
def test_a_package_of_optimizers_may_be_on_the_machine_of_the_run_only(
    run_environ: RunEnviron, machine: bool, refused: bool
) -> None:
    overrides = ["actor_rollout_ref.actor.optim.optimizer_impl=nowhere.optim"]
    config = make_plan(overrides, run_environ).config

    assert bool([*own_code_problems(config, machine=machine)]) == refused


def test_a_module_of_the_current_folder_is_found_by_the_installed_command(tmp_path: Path) -> None:
    (tmp_path / "of_this_folder.py").write_text("class Name:\n    run = print\n")
    program = f"""\
import sys
sys.path[:1] = [{str(REPO_ROOT)!r}]
from verl_mixed.run.sections import loaded
print(loaded("of_this_folder.Name")[1] or "ok")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )

    assert done.stdout == "ok\n"
