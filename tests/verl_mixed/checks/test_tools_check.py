"""Tools that could not be called, and formats of calls that the chat template does not have."""

import json
import os
from collections.abc import Sequence
from copy import copy, deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_loop.toolbox.own import SPECS
from agent_loop.turns.call_formats import FORMATS
from config.lookup import at
from tests.fakes.real_tokenizers import calling_tokenizer, real_tokenizer
from tests.verl_mixed.conftest import REPO_ROOT, RunEnviron, write_source
from verl_mixed.checks.config.prompts import _template_problems, chosen_format, model_problems
from verl_mixed.checks.config.tools import call_problem, template_formats, tool_problems
from verl_mixed.launch.plan import make_plan
from verl_mixed.run.sections import FORMAT_KEY, NATIVE_LOOP

pytestmark = pytest.mark.slow

Config = dict[str, Any]
ORDERS = REPO_ROOT / "tests/fakes/orders.py"
MATH = "mixed.sources.math"
SCHEMAS = [SPECS["calculate"].schema]
LOOKS_UP = f"{ORDERS}:look_up"
INLINE = {"observation_style": "inline"}
STYLE = f"{MATH}.observation_style='inline' with agent='native_agent': results of native calls are"


@pytest.fixture(scope="module")
def planned() -> Config:
    return make_plan([], os.environ | {"MODEL_PATH": "someone/some-model"}).config


@pytest.fixture
def config(planned: Config, tmp_path: Path) -> Config:
    """A run with rows of the source math, in two files: those of the second name native_agent."""
    config = deepcopy(planned)
    agents = {"math_agent": 0, "native_agent": 100}
    files = [
        str(write_source(tmp_path / f"{agent}.parquet", "math", 12, agent, first))
        for agent, first in agents.items()
    ]
    put(config, "data.train_files", files)
    put(config, "data.val_files", [])
    return config


def put(config: Config, key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        config = config[part]
    config[last] = value


def put_model(config: Config, folder: Path, call_format: str, **kind: bool) -> None:
    """Let the run have a model folder, of no weights."""
    calling_tokenizer(call_format, **kind).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    put(config, "actor_rollout_ref.model.path", str(folder))
    put(config, FORMAT_KEY, None)


# --- tools of sources -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agent", "tools", "more", "problem"),
    [
        *(
            (
                agent,
                ["calculate"],
                {},
                f"{MATH}.tools with agent={agent!r}: this agent calls no tools by name; use "
                "native_agent or react_agent",
            )
            for agent in ("math_agent", "tool_agent", "tagged")
        ),
        (
            None,
            ["calculate"],
            {},
            f"{MATH}.tools without {MATH}.agent: the rows name the agent; set it to one",
        ),
        (
            "chooses",
            ["calculate"],
            {},
            f"{MATH}.tools: agent='chooses' has tool_names=['calculat'] too",
        ),
        (
            "chooses",
            None,
            {},
            "source='math' with agent='chooses': tool_names=['calculat']: want a list of run_code, "
            "search, calculate; correct it",
        ),
        (
            "keeps",
            [{"tool": "run_code", "cache": True}],
            {},
            f"{MATH}.tools: run_code with retry or cache, and agent='keeps' has persistent_inter",
        ),
        ("keeps", [{"tool": "run_code", "retry": 1}], {}, f"{MATH}.tools: run_code with retry"),
        ("native_agent", None, INLINE, STYLE),
        (None, None, INLINE, STYLE),
        ("own", ["gone.py:f"], {}, f"{MATH}.tools: cannot load tool="),
        (
            "native_agent",
            [f"{ORDERS}:no_hints"],
            {},
            f"{MATH}.tools: cannot load tool={ORDERS}:no_hints: ",
        ),
        (
            "native_agent",
            [LOOKS_UP, LOOKS_UP],
            {},
            f"{MATH}.tools: two tools are called 'look_up'",
        ),
        ("native_agent", [{"mcp": "no-such-command"}], {}, f"{MATH}.tools: "),
        ("native_agent", [{"mcp": "http://127.0.0.1:9/mcp", "timeout": 2}], {}, f"{MATH}.tools: "),
        ("native_agent", [{"verl": "gone.yaml"}], {}, f"{MATH}.tools: verl="),
    ],
)
def test_a_tool_that_could_not_be_called_keeps_a_run_from_starting(
    config: Config, agent: str | None, tools: list[Any] | None, more: dict[str, Any], problem: str
):
    config["agent_loops"] = {
        "tagged": {"_target_": "tests.fakes.own_loops.Tagged"},
        "own": {"_target_": "tests.fakes.own_loops.Native"},
        "chooses": {"_target_": NATIVE_LOOP, "tool_names": ["calculat"]},
        "keeps": {"_target_": NATIVE_LOOP, "persistent_interpreter": True},
    }
    config["mixed"]["sources"]["math"] |= {"agent": agent, "tools": tools} | more
    (only,) = tool_problems(config)
    assert only.startswith(problem) and ("; " in only or "`" in only)
    put(config, f"{MATH}.ratio", 0)
    assert [*tool_problems(config)] == []


def test_tools_of_every_kind_are_listed_before_the_start(run_environ: RunEnviron):
    own = [f"+agent_loops.mine._target_={NATIVE_LOOP}", f"{MATH}.agent=mine"]
    tools = f"+{MATH}.tools=[calculate,'{LOOKS_UP}','{ORDERS}:Cart']"
    plan = make_plan([*own, tools, f"{FORMAT_KEY}=hermes"], run_environ)
    assert at(plan.config, "data.max_prompt_length") == 160  # calls by name are longer
    assert plan.problems(machine=False) == []
    put(plan.config, f"{MATH}.tools", ["gone.py:f"])
    put(plan.config, FORMAT_KEY, "herms")
    of_tools, of_format = plan.problems(machine=False)
    assert of_tools.startswith(f"{MATH}.tools: cannot load") and "herms" in of_format


# --- formats and templates ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokenizer", "call_format", "schemas", "words"),
    [
        (calling_tokenizer("hermes"), "hermes", SCHEMAS, ()),
        (calling_tokenizer("qwen3_coder"), "qwen3_coder", SCHEMAS, ()),
        (calling_tokenizer("llama3_json"), "llama3_json", SCHEMAS, ()),
        (calling_tokenizer("mistral"), "mistral", SCHEMAS, ()),
        (calling_tokenizer("mistral list"), "mistral", SCHEMAS, ()),
        (calling_tokenizer("lfm2"), "lfm2", SCHEMAS, ()),
        (calling_tokenizer("llama3_json"), "hermes", SCHEMAS, ("it is that of llama3_json",)),
        (calling_tokenizer("hermes"), "llama3_json", SCHEMAS, ("it is that of hermes",)),
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


@pytest.mark.parametrize(("calls", "is_named"), [(1, False), (2, True)])
def test_a_template_that_refuses_a_second_result_is_named_where_a_turn_has_several_calls(
    calls: int, is_named: bool
):
    tokenizer = copy(real_tokenizer("pieces"))
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' and loop.previtem.role == 'tool' %}"
        "{{ raise_exception('one result') }}{% endif %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    )
    source = SimpleNamespace(observation_style="chat")
    prompts: Any = SimpleNamespace(sources={"taco": source}, have_system=lambda name: False)
    turns = {"multi_turn": {"max_parallel_calls": calls}}
    config = {"actor_rollout_ref": {"rollout": turns}}
    found = [*_template_problems(config, tokenizer, prompts)]
    assert ["(one result)" in problem for problem in found] == [True] * is_named, found


def test_a_template_that_refuses_calls_has_no_format():
    tokenizer = calling_tokenizer("hermes")
    tokenizer.chat_template = "{% if messages | length > 1 %}{{ raise_exception('no calls') }}"
    tokenizer.chat_template += "{% endif %}{{ messages[0].content }}"
    assert template_formats(tokenizer) == []
    assert "no calls" in (call_problem(tokenizer, "hermes", []) or "")


@pytest.mark.parametrize(
    ("call_format", "agent", "given", "chosen", "words"),
    [
        ("hermes", "native_agent", None, "hermes", None),
        ("qwen3_coder", None, None, "qwen3_coder", None),
        ("qwen3_coder", "tool_agent", None, "qwen3_coder", None),
        ("qwen3_coder", "react_agent", None, "hermes", None),
        ("qwen3_coder", None, "hermes", "qwen3_coder", "it is that of qwen3_coder"),
        ("llama3_json", None, None, "llama3_json", None),
        ("mistral", None, None, "mistral", None),
        ("lfm2", None, None, "lfm2", None),
        ("llama3_json", "tool_agent", None, "hermes", None),
        ("unknown", None, None, None, f"{FORMAT_KEY}=None is not the format of calls"),
        ("unknown", "tool_agent", None, "hermes", None),
        ("unknown", "react_agent", None, "hermes", None),
    ],
)
def test_the_model_s_template_decides_the_format_of_calls(
    config: Config,
    tmp_path: Path,
    call_format: str,
    agent: str | None,
    given: str | None,
    chosen: str | None,
    words: str | None,
):
    put_model(config, tmp_path / "m", call_format)
    put(config, f"{MATH}.agent", agent)
    put(config, "data.max_prompt_length", 4000)  # tokens of bytes
    assert chosen_format(config) == chosen
    put(config, FORMAT_KEY, given or chosen)
    problems = model_problems(config)
    assert len(problems) == (words is not None), problems
    if words is not None:
        assert problems[0].startswith("source='math' with agent='native_agent' makes native")
        assert words in problems[0]


@pytest.mark.parametrize("is_local", [True, False])
def test_a_format_that_verl_s_own_loop_does_not_read_is_refused(
    config: Config, tmp_path: Path, is_local: bool
):
    if is_local:
        put_model(config, tmp_path / "m", "llama3_json")
    put(config, f"{MATH}.agent", "tool_agent")
    put(config, FORMAT_KEY, "llama3_json")
    (problem,) = model_problems(config)
    assert problem.startswith(f"{FORMAT_KEY}='llama3_json': verl's tool_agent reads hermes, ")


def test_a_template_that_the_run_sets_decides_instead(run_environ: RunEnviron, tmp_path: Path):
    environ = run_environ | {"MODEL_PATH": str(tmp_path / "m")}
    calling_tokenizer("hermes").save_pretrained(tmp_path / "m")
    text = calling_tokenizer("qwen3_coder").chat_template.replace("'", "\\'")
    key = "actor_rollout_ref.model.custom_chat_template"
    config = make_plan([f"{MATH}.agent=native_agent", f"{key}='{text}'"], environ).config
    assert at(config, FORMAT_KEY) == "qwen3_coder"


@pytest.mark.parametrize(
    ("agent", "given", "is_refused"),
    [
        ("native_agent", None, True),
        (None, "herms", True),
        ("native_agent", "hermes", False),
        ("react_agent", None, False),
    ],
)
def test_native_calls_of_a_hub_s_model_need_a_format(
    config: Config, agent: str | None, given: str | None, is_refused: bool
):
    """Its chat template is not read before the start."""
    put(config, f"{MATH}.agent", agent)
    put(config, FORMAT_KEY, given)
    problems = model_problems(config)
    assert len(problems) == is_refused
    for problem in problems:
        assert problem.startswith("source='math' with agent='native_agent' makes native tool calls")
        assert "'someone/some-model'" in problem and all(name in problem for name in FORMATS)


def test_schemas_of_tools_count_among_the_tokens_of_a_prompt(config: Config, tmp_path: Path):
    put_model(config, tmp_path / "m", "hermes")
    put(config, FORMAT_KEY, "hermes")
    put(config, "data.max_prompt_length", 200)  # tokens of bytes; the schema alone has more
    put(config, f"{MATH}.tools", [])
    put(config, f"{MATH}.agent", "native_agent")
    assert model_problems(config) == []
    put(config, f"{MATH}.tools", ["calculate"])
    files = at(config, "data.train_files")
    problems = model_problems(config)
    assert [each.split(":")[0] for each in problems] == files
    assert all("12 of 12 prompts are longer than" in each for each in problems)
    put(config, f"{MATH}.tools", None)
    put(config, f"{MATH}.agent", None)  # the rows of the second file have the schemas of all tools
    assert [each.split(":")[0] for each in model_problems(config)] == files[1:]
