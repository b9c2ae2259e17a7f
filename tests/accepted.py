"""Whether the program that a command line names would accept its words; no command is run.

Our own commands and `ray` are parsed by their own parsers, and the two scripts by their `--help`.
What ssh and `bash -c` get is a command line too. Of other programs only the name is known.
"""

import argparse
import re
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import click

from verl_mixed.cli import parser_for

ROOT = Path(__file__).parents[1]
SETUP, TRAINING = "setup_cluster.sh", "run_mixed_training.sh"
ABOUT_A_RUN = ("report", "diagnose", "audit", "limiter", "watch")
"""Commands of run_mixed_training.sh that hand their options to verl-mixed."""

OF_A_HEAD = ("launch", "folder", "run_folder", "session", "may_start")
"""Commands of run_mixed_training.sh that it calls on the head, with ON_HEAD=1."""

_OTHERS = """
    apt-get bash bats benchmarks/release_check.sh cat cd chmod cmp cp curl df dmesg docker du echo
    exit export find git grep head hf id kill kubectl lint-imports ln ls mkdir mv nvidia-smi pip
    printf prometheus promtool pyright pytest rm rmdir rsync ruff run_tests.sh sbatch scancel sed
    seq set sky sort source squeue ss ssh sudo sysctl tail tar tensorboard test tmux touch umask
    unset until uv vim wandb wc xargs [ [[ { } . : true
    sinfo sacctmgr sacct scontrol srun munge unmunge enroot module dos2unix
    ssh-keygen ssh-keyscan ssh-copy-id getent ping nc ip fi_info ibstat lctl lsof umount
    ulimit free ps lscpu uname ldconfig strings loginctl systemctl modprobe ras-mc-ctl unsquashfs
    nvidia-modprobe nvidia-ctk dcgmi rocminfo py-spy conda
"""
OTHERS = frozenset(_OTHERS.split())
"""Programs and shell words besides those that are parsed."""

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=.*", re.DOTALL)


_SSH_WITH_VALUE = frozenset("BbcDEeFIiJLlmOopQRSWw")
_SSH_ALONE = frozenset("46AaCfGgKkMNnqsTtVvXxYy")


def refusal(words: Sequence[str]) -> str:
    """Why a command is refused, in words; empty if it is accepted.

    Assignments before the command, and the programs that start another one (`env`, `exec`,
    `timeout`), are left out first.
    """
    words = _without_wrappers(list(words))
    if not words:
        return ""
    program, rest = words[0].removeprefix("./"), words[1:]
    if program.endswith((SETUP, TRAINING)):
        return _of_script(Path(program).name, rest)
    if Path(program).name == "verl-mixed":
        return _of_verl_mixed(rest)
    if program == "ray":
        return _of_ray(rest)
    if program == "ssh":
        return _of_ssh(rest)
    if program == "bash" and rest[:1] == ["-c"]:
        return is_shell(rest[1]) or "; ".join(refusals(rest[1]))
    if re.fullmatch(r"python3?(\.\d+)?", Path(program).name):
        return _of_python(rest)
    if program in OTHERS or Path(program).name in OTHERS:
        return ""
    is_ours = not program.startswith("/") and (ROOT / program).is_file()
    return "" if is_ours else f"no such program: {program}"


def refusals(line: str) -> list[str]:
    """Those of each command of a shell line."""
    return [f"{shlex.join(words)}: {why}" for words in commands_of(line) if (why := refusal(words))]


def commands_of(line: str) -> list[list[str]]:
    """The words of each command of a line of shell; redirections and comments are left out.

    ValueError: a quote has no end.
    """
    line = re.sub(r"\$'(?:[^'\\]|\\.)*'", "'...'", line)  # bash's own quotes, unknown to shlex
    if inner := re.search(r"\$\(([^()]+)\)", line):  # a part of a word, perhaps
        whole = line[: inner.start()] + "..." + line[inner.end() :]
        return [*commands_of(inner[1]), *commands_of(whole)]
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    is_target = False
    for word in lexer:
        if set(word) <= set("();|&"):
            found.append([])
        elif set(word) <= set("<>"):
            is_target = True
        elif is_target:
            is_target = False
        else:
            found[-1].append(word)
    return [words for words in found if words]


def is_shell(text: str) -> str:
    """What `bash -n` says against a text; empty if it can be parsed."""
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    return done.stderr


def _without_wrappers(words: list[str]) -> list[str]:
    while words:
        if ASSIGNMENT.fullmatch(words[0]) or words[0] in ("exec", "then", "do", "if", "||", "!"):
            words = words[1:]
        elif words[0] == "env":
            words = words[1:]
            while words and words[0].startswith("-"):
                words = words[2:] if words[0] in ("-C", "-u") else words[1:]
        elif words[0] == "timeout":
            words = words[2:]
        else:
            break
    return words


def _of_verl_mixed(words: Sequence[str]) -> str:
    said = StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(StringIO()):
            parser_for(words).parse_args(words)
    except ValueError as error:
        return str(error)
    except SystemExit as end:
        return said.getvalue().strip().rpartition("\n")[2] if end.code else ""
    return ""


def _of_ssh(words: Sequence[str]) -> str:
    """The command that ssh sends: it joins its words with spaces, and a shell there splits them."""
    rest = list(words)
    while rest and rest[0].startswith("-"):
        if rest[0][1:] not in _SSH_WITH_VALUE | _SSH_ALONE:
            return f"ssh has no option {rest[0]}"
        rest = rest[2:] if rest[0][1:] in _SSH_WITH_VALUE else rest[1:]
    if not rest:
        return "ssh has no host"
    sent = " ".join(rest[1:])
    return is_shell(sent) or "; ".join(refusals(sent))


def _of_ray(words: Sequence[str]) -> str:
    from ray.scripts.scripts import cli

    command: click.Command = cli
    if not words:
        return ""  # the program's name
    try:
        context, rest = command.make_context("ray", list(words)), list(words)
        while isinstance(command, click.Group):
            name, sub, rest = command.resolve_command(
                context, [*context._protected_args, *context.args]
            )
            assert sub is not None
            context = sub.make_context(name, list(rest), parent=context)
            command = sub
    except click.exceptions.Exit:  # --help
        return ""
    except click.ClickException as error:
        return error.format_message()
    return ""


def _of_python(words: Sequence[str]) -> str:
    if words[:1] != ["-m"]:
        return ""
    try:
        is_there = find_spec(words[1]) is not None
    except ModuleNotFoundError:
        is_there = False
    return "" if is_there else f"no module {words[1]}"


@cache
def header(script: str) -> str:
    """What `--help` of a script prints."""
    text = (ROOT / script).read_text(encoding="utf-8").split("\nset -euo", 1)[0]
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.splitlines())


@cache
def script_parser(script: str) -> argparse.ArgumentParser:
    """The options in the list of a script's header, as a parser."""
    parser = argparse.ArgumentParser(prog=script, exit_on_error=False, add_help=False)
    for option, value in re.findall(r"^  (?:-\w, )?(--[a-z-]+)( [A-Z]+)?", header(script), re.M):
        parser.add_argument(option, action="store" if value else "store_true")
    for option in ("-f", "-h", "--help"):
        parser.add_argument(option, action="store_true")
    return parser


@cache
def script_commands(script: str) -> frozenset[str]:
    lines = re.findall(r"^  ((?:[a-z-]+(?:, )?)+),?(?: \[\w+\])?(?: +\S|$)", header(script), re.M)
    return frozenset(", ".join(lines).split(", "))


def _of_script(script: str, words: Sequence[str]) -> str:
    words = list(words)
    command = words.pop(0) if words and not words[0].startswith("-") and "=" not in words[0] else ""
    if script == TRAINING and command in ABOUT_A_RUN:
        options = [word for word in words if "=" not in word or word.startswith("-")]
        return _of_verl_mixed([command, "RUN", *options])
    known = script_commands(script) | (set(OF_A_HEAD) if script == TRAINING else set())
    if command not in known and not (script == TRAINING and not command):
        return f"{script} has no command {command!r}"
    try:
        _, left = script_parser(script).parse_known_args(words)
    except argparse.ArgumentError as error:
        return str(error)
    if unknown := [word for word in left if word.startswith("-")]:
        return f"{script} has no option {unknown[0]}"
    if script == TRAINING:
        verbs = ("start", "resume") if command in OF_A_HEAD else ()
        left = [word for word in left if "=" not in word and word not in verbs]
        return f"not an override: {left[0]}" if left else ""
    most = 1 if command in ("logs", "attach", "doctor") else 0
    return f"{script} {command} takes no {left[most]}" if len(left) > most else ""
