"""Sources with the reward `judge` need options that are right, and a judge that answers."""

import asyncio
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from config.lookup import at
from tests.fakes.judge_server import running_judge
from tests.verl_mixed.conftest import RunEnviron
from verl_mixed.checks.config.modes import loop_problems
from verl_mixed.checks.config.sources import source_problems
from verl_mixed.checks.finding import Finding
from verl_mixed.checks.machine.services import judges
from verl_mixed.launch.plan import make_plan
from verl_mixed.run.compose import compose_config, resolve

KEY = "sk-not-in-any-message"
LISTED = {"object": "list", "data": [{"id": "m", "object": "model"}]}


@cache
def composed() -> dict[str, Any]:
    return resolve(compose_config(["mixed.run_dir=/somewhere"]), complete=False)


def config_with(options: Any) -> dict[str, Any]:
    """The laptop profile, where the answers of one source are judged."""
    config = deepcopy(composed())
    config["mixed"]["sources"]["nq"] |= {"ratio": 1.0, "reward": "judge", "reward_options": options}
    return config


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_BASE_URL", raising=False)
    monkeypatch.setenv("JUDGE_API_KEY", KEY)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "mixed.sources.nq.reward_options.rubric: Field required"),
        ({"rubric": "{answer}"}, "mixed.sources.nq.reward_options.model: Field required"),
        (
            {"rubric": "{answer}", "model": "m"},
            "mixed.sources.nq.reward_options: no judge: give base_url, or export JUDGE_BASE_URL",
        ),
        (
            {"rubric": "gone.md", "model": "m", "base_url": "http://j"},
            "mixed.sources.nq.reward_options.rubric: cannot read the file ",
        ),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused_by_name(options: Any, words: str) -> None:
    found = [each for each in source_problems(config_with(options), None) if "nq" in each]
    assert any(each.startswith(words) for each in found), found
    assert judges(config_with(options)) == []


def test_limits_of_judges_agree_with_one_another_and_with_the_deadline() -> None:
    options = {"rubric": "{answer}", "model": "m", "base_url": "http://j", "timeout": 60}
    config = config_with(options)
    own = {"reward": "judge", "reward_options": {**options, "timeout": 59, "slots": 2}}
    config["mixed"]["sources"]["math"] |= own
    differing, late = (each for each in loop_problems(config) if "judge m" in each)
    assert "'judge m http://j' with timeout=60 is not below mixed.deadlines.reward_s=60" in late
    assert "rate and slots of 'judge m http://j' differ from those in mixed.sources." in differing


def answering(status: int) -> Any:
    """A server whose list of models has this status."""

    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {KEY}"
        return web.json_response({"error": KEY}, status=status)

    return answer


@pytest.mark.parametrize(
    ("models", "model", "status", "words"),
    [
        (LISTED, "m", "ok", "answers and has m"),
        (LISTED, "other", "warning", "does not list model=other"),
        (None, "m", "ok", "answers"),  # 404: it has no such list
        ([], "m", "ok", "answers"),
        (answering(401), "m", "bad", "answers 401"),
        (answering(503), "m", "bad", "/models answers 503"),
        (answering(302), "m", "bad", "/models answers 302"),
        ("nobody", "m", "bad", "no answer from http://127.0.0.1:9/v1/models"),
    ],
)
async def test_a_judge_is_asked_whether_it_answers(
    models: Any, model: str, status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_judge([500], models) as server:
        url = "http://127.0.0.1:9/v1" if models == "nobody" else server.url
        monkeypatch.setenv("JUDGE_BASE_URL", url)
        config = config_with({"rubric": "{answer}", "model": model})
        (finding,) = await asyncio.to_thread(judges, config)
    assert isinstance(finding, Finding)
    assert (finding.check, finding.status) == ("judge", status) and words in finding.words
    assert ("JUDGE_API_KEY" in finding.remedy) == (words == "answers 401")
    assert KEY not in f"{finding.words} {finding.remedy}"


def test_a_start_is_refused_if_the_judge_does_not_answer(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    (tmp_path / "rubric.md").write_text("{answer}")
    options = "{rubric: rubric.md, model: m, base_url: 'http://127.0.0.1:9/v1'}"
    words = ["mixed.sources.math.reward=judge", f"+mixed.sources.math.reward_options={options}"]
    plan = make_plan(words, run_environ)
    rubric = at(plan.config, "mixed.sources.math.reward_options.rubric")
    assert rubric == str(tmp_path / "rubric.md")  # workers run elsewhere
    found = [each for each in plan.problems() if "judge" in each]
    assert len(found) == 1 and found[0].startswith("no answer from http://127.0.0.1:9/v1/models")
