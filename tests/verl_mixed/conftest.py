"""A run small enough to start for real: two sources of a few rows, and a tool server's health."""

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from samplers.rows.schema import Row, row_id, write_rows

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


@pytest.fixture
def tool_server_url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Health)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def run_environ(
    tmp_path: Path, tool_server_url: str, monkeypatch: pytest.MonkeyPatch
) -> RunEnviron:
    """Settings of a run that passes every check, started in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    files = {
        split: ",".join(
            str(write_source(tmp_path / f"{source}_{split}.parquet", source, 12, first=first))
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
