"""A source that searches needs a search engine: `/retrieve` would answer 503 without one."""

import json
from pathlib import Path

import pytest
import yaml

from config.schema import TOOL_CONFIG
from tests.verl_mixed.conftest import REPO_ROOT, RunEnviron, write_source
from tool_server.settings import ServerSettings
from verl_mixed.checks.config.search import given_search_problems, own_search_problems
from verl_mixed.checks.machine import services
from verl_mixed.commands.doctor_checks import _search
from verl_mixed.commands.serve_tools import _with_engine
from verl_mixed.launch.plan import make_plan
from verl_mixed.launch.tool_server import _options

LOOPS = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
SEARCHING = "mixed.sources.math.agent=search_agent"
REACT = "mixed.sources.math.agent=react_agent"
CORPUS = '{"id": "1", "contents": "\\"A\\"\\nb"}\n'


@pytest.fixture
def own(run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch) -> RunEnviron:
    """A run with a tool server of its own, and no key of Serper."""
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    return run_environ | {"TOOL_SERVER_URL": ""}


def with_tools(folder: Path, names: list[str] | None) -> str:
    """The override for agent loops of which the ReAct agent has these tools."""
    loops = yaml.safe_load((REPO_ROOT / "config/agent_loops.yaml").read_text())
    (react,) = (loop for loop in loops if loop["name"] == "react_agent")
    react["tool_names"] = names
    (folder / "loops.yaml").write_text(yaml.safe_dump(loops))
    return f"{LOOPS}={folder / 'loops.yaml'}"


def found(environ: RunEnviron, *overrides: str, key: str = "") -> list[str]:
    plan = make_plan(overrides, environ)
    return list(own_search_problems(plan.config, plan.corpus, {"SERPER_API_KEY": key}))


@pytest.mark.parametrize(
    ("override", "names", "words"),
    [
        (SEARCHING, None, "source='math' with agent='search_agent' searches, and the run's tool"),
        (REACT, None, "has all tools, search too"),
        (REACT, ["search"], "source='math' with agent='react_agent' searches"),
        (REACT, ["calculate"], ""),
        (REACT, [], ""),
        ("mixed.sources.math.agent=math_agent", None, ""),
        ("mixed.sources.nq.agent=search_agent", None, ""),  # its ratio is 0
        ("mixed.sources.math.agent=single_turn_agent", None, ""),
    ],
)
def test_who_searches_without_an_engine_is_named_with_what_to_set(
    own: RunEnviron, tmp_path: Path, override: str, names: list[str] | None, words: str
):
    problems = found(own, override, with_tools(tmp_path, names))
    assert len(problems) == bool(words)
    for problem in problems:
        assert words in problem
        for remedy in ("corpus.jsonl", "corpus_path:", "search_upstream:", "SERPER_API_KEY"):
            assert remedy in problem
        assert ("tool_names" in problem) == ("all tools" in problem)


@pytest.mark.slow
def test_any_engine_is_enough(own: RunEnviron, tmp_path: Path):
    server = "mixed.tool_server"
    assert found(own, SEARCHING, f"{server}={{search_upstream: http://x/retrieve}}") == []
    assert found(own, SEARCHING, f"{server}={{corpus_path: /x}}") == []
    assert found(own, SEARCHING, key="k" * 40) == []
    (tmp_path / "corpus.jsonl").write_text(CORPUS)
    assert found(own, SEARCHING) == []


def test_rows_name_the_agent_of_a_source_that_names_none(own: RunEnviron, tmp_path: Path):
    write_source(tmp_path / "math_train.parquet", "math", 12, agent="search_agent")
    (problem,) = found(own, "mixed.sources.math.agent=null")
    assert problem.startswith("source='math' with agent='search_agent' searches")


def test_the_corpus_is_found_beside_the_raw_file_of_a_source(own: RunEnviron, tmp_path: Path):
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "q.json").write_text(json.dumps([{"question": f"{n}?", "answer": n} for n in range(4)]))
    (raw / "corpus.jsonl").write_text(CORPUS)
    source = f"{{ratio: 1, agent: search_agent, kind: json, files: {raw / 'q.json'}}}"
    plan = make_plan([f"+mixed.sources.q={source}"], own)
    assert plan.corpus == raw / "corpus.jsonl"
    options = _options(plan)
    assert options[options.index("--corpus") + 1] == str(raw / "corpus.jsonl")


@pytest.mark.parametrize(
    ("health", "is_refused"),
    [
        ({"search": None, "passages": 0}, True),
        ({"search": "index"}, False),
        ({"search": "serper https://google.serper.dev/search"}, False),
        ({"status": "ok"}, False),  # without the token, or of another project
        ([], False),
    ],
)
def test_a_given_server_says_whether_it_searches(
    run_environ: RunEnviron, health: object, is_refused: bool
):
    config = make_plan([SEARCHING], run_environ).config
    healths = {"http://a": b'{"search": "index"}', "http://b": json.dumps(health).encode()}
    problems = list(given_search_problems(config, healths))
    assert len(problems) == is_refused
    assert all("and http://b (TOOL_SERVER_URL) has no search engine" in each for each in problems)


@pytest.mark.parametrize("given", ["[http://a,http://b]", "'http://a/, http://b/'"])
def test_doctor_asks_every_server_that_is_given(
    run_environ: RunEnviron, given: str, monkeypatch: pytest.MonkeyPatch
):
    asked: list[str] = []

    def ask(url: str) -> bytes:
        asked.append(url)
        return b'{"search": null}'

    monkeypatch.setattr(services, "ask_health", ask)
    environ = run_environ | {"TOOL_SERVER_URL": ""}
    plan = make_plan([SEARCHING, f"{TOOL_CONFIG}.server_url={given}"], environ)
    (finding,) = _search(plan, data=True)
    assert asked == ["http://a", "http://b"]
    assert "http://a, http://b (TOOL_SERVER_URL) has no search engine" in finding.words


def test_check_a_start_and_doctor_refuse_it(own: RunEnviron):
    plan = make_plan([SEARCHING], own)
    (problem,) = [each for each in plan.problems(data=False, machine=False) if "searches" in each]
    (finding,) = _search(plan, data=True)
    assert (finding.status, finding.check) == ("bad", "search")
    assert f"{finding.words}; {finding.remedy}" == problem


@pytest.mark.parametrize(
    ("key", "given", "engine"),
    [
        ("k" * 40, {}, "https://google.serper.dev/search"),
        (" \n", {}, None),
        ("two\nlines", {}, None),
        ("k" * 40, {"corpus_path": "/c"}, None),
        ("k" * 40, {"search_upstream": "http://x/retrieve"}, "http://x/retrieve"),
    ],
)
def test_a_key_alone_chooses_serper_and_is_not_shown(
    key: str,
    given: dict[str, str],
    engine: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("SERPER_API_KEY", key)
    settings = ServerSettings.model_validate(given)
    assert _with_engine(settings).search_upstream == engine
    said = capsys.readouterr().err
    assert key not in said or not key.strip()
    assert ("SERPER_API_KEY is set" in said) == (engine not in (None, given.get("search_upstream")))
