"""AgentFly's quick start, really run: ./run_tests.sh --long.

The README's is run by tests/nodes/test_runs.py: `setup`, then the start without a head's name.
"""

import json
import shlex
from pathlib import Path

import pytest

from tests.e2e.conftest import demo  # noqa: F401 # a fixture
from tests.e2e.jobs import finish, start
from tests.guides.commands import QUICK_START
from tests.json_lines import read_lines
from tests.ports import free_ports

QUESTIONS = [
    {"question": "What is 15 + 27?", "answer": "42", "id": "math_001", "difficulty": "easy"},
    {"question": "Calculate 8 \u00d7 7", "answer": "56", "id": "math_002", "difficulty": "easy"},
    {
        "question": "What is 144 \u00f7 12?",
        "answer": "12",
        "id": "math_003",
        "difficulty": "medium",
    },
] * 50


@pytest.mark.algorithm
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_agentflys_quick_start_trains_to_its_end(demo: Path, tmp_path: Path) -> None:  # noqa: F811
    """The command of quick_start.py; another model, and a laptop instead of GPUs."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.json").write_text(json.dumps(QUESTIONS))
    (tmp_path / "data" / "val.json").write_text(json.dumps(QUESTIONS[:20]))
    words = shlex.split(QUICK_START.replace("Qwen/Qwen2.5-3B-Instruct", str(demo / "model")))
    # the laptop's prompts are short
    laptop = [
        "data.max_prompt_length=1000",
        f"ray_kwargs.ray_init.dashboard_port={free_ports(1)[0]}",
    ]

    said = finish(
        start(["verl-mixed", "train", *words, *laptop], tmp_path, tmp_path / "out"),
        tmp_path / "out",
    )

    folder = tmp_path / "runs" / "quick_test"
    trained = [
        one for one in read_lines(folder / "ledger.jsonl") if one.get("outcome") == "trained"
    ]
    assert len(trained) == 10 * 16
    assert {line["source"] for line in trained} == {"json"}
    assert len({line["row_id"] for line in trained}) == 3
    assert "147" in said  # copies
    assert "validation" in said
    metrics = read_lines(folder / "metrics.jsonl")[-1]["metrics"]
    assert {f"mixed/json/reward/{of}" for of in ("mean", "std", "min", "max")} <= metrics.keys()
