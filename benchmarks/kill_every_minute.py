"""Whether a run on three hosts ends by itself, and with the right rows, if processes are killed.

    python -m benchmarks.kill_every_minute [--minutes 60] [--seed 0]

It needs root and the programs of tests/nodes. On a site of network namespaces (tests/nodes/site.py)
`setup_cluster.sh setup` and `run_mixed_training.sh start --retries N` are typed on the jumphost;
after that nobody types anything. Each minute one process of the run, of Ray or of its launcher gets
SIGKILL. At the end the run must be complete, its audit clean, and the rows of each step those of
the same run that nobody disturbed. That one trains its first steps before, to see how many steps
the minutes need, and the others afterwards.

A "large" kill ends the attempt: the run must start again, and trains a new step one or more minutes
later. Until then only "small" victims are killed, which the run outlives, because a machine that
needs longer than a minute for a start would otherwise never train. `--always-large` has no such
rule.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samplers.ledger import LedgerEntry, read_ledger
from tests.nodes.scripts import DEMO, Operator, operator_of, run_settings
from tests.nodes.site import REPOSITORY, Machine, Site, missing

TRAIN = "run_mixed_training.sh"
OVERRIDES = (
    "trainer.save_freq=1 trainer.test_freq=-1 trainer.val_before_train=false "
    "actor_rollout_ref.actor.entropy_coeff=0.01 +mixed.tool_server.restarts=1000"
)
PACE_STEPS = 8
"""Steps from which the pace of a step is taken."""

UP = 0.4
"""Share of the minutes in which the run trains, about: the rest are recoveries."""

STALL_S = 1800.0
"""Without a new step for so long, the run is given up."""

OUTLIVED_STEPS = 60

LOOK_S = 0.5

LARGE: Mapping[str, str] = {
    "launcher": "/verl-mixed train",
    "trainer": "agent_loop.training.main",
    "task runner": "ray::TaskRunner",
    "training worker": "ray::WorkerDict",
    "engine": "ray::HFServer",
    "agent loop worker": "AgentLoopWorker",
    "queue storage": "ray::SimpleStorageUnit",
    "raylet": "/raylet/raylet ",
    "head (GCS)": "/gcs/gcs_server ",
    "ray start": "/bin/ray start ",
}
"""Kind -> what its command line holds; on a host that is drawn."""

SMALL: Mapping[str, str] = {"tool server": "verl_mixed serve-tools"}
"""Kinds that the run outlives, also while it starts."""

WHILE_TRAINING: Mapping[str, str] = {"idle worker": "ray::IDLE"}
"""Kinds that the run outlives while it trains; at its start Ray makes actors of idle workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill, and how long the run was without a new step after it."""

    at_s: float
    """After the first step of the run."""

    kind: str
    host: str
    step: int
    is_large: bool
    down_s: float | None = None


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of the run that was disturbed."""

    kills: list[Kill] = field(default_factory=list)
    nothing_small: int = 0
    """Minutes without a kill, because nothing small was there while the run recovered."""

    seconds: float = 0.0
    is_complete: bool = False
    audit: str = ""
    audit_code: int = -1
    failures: list[dict] = field(default_factory=list)
    """Lines of `failures.jsonl`."""

    rows: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    undisturbed_rows: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    screen: str = ""


class Watched:
    """A run on the site, seen through its files."""

    def __init__(self, operator: Operator, name: str):
        self.operator, self.name = operator, name
        self.head = operator.site.hosts[0]
        self.folder = self.head.path(REPOSITORY / "runs" / name)

    def step(self) -> int:
        """The highest step with metrics."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith(b"}")), default=0)

    def pace_s(self) -> float:
        """Seconds from one step to the next."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        first, *_, last = [json.loads(line) for line in lines]
        return (last["time"] - first["time"]) / (last["step"] - first["step"])

    def is_done(self) -> bool:
        return (self.folder / "done").exists()

    def has_ended(self) -> bool:
        """The shell in the run's tmux session has ended."""
        pane = f"tmux display -p -t =verl_training_{self.name}: '#{{pane_dead}}'"
        return self.head.run(pane, check=False).stdout.strip() != "0"

    def screen(self) -> str:
        pane = f"tmux capture-pane -p -J -S - -t =verl_training_{self.name}:"
        return self.head.run(pane, check=False).stdout

    def rows(self) -> dict[int, list[tuple[str, str]]]:
        """Step -> the trained rows, sorted."""
        rows = defaultdict[int, list[tuple[str, str]]](list)
        for line in read_ledger(self.folder / "ledger.jsonl"):
            if isinstance(line, LedgerEntry) and line.outcome == "trained":
                rows[line.step].append((line.source, line.row_id))
        return {step: sorted(names) for step, names in rows.items()}

    def failures(self) -> list[dict]:
        path = self.folder / "failures.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Killer:
    """Chooses victims with a seed and kills them."""

    def __init__(self, hosts: list[Machine], seed: int):
        self._hosts, self._random = hosts, random.Random(seed)

    def kill(self, kinds: Mapping[str, str]) -> tuple[str, str] | None:
        """Kill one process of one of the kinds; (kind, host), None if there is none."""
        for kind in self._random.sample(sorted(kinds), len(kinds)):
            for host in self._random.sample(self._hosts, len(self._hosts)):
                found = [
                    pid
                    for pid, line in sorted(host.processes().items())
                    if kinds[kind] in line and "tmux" not in line and "bash" not in line
                ]
                if not found:
                    continue
                victim = self._random.choice(found)
                if host.run(f"kill -9 {victim}", check=False).returncode == 0:
                    return kind, host.name
        return None


def start(operator: Operator, name: str, retries: int = 0) -> Watched:
    run = Watched(operator, name)
    operator.run(f"{TRAIN} start --retries {retries} {OVERRIDES}", EXPERIMENT_NAME=name)
    return run


def wait(run: Watched, is_over: Callable[[], bool], say: Callable[[str], None]) -> None:
    """Until it is over, the run has ended, or nothing moves for `STALL_S`."""
    last, since = run.step(), time.monotonic()
    while not is_over() and not run.has_ended():
        if (step := run.step()) != last:
            last, since = step, time.monotonic()
        if time.monotonic() > since + STALL_S:
            say(f"{run.name}: no new step for {STALL_S:g} s")
            return
        time.sleep(LOOK_S)


def has_recovered(step: int, kill: Kill, failures: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a step is new since a kill, of the attempt after the one that the kill ended.

    The step under way may still end after the kill, so the failure is waited for; without one, the
    run outlived the kill if it has trained `OUTLIVED_STEPS` more.

    Args:
        step: the last step with metrics.
        kill: the large kill.
        failures: of the run since the kill.
    """
    if failures:
        return step > failures[-1]["step"]
    return step >= kill.step + OUTLIVED_STEPS


def disturb(
    run: Watched,
    outcome: Outcome,
    *,
    minutes: float,
    every_s: float,
    seed: int,
    always_large: bool,
    say: Callable[[str], None],
) -> None:
    """Kill something every `every_s` from the first step on, for `minutes` or until the end."""
    wait(run, lambda: run.step() >= 1, say)
    killer, began, number = Killer(run.operator.site.hosts, seed), time.monotonic(), 0
    trained_at = began
    large: tuple[int, float, int] | None = None
    """Index of the last large kill that the run recovers from, its time, and failures before it."""

    last_step = run.step()
    while not run.has_ended() and not run.is_done():
        now = time.monotonic()
        if (step := run.step()) > last_step:
            last_step, trained_at = step, now
        if large and has_recovered(step, outcome.kills[large[0]], run.failures()[large[2] :]):
            index, at, _ = large
            kill = outcome.kills[index]
            outcome.kills[index] = Kill(
                at_s=kill.at_s,
                kind=kill.kind,
                host=kill.host,
                step=kill.step,
                is_large=True,
                down_s=now - at,
            )
            say(f"{now - began:6.0f} s  step {step}: trains again after {now - at:.0f} s")
            large = None
        if now > trained_at + STALL_S:
            say(f"no new step for {STALL_S:g} s")
            return
        due = began + (number + 1) * every_s
        if now >= due and due <= began + 60 * minutes:
            number += 1
            kinds = SMALL if large and not always_large else {**LARGE, **SMALL, **WHILE_TRAINING}
            victim = killer.kill(kinds)
            if victim is None:
                outcome.nothing_small += 1
                say(f"{now - began:6.0f} s  step {step}: recovers, and nothing small is there")
            else:
                kind, host = victim
                is_large = kind in LARGE
                if is_large and large is None:
                    large = (len(outcome.kills), now, len(run.failures()))
                outcome.kills.append(
                    Kill(at_s=now - began, kind=kind, host=host, step=step, is_large=is_large)
                )
                say(f"{now - began:6.0f} s  step {step}: killed {kind} on {host}")
        time.sleep(LOOK_S)


def measure(
    site: Site,
    demo: Path,
    *,
    minutes: float,
    every_s: float = 60.0,
    seed: int = 0,
    steps: int | None = None,
    always_large: bool = False,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Both runs on a site on which nothing runs yet."""
    shutil.copytree(demo, site.hosts[0].path(DEMO))
    operator = operator_of(site, hosts=3)
    operator.settings |= run_settings(PACE_STEPS)
    operator.settings |= {"TRAIN_BATCH_SIZE": "12"}  # an equal part for each of three processes
    operator.run("setup_cluster.sh setup")
    outcome = Outcome()

    quiet = start(operator, "undisturbed")
    wait(quiet, quiet.has_ended, say)
    pace_s = quiet.pace_s()
    steps = steps or max(round(60 * minutes * UP / pace_s), PACE_STEPS)
    say(f"{pace_s:.1f} s a step, so {steps} steps for {minutes:g} minutes")
    operator.settings["TOTAL_TRAINING_STEPS"] = str(steps)

    began = time.monotonic()
    run = start(operator, "killed", retries=1000)
    disturb(
        run,
        outcome,
        minutes=minutes,
        every_s=every_s,
        seed=seed,
        always_large=always_large,
        say=say,
    )
    wait(run, run.has_ended, say)
    outcome.seconds = time.monotonic() - began
    outcome.is_complete, outcome.rows, outcome.failures = run.is_done(), run.rows(), run.failures()
    outcome.screen = run.screen()
    audit = f"cd {REPOSITORY} && verl-mixed audit runs/{run.name}"
    env = f". ~/.verl_mixed/{operator.settings['MASTER_IP']}/env"
    done = run.head.run(f"{env}; {audit}", check=False)
    outcome.audit, outcome.audit_code = done.stdout + done.stderr, done.returncode
    if outcome.is_complete:
        if quiet.step() < steps:
            start(operator, quiet.name)
            wait(quiet, quiet.has_ended, say)
        outcome.undisturbed_rows = quiet.rows()
    return outcome


def lines_of(outcome: Outcome) -> Iterator[str]:
    """The table, as Markdown."""
    yield "| killed | times | ended the attempt | s until a new step: median | longest |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    by_kind = defaultdict[str, list[Kill]](list)
    for kill in outcome.kills:
        by_kind[kill.kind].append(kill)
    for kind, kills in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        down = sorted(kill.down_s for kill in kills if kill.down_s is not None)
        numbers = f"{down[len(down) // 2]:.0f} | {down[-1]:.0f}" if down else "- | -"
        yield f"| {kind} | {len(kills)} | {'yes' if kills[0].is_large else 'no'} | {numbers} |"
    down_s = sum(kill.down_s or 0.0 for kill in outcome.kills)
    yield ""
    yield f"- complete: {'yes' if outcome.is_complete else 'NO'}; steps {len(outcome.rows)}"
    same = outcome.rows == outcome.undisturbed_rows
    yield f"- rows of each step as in the undisturbed run: {'yes' if same else 'NO'}"
    yield f"- audit: exit {outcome.audit_code}"
    retries = sum(line["retry"] is not None for line in outcome.failures)
    yield (
        f"- {len(outcome.kills)} kills, {retries} retries, {outcome.nothing_small} minutes with "
        "nothing small to kill"
    )
    yield (
        f"- {outcome.seconds:.0f} s from the start to the end, of which {down_s:.0f} s from a kill "
        "to a new step"
    )


def main(arguments: list[str] | None = None) -> int:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    parser.add_argument("--steps", type=int, help="of the run, instead of a number by its pace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--always-large", action="store_true", help="also while the run recovers")
    options = parser.parse_args(arguments)
    if why := missing():
        print(why)
        return 1
    from verl_mixed.demo.model import prepare_demo
    from verl_mixed.demo.recipe import Recipe

    with tempfile.TemporaryDirectory() as folder:
        demo = Path(folder) / "seed0"
        recipe = Recipe(traces=2000, min_steps=60, max_steps=60, floor=0.0, probe_prompts=2)
        prepare_demo(demo, 0, recipe=recipe, threads=1, progress=lambda line: None)
        site = Site()
        try:
            outcome = measure(
                site,
                demo,
                minutes=options.minutes,
                every_s=options.every,
                seed=options.seed,
                steps=options.steps,
                always_large=options.always_large,
                say=lambda line: print(line, flush=True),
            )
        finally:
            site.close()
    for line in outcome.failures:
        print(f"failure at step {line['step']}, retry {line['retry']}: {line['cause'][:150]}")
    if outcome.audit_code or not outcome.is_complete:
        print(outcome.audit, outcome.screen[-4000:], sep="\n")
    print()
    for line in lines_of(outcome):
        print(line)
    good = outcome.is_complete and outcome.audit_code == 0
    return 0 if good and outcome.rows == outcome.undisturbed_rows else 1


if __name__ == "__main__":
    sys.exit(main())
