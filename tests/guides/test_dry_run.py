"""The commands that a dry run prints: shell can read them, and their programs accept them.

A printed line begins with `+ `. The lines of one dry run are typed in one shell, in their order.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.accepted import is_shell, refusals
from tests.guides.test_jumphost import RUN, SETUP, Checkout
from verl_mixed.cli import parser_for
from verl_mixed.commands.arguments import config_overrides
from verl_mixed.run.compose import compose_config

pytestmark = pytest.mark.slow

HEAD = {"MASTER_IP": "192.0.2.81", "WORKER_NODES": "192.0.2.82", "SSH_PORT": "2222"}
HEAD |= {
    "SSH_USER": "me",
    "SSH_OPTIONS": "-o 'StrictHostKeyChecking accept-new'",
    "SSH_JUMP": "you@gate",
}
OVERRIDES = "mixed.seed=3 'trainer.logger=[console, tensorboard]' \"mixed.sources.math.prompt={}\""
DRY_RUNS = (
    *(
        f"./{SETUP} {command} --dry-run --force"
        for command in ("setup", "status", "doctor", "sync")
    ),
    *(f"./{SETUP} {command} --dry-run --force" for command in ("logs node0", "attach", "restart")),
    f"./{SETUP} cleanup --dry-run --force",
    f"./{SETUP} sync --check --dry-run",
    f"./{RUN} dry-run {OVERRIDES}",
    f"./{RUN} resume --dry-run --no-sync",
    f"MASTER_IP=local WORKER_NODES= ./{RUN} start --dry-run {OVERRIDES}",
)
DEFINED = ("node_text()", "node_value()")


def printed(checkout: Checkout, typed: str, **environ: str) -> list[str]:
    """The command lines of a dry run."""
    done = checkout.type(typed, **{**HEAD, "PROFILE": "laptop", **environ})
    assert done.returncode == 0, done.stderr
    found = [line[2:] for line in done.stderr.splitlines() if line.startswith("+ ")]
    assert found, done.stderr
    return found


@pytest.mark.parametrize("typed", DRY_RUNS)
def test_every_printed_command_is_accepted(tmp_path: Path, typed: str) -> None:
    lines = printed(Checkout(tmp_path), typed)

    assert is_shell("\n".join(lines)) == ""
    tried = [line for line in lines if not line.startswith(DEFINED)]
    assert [why for line in tried for why in refusals(line.replace("< <(node_text", "<"))] == []
    to_hosts = [line for line in lines if line.startswith("ssh ")]
    assert all("2222" in line and "you@gate" in line for line in to_hosts), to_hosts


def test_the_printed_run_is_the_run_that_was_typed(tmp_path: Path) -> None:
    (line,) = printed(Checkout(tmp_path), DRY_RUNS[-1])
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True
    )
    words = done.stdout.split("\0")[1:-1]

    config = compose_config(config_overrides(parser_for(words).parse_args(words)))

    assert config.mixed.seed == 3
    assert list(config.trainer.logger) == ["console", "tensorboard"]


def test_the_printed_questions_are_answered_by_the_hosts(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    lines = printed(checkout, f"./{SETUP} status --dry-run")
    ssh = checkout.folder / "bin" / "ssh"
    ssh.write_text(
        '#!/usr/bin/env bash\nuntil [[ "$1" == bash ]]; do shift; done\nexec bash -c "$*"\n'
    )
    home = checkout.folder / "home"
    home.mkdir()

    done = subprocess.run(
        ["bash", "-e"],
        input="\n".join(line for line in lines if "ray-nodes" not in line),
        env={"HOME": str(home), "PATH": f"{ssh.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )

    assert shutil.which("tmux") is None or done.returncode == 0, done.stderr
    assert done.stdout.count("session=none") == 2, done.stdout + done.stderr
