"""Runs whose trajectory files are written by the trainer's own functions."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from agent_loop.records.run_folder import write_lines
from agent_loop.records.trajectory_record import Call, StopReason, Turn, line_of
from agent_loop.turns.trajectory import Trajectory
from agent_loop.turns.turn_loop import Rollout
from tests.fakes.real_tokenizers import real_tokenizer

SPOKEN = [
    ("model", "<code>1+1</code>"),
    ("tool", "<information>2</information>"),
    ("model", "<answer>2</answer>"),
]


def line(
    said: Sequence[tuple[str, str]] = tuple(SPOKEN),
    *,
    step: int = 1,
    draw: int = 0,
    member: int = 0,
    index: int = 0,
    source: str = "math",
    reward: float = 0.0,
    stop_reason: StopReason = StopReason.ANSWERED,
    calls: Sequence[Call] = (),
    **more: Any,
) -> dict[str, Any]:
    """A line of a trajectory file, with the tokens of `pieces`.

    Args:
        said: author and text of each segment.
        step: and the others: as in the file.
        more: fields to add or to write over.
    """
    tokenizer = real_tokenizer("pieces")
    trajectory = Trajectory(tokenizer.encode("What is it?"))
    for author, text in said:
        ids = tokenizer.encode(text)
        if author == "model":
            trajectory.add_model_tokens(ids, [-0.5] * len(ids))
            trajectory.cut_turn(len(ids), text)
        else:
            trajectory.add_tool_tokens(ids, text)
    trajectory.finish(0)
    rollout = Rollout(trajectory=trajectory, stop_reason=stop_reason, answer="2")
    rollout.turns = [Turn(tokens=s.length) for s in trajectory.segments if s.author == "model"]
    rollout.calls = list(calls)
    if stop_reason in (StopReason.INFRA_ERROR, StopReason.DEADLINE):
        rollout.lose("engine", "503", stop_reason)
        trajectory.without_gradient()
    record = rollout.record()
    record.step, record.key = step, f"{step:08x}.{draw}.{source}_{member}_{index}"
    record.source, record.row_id, record.draw = source, f"{source}:{draw:016x}", draw
    record.reward, record.acc = reward, float(reward >= 1)
    record.reward_parts = {"score": reward}
    record.prompt_ids, record.response_ids = trajectory.prompt_ids, trajectory.response_ids
    record.response_mask, record.log_probs = trajectory.response_mask, trajectory.log_probs
    return json.loads(line_of(record)) | more


def session(
    rows: Sequence[tuple[str, int | None, Sequence[int]]], **of_all: Any
) -> list[dict[str, Any]]:
    """The lines of a session of several rows: for each row its cause, its parent, and the numbers
    of its requests, each of which has the answer `<code>NUMBER</code>`."""
    lines = list[dict[str, Any]]()
    for index, (cause, parent, numbers) in enumerate(rows):
        said = [("model", f"<code>{number}</code>") for number in numbers]
        own = line(said, index=index, cause=cause, parent=parent, rows=len(rows), **of_all)
        for turn, number in zip(own["turns"], numbers, strict=True):
            turn["request"] = number
        lines.append(own | {"requests": max(n for *_, numbers in rows for n in numbers)})
    return lines


COMPACTED = [("", None, (1, 2)), ("summary", 0, (3,)), ("sub-agent", 3, (5,)), ("", 1, (4, 6))]
"""Rows of a session; in the order of their tree they are 0, 1, 3, 2."""


def write_run(run_dir: Path, lines: Sequence[dict[str, Any]], *, tokenizer: bool = True) -> Path:
    """A run's folder with a config, a tokenizer, and a trajectory file for each step."""
    model = run_dir.parent / "model"
    if tokenizer:
        real_tokenizer("pieces").save_pretrained(model)
    run_dir.mkdir(parents=True, exist_ok=True)
    config = {"actor_rollout_ref": {"model": {"path": str(model)}}}
    OmegaConf.save(OmegaConf.create(config), run_dir / "config.yaml")
    for step in {each["step"] for each in lines}:
        write_lines(
            run_dir / "trajectories" / f"{step}.jsonl",
            [each for each in lines if each["step"] == step],
        )
    return run_dir


def as_bytes(lines: Sequence[dict[str, Any]]) -> bytes:
    """The content of a file with these lines, every other character escaped."""
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)
