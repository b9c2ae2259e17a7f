"""Time and memory of `verl-mixed view` on a large run, as Markdown: index, pages, memory.

    python -m benchmarks.viewer

The run is synthetic: trajectories of three turns of random words, and a byte-level tokenizer that
is trained on these words. The viewer runs in a process of its own and is asked over HTTP.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from aiohttp import web
from tokenizers import ByteLevelBPETokenizer

from agent_loop.records.trajectory_record import Call, StopReason, Turn, line_of
from agent_loop.turns.trajectory import Trajectory
from agent_loop.turns.turn_loop import Rollout
from config.disk import write_whole
from verl_mixed.run.compose import load_config, save_config
from verl_mixed.views.viewer.filters import Filter
from verl_mixed.views.viewer.index import Index
from verl_mixed.views.viewer.server import create_app
from verl_mixed.views.viewer.tokens import tokenizer_of

STEPS = 20
GROUP = 8
SOURCES = ("math", "nq", "taco")
ASKED = 50
"""Requests for each page."""


# --- the run ------------------------------------------------------------------------------------


def make_run(folder: Path, trajectories: int, tokens: int) -> None:
    """Write a run of `trajectories` trajectories with about `tokens` tokens each."""
    chance = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(20_000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    tokenizer = ByteLevelBPETokenizer()
    sample = " ".join(chance.choices(words, weights, k=200_000))
    tokenizer.train_from_iterator([sample], vocab_size=8_000, show_progress=False)
    (folder / "model").mkdir(parents=True)
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    run_dir = folder / "run"
    run_dir.mkdir()
    config = {"actor_rollout_ref": {"model": {"path": str(folder / "model")}}}
    save_config(config, run_dir / "config.yaml")

    def say(trajectory: Trajectory, author: str, length: int) -> None:
        ids = tokenizer.encode(" ".join(chance.choices(words, weights, k=length))).ids[:length]
        text = tokenizer.decode(ids)
        if author == "tool":
            return trajectory.add_tool_tokens(ids, text)
        trajectory.add_model_tokens(ids, [-chance.expovariate(2.0) for _ in ids])
        trajectory.cut_turn(len(ids), text)

    def line(step: int, number: int) -> bytes:
        source, draw = SOURCES[number // GROUP % len(SOURCES)], number // GROUP
        trajectory = Trajectory(tokenizer.encode(" ".join(chance.choices(words, k=60))).ids)
        for author in ("model", "tool", "model", "tool", "model"):
            say(trajectory, author, tokens // 5)
        reward = float(chance.random() < 0.4)
        rollout = Rollout(
            trajectory=trajectory,
            stop_reason=StopReason.ANSWERED,
            answer="42",
            turns=[Turn(generate_s=1.0, tokens=tokens // 5) for _ in range(3)],
            calls=[Call(turn=n, action="search", arguments="x", status="ok") for n in (1, 2)],
        )
        record = rollout.record()
        record.step, record.key = step, f"{step:08x}.{draw}.{source}_{number % GROUP}_0"
        record.source, record.row_id, record.draw = source, f"{source}:{draw:016x}", draw
        record.reward = record.acc = reward
        record.prompt_ids, record.response_ids = trajectory.prompt_ids, trajectory.response_ids
        record.response_mask, record.log_probs = trajectory.response_mask, trajectory.log_probs
        return line_of(record)

    (run_dir / "trajectories").mkdir(parents=True, exist_ok=True)
    for step in range(1, STEPS + 1):
        own = range(trajectories // STEPS)
        write_whole(
            run_dir / "trajectories" / f"{step}.jsonl", (line(step, number) for number in own)
        )


# --- the viewer, in a process of its own --------------------------------------------------------


async def measure(run_dir: Path) -> dict[str, object]:
    """Measure opening the run twice, then each page."""
    before_mb = _memory_mb("VmHWM")
    began = time.perf_counter()
    index = Index(run_dir)
    index.refresh()
    first_s = time.perf_counter() - began
    index.close()
    began = time.perf_counter()
    index = Index(run_dir)
    index.refresh()
    again_s = time.perf_counter() - began

    decode, note = tokenizer_of(load_config(run_dir / "config.yaml"))
    runner = web.AppRunner(create_app(run_dir.name, index, decode, note), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/api"
    total = index.count(Filter())
    ids = [row["id"] for row in index.rows(Filter(), limit=total)]
    chance = random.Random(1)
    said = Counter(index.record(ids[0]).segments[0].text.split()).most_common()
    frequent, rare = said[0][0], f"{said[-1][0]}+{said[-2][0]}"
    pages = {
        "run": lambda: "run",
        "list, first page": lambda: "trajectories",
        "list, last page": lambda: f"trajectories?offset={total - 100}",
        "list by source, outcome, reward": lambda: (
            "trajectories?source=nq&outcome=solved&reward_min=0.5"
        ),
        "list by a frequent word": lambda: f"trajectories?text={frequent}",
        "list by two rarer words": lambda: f"trajectories?text={rare}",
        "one trajectory": lambda: f"trajectories/{chance.choice(ids)}",
    }
    times: dict[str, list[float]] = {}
    async with aiohttp.ClientSession() as session:

        async def ask(path: str) -> float:
            began = time.perf_counter()
            async with session.get(f"{url}/{path}") as answer:
                await answer.read()
                answer.raise_for_status()
            return 1e3 * (time.perf_counter() - began)

        for name, path in pages.items():
            times[name] = [await ask(path()) for _ in range(ASKED)]
    await runner.cleanup()
    index.close()
    return {
        "first_s": first_s,
        "again_s": again_s,
        "memory_mb": _memory_mb("VmHWM"),
        "growth_mb": _memory_mb("VmHWM") - before_mb,
        "index_mb": index.path.stat().st_size / 1e6,
        "pages_ms": times,
    }


def _memory_mb(field: str) -> float:
    for row in Path("/proc/self/status").read_text().splitlines():
        if row.startswith(field + ":"):
            return int(row.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"no field={field} in /proc/self/status: this benchmark needs Linux")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=1_000, help="of a response (1000)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.child:
        print(json.dumps(asyncio.run(measure(arguments.child))))
        return 0
    with tempfile.TemporaryDirectory() as name:
        make_run(Path(name), arguments.trajectories, arguments.tokens)
        files = (Path(name) / "run" / "trajectories").glob("*")
        size_mb = sum(path.stat().st_size for path in files) / 1e6
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.viewer", "--child", f"{name}/run"],
            stdout=subprocess.PIPE,
            check=True,
        )
    found = json.loads(done.stdout)
    print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}, SQLite "
        f"{sqlite3.sqlite_version}; {arguments.trajectories:,} trajectories of about "
        f"{arguments.tokens:,} tokens in {STEPS} files, {size_mb:,.0f} MB\n"
    )
    print("| | |\n| --- | ---: |")
    print(f"| first open: index made | {found['first_s']:.1f} s |")
    print(f"| opened again | {found['again_s'] * 1e3:.0f} ms |")
    print(f"| index on disk | {found['index_mb']:.0f} MB |")
    print(f"| memory at its peak | {found['memory_mb']:.0f} MB |")
    print(f"| of it since the imports | {found['growth_mb']:.0f} MB |\n")
    print(f"| page, asked {ASKED} times | median ms | worst ms |\n| --- | ---: | ---: |")
    for page, times in found["pages_ms"].items():
        print(f"| {page} | {statistics.median(times):.1f} | {max(times):.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
