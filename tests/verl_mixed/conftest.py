"""A run small enough to start for real: two sources of a few rows, and a tool server's health."""

import copy
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from agent_loop.training.verl_config import refusals
from config.lookup import flatten
from samplers.rows.schema import Row, row_id, write_rows
from verl_mixed.launch.plan import Plan, make_plan

REPO_ROOT = Path(__file__).resolve().parent.parent.parent

RunEnviron = dict[str, str]


def write_source(
    path: Path, source: str, count: int, agent: str = "math_agent", first: int = 0
) -> Path:
    """A parquet file with `count` rows of one source, which any reward can judge.

    Each question has a tag of its agent, because a prompt without any is refused.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(
        path,
        [
            Row(
                data_source=source,
                agent_name=agent,
                question=f"{source} question {number}<answer>",
                ability="test",
                ground_truth={
                    "target": [str(number)],
                    "answer": str(number),
                    "inputs": [""],
                    "outputs": [str(number)],
                },
                split="train",
                index=number,
                row_id=row_id(source, {"number": number}),
                extras={},
            )
            for number in range(first, first + count)
        ],
    )
    return path


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"status": "ok"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(autouse=True)
def verl_is_asked_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's own rules are asked in this process, which imports verl once, and not in a new one.

    Tests of that other process are marked with `usefixtures("verl_is_asked_elsewhere")`.
    """
    if "verl_is_asked_elsewhere" not in request.fixturenames:
        monkeypatch.setattr(
            "verl_mixed.launch.plan.verls_problems",
            lambda config: refusals(OmegaConf.create(dict(config))),
        )


@pytest.fixture
def verl_is_asked_elsewhere() -> None: ...


@contextmanager
def healthy_server() -> Iterator[str]:
    """URL of a server that says it is well."""
    server = HTTPServer(("127.0.0.1", 0), _Health)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def tool_server_url() -> Iterator[str]:
    with healthy_server() as url:
        yield url


def environ_in(folder: Path, tool_server_url: str) -> RunEnviron:
    """Settings of a run that passes every check, with rows in `folder`."""
    files = {
        split: ",".join(
            str(write_source(folder / f"{source}_{split}.parquet", source, 12, first=first))
            for source in ("math", "taco")
        )
        for split, first in (("train", 0), ("val", 100))
    }
    return {
        **os.environ,
        "PYTHONPATH": str(REPO_ROOT),
        "EXPERIMENT_NAME": "trial",
        "MODEL_PATH": "someone/some-model",
        "TRAIN_FILES": files["train"],
        "VAL_FILES": files["val"],
        "NQ_RATIO": "0",
        "MATH_RATIO": "0.5",
        "TACO_RATIO": "0.5",
        "TRAIN_BATCH_SIZE": "4",
        "ROLLOUT_N": "5",
        "TOTAL_TRAINING_STEPS": "3",
        "TOOL_SERVER_URL": tool_server_url,
        "RAY_DASHBOARD_PORT": "0",
    }


@pytest.fixture
def run_environ(
    tmp_path: Path, tool_server_url: str, monkeypatch: pytest.MonkeyPatch
) -> RunEnviron:
    """Settings of a run that passes every check, started in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    return environ_in(tmp_path, tool_server_url)


def _over(old: object, new: object) -> object:
    """The new value; sections are laid over one another."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: _over(old.get(key), value) for key, value in new.items()}


def with_overrides(plan: Plan, overrides: Sequence[str]) -> Plan:
    """The plan with other values, which no other key follows; nothing is composed anew."""
    config, keys = copy.deepcopy(plan.config), set[str]()
    known = flatten(config)
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        *path, last = override.key_or_group.split(".")
        section = reduce(lambda part, name: part.setdefault(name, {}), path, config)
        section[last] = _over(section.get(last), override.value())
        keys |= flatten(override.value(), override.key_or_group).keys()
    return replace(
        plan, config=config, changed=plan.changed | keys, added=plan.added | (keys - known.keys())
    )


@pytest.fixture(scope="session")
def common_plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Plan, Path]]:
    """The plan of `run_environ`, composed once, and the folder that it is started in."""
    folder = tmp_path_factory.mktemp("common_plan")
    with healthy_server() as url, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        plan = make_plan([], environ_in(folder, url))
        patch.undo()
        yield plan, folder


ProblemsWith = Callable[..., list[str]]
"""overrides -> what keeps the run of `run_environ` from starting with these values"""


@pytest.fixture
def problems_with(common_plan: tuple[Plan, Path], monkeypatch: pytest.MonkeyPatch) -> ProblemsWith:
    plan, folder = common_plan
    monkeypatch.chdir(folder)
    return lambda *overrides: with_overrides(plan, overrides).problems()
