"""Tools that could not be called, and formats of calls that the chat template does not have."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_loop.toolbox.own import SPECS
from agent_loop.turns.call_formats import FORMATS
from config.lookup import at
from tests.fakes.real_tokenizers import calling_tokenizer
from tests.verl_mixed.conftest import REPO_ROOT, RunEnviron
from verl_mixed.checks.config.tools import FORMAT_KEY, call_problem, template_formats
from verl_mixed.launch.plan import make_plan

pytestmark = pytest.mark.slow

ORDERS = REPO_ROOT / "tests/fakes/orders.py"
MATH = "mixed.sources.math"
NATIVE = f"{MATH}.agent=native_agent"
SHORT = "data.max_prompt_length=4000"  # tokens of bytes
SCHEMAS = [SPECS["calculate"].schema]


def tools(*entries: str) -> str:
    return f"+{MATH}.tools=[{','.join(entries)}]"


def found(environ: RunEnviron, *overrides: str, data: bool = False) -> list[str]:
    return make_plan(overrides, environ).problems(data=data, machine=False)


def model(folder: Path, tokenizer: Any) -> str:
    """A model folder of no weights."""
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return str(folder)


# --- tools of sources -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        *(
            (
                [f"{MATH}.agent={agent}", tools("calculate")],
                f"{MATH}.tools with agent={agent!r}: this agent calls no tools by name; use "
                "native_agent or react_agent",
            )
            for agent in ("code_execution_agent", "math_agent", "tool_agent", "single_turn_agent")
        ),
        (
            [f"{MATH}.agent=null", tools("calculate")],
            f"{MATH}.tools without {MATH}.agent: the rows name the agent; set it to one",
        ),
        (
            [NATIVE, tools("calculate"), "++agent_loops.native_agent.tool_names=[calculate]"],
            f"{MATH}.tools: agent='native_agent' has tool_names=['calculate'] too",
        ),
        (
            [NATIVE, tools("calculate"), f"++{MATH}.observation_style=inline"],
            f"{MATH}.observation_style='inline' with agent='native_agent': results of native calls "
            "are messages of the chat template; leave it out",
        ),
        (
            [NATIVE, tools("'gone.py:f'")],
            f"{MATH}.tools: cannot load tool=",
        ),
        (
            [NATIVE, tools(f"'{ORDERS}:no_hints'")],
            f"{MATH}.tools: cannot load tool={ORDERS}:no_hints: ",
        ),
        (
            [NATIVE, tools(f"'{ORDERS}:look_up'", f"'{ORDERS}:look_up'")],
            f"{MATH}.tools: two tools are called 'look_up'",
        ),
        ([NATIVE, tools("{mcp: no-such-command}")], f"{MATH}.tools: "),
        ([NATIVE, tools("{mcp: 'http://127.0.0.1:9/mcp', timeout: 2}")], f"{MATH}.tools: "),
        ([NATIVE, tools("{verl: gone.yaml}")], f"{MATH}.tools: verl="),
    ],
)
def test_a_tool_that_could_not_be_called_keeps_a_run_from_starting(
    run_environ: RunEnviron, overrides: list[str], problem: str
):
    (only,) = [each for each in found(run_environ, *overrides) if "math" in each]
    assert only.startswith(problem) and ("; " in only or "`" in only)


@pytest.mark.parametrize("agent", ["native_agent", "react_agent"])
def test_tools_of_every_kind_are_listed_before_the_start(run_environ: RunEnviron, agent: str):
    own = [f"{MATH}.agent={agent}", tools("calculate", f"'{ORDERS}:look_up'", f"'{ORDERS}:Cart'")]
    assert found(run_environ, *own) == []


# --- formats and templates ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokenizer", "call_format", "schemas", "words"),
    [
        (calling_tokenizer("hermes"), "hermes", SCHEMAS, ()),
        (calling_tokenizer("qwen3_coder"), "qwen3_coder", SCHEMAS, ()),
        (calling_tokenizer("hermes", shows_tools=False), "hermes", [], ()),
        (calling_tokenizer("hermes"), "herms", SCHEMAS, ("'herms': choose one of", "qwen3_coder")),
        (
            calling_tokenizer("qwen3_coder"),
            "hermes",
            SCHEMAS,
            ("format='hermes' is not the format of calls", "it is that of qwen3_coder"),
        ),
        (calling_tokenizer("unknown"), "hermes", SCHEMAS, ("it is none of them",)),
        (calling_tokenizer("hermes"), None, SCHEMAS, ("it is that of hermes",)),
        (
            calling_tokenizer("hermes", shows_tools=False),
            "hermes",
            SCHEMAS,
            ("leaves `tools` out, so the model never sees them", "custom_chat_template"),
        ),
        (
            calling_tokenizer("hermes", continues=False),
            "hermes",
            SCHEMAS,
            ("cannot continue after a tool call", "renders earlier messages otherwise"),
        ),
    ],
)
def test_a_template_that_makes_no_native_calls_is_refused_with_the_reason(
    tokenizer: Any, call_format: Any, schemas: list[dict[str, Any]], words: Sequence[str]
):
    problem = call_problem(tokenizer, call_format, schemas)
    assert (problem is None) == (words == ())
    assert all(word in (problem or "") for word in words), problem


def test_a_template_that_refuses_calls_has_no_format():
    tokenizer = calling_tokenizer("hermes")
    tokenizer.chat_template = "{% if messages | length > 1 %}{{ raise_exception('no calls') }}"
    tokenizer.chat_template += "{% endif %}{{ messages[0].content }}"
    assert template_formats(tokenizer) == []
    assert "no calls" in (call_problem(tokenizer, "hermes", []) or "")


@pytest.mark.parametrize(
    ("call_format", "overrides", "chosen", "words"),
    [
        ("hermes", [NATIVE], "hermes", None),
        ("qwen3_coder", [NATIVE], "qwen3_coder", None),
        ("qwen3_coder", [f"{MATH}.agent=tool_agent"], "qwen3_coder", None),
        ("qwen3_coder", [f"{MATH}.agent=react_agent"], "hermes", None),
        ("qwen3_coder", [NATIVE, f"{FORMAT_KEY}=hermes"], "hermes", "it is that of qwen3_coder"),
        ("unknown", [NATIVE], None, f"{FORMAT_KEY}=None is not the format of calls"),
        ("unknown", [f"{MATH}.agent=tool_agent"], "hermes", None),
        ("unknown", [f"{MATH}.agent=react_agent"], "hermes", None),
    ],
)
def test_the_model_s_template_decides_the_format_of_calls(
    run_environ: RunEnviron,
    tmp_path: Path,
    call_format: str,
    overrides: list[str],
    chosen: str | None,
    words: str | None,
):
    environ = run_environ | {"MODEL_PATH": model(tmp_path / "m", calling_tokenizer(call_format))}
    plan = make_plan([SHORT, *overrides], environ)
    assert at(plan.config, FORMAT_KEY) == chosen
    problems = plan.problems(machine=False)
    assert len(problems) == (words is not None), problems
    if words is not None:
        assert problems[0].startswith("source='math' with agent='native_agent' makes native")
        assert words in problems[0]


def test_a_template_that_the_run_sets_decides_instead(run_environ: RunEnviron, tmp_path: Path):
    environ = run_environ | {"MODEL_PATH": model(tmp_path / "m", calling_tokenizer("hermes"))}
    text = calling_tokenizer("qwen3_coder").chat_template.replace("'", "\\'")
    key = "actor_rollout_ref.model.custom_chat_template"
    config = make_plan([NATIVE, f"{key}='{text}'"], environ).config
    assert at(config, FORMAT_KEY) == "qwen3_coder"


@pytest.mark.parametrize(
    ("overrides", "is_refused"),
    [
        ([NATIVE], True),
        ([NATIVE, f"{FORMAT_KEY}=herms"], True),
        ([NATIVE, f"{FORMAT_KEY}=hermes"], False),
        ([f"{MATH}.agent=react_agent"], False),
    ],
)
def test_native_calls_of_a_hub_s_model_need_a_format(
    run_environ: RunEnviron, overrides: list[str], is_refused: bool
):
    """Its chat template is not read before the start."""
    problems = found(run_environ, *overrides, data=True)
    assert len(problems) == is_refused
    for problem in problems:
        assert problem.startswith("source='math' with agent='native_agent' makes native tool calls")
        assert "'someone/some-model'" in problem and all(name in problem for name in FORMATS)


def test_schemas_of_tools_count_among_the_tokens_of_a_prompt(
    run_environ: RunEnviron, tmp_path: Path
):
    environ = run_environ | {"MODEL_PATH": model(tmp_path / "m", calling_tokenizer("hermes"))}
    longest = "data.max_prompt_length=200"  # tokens of bytes; the schema alone has more
    taco = "mixed.sources.taco.agent=single_turn_agent"
    assert found(environ, NATIVE, taco, tools(), longest, data=True) == []
    problems = found(environ, NATIVE, taco, tools("calculate"), longest, data=True)
    files = [str(tmp_path / f"math_{split}.parquet") for split in ("train", "val")]
    assert [each.split(":")[0] for each in problems] == files
    assert all("12 of 12 prompts are longer than" in each for each in problems)
    assert found(environ, NATIVE, taco, tools("calculate"), SHORT, data=True) == []
