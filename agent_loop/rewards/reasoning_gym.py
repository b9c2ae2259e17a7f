"""The reward of reasoning-gym's tasks: each task's own scorer, in killable processes.

Some scorers evaluate the answer as Python (`eval`, or sympy's `parse_expr`, which uses it). An
answer could then read the right answer from the scorer's own variables. So these scorers get
functions that evaluate literals and algebra only. Such an answer in another form (`list(range(3))`)
scores as one that cannot be read.

Beside that, a process has no environment variables, writes no files, and opens only the files of
the interpreter and its packages, as far as the kernel has Landlock; it has no sockets and starts
no processes, as far as there is a seccomp filter for the machine.
"""

import ast
import importlib
import json
import logging
import os
import re
import resource
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from agent_loop.rewards.attempt import Attempt, no_answer, verdict
from agent_loop.rewards.number import reward_number
from agent_loop.rewards.scoring import Scorer
from samplers.rows.tagged_json import untagged
from tool_server.wire.protocol import ToolBackend, ToolUnavailable

logger = logging.getLogger(__name__)

EVALUATES = (
    *("algorithmic.binary_matrix", "algorithmic.spiral_matrix", "algorithmic.string_insertion"),
    "games.n_queens",
)
"""Modules of reasoning-gym that call `eval` on an answer."""

PARSES = (
    *("algebra.intermediate_integration", "algebra.polynomial_multiplication"),
    *("algebra.simple_integration", "games.countdown", "games.puzzle24"),
)
"""Modules of reasoning-gym that call sympy's `parse_expr` on an answer."""

_NAME = re.compile(r"[^\W\d]\w*")
_ALGEBRA = re.compile(r"(?:[\w\s+\-*/^(),!]|\.(?!\s*[^\W\d]))*")
"""Text without attributes, subscripts, texts and assignments."""

NAMES = frozenset(
    (
        *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan"),
        *("sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "Abs", "pi", "oo"),
    )
)
"""Names of several letters that algebra may have; those of one letter are variables, E and I."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningReward:
    """The score of the task's own scorer, often with a part of a point for a form or a near miss.
    A prompt is solved with a score of 1.

    The part `timeout` is 1 if the scorer used up its CPU time, and `scorer_error` is 1 if it
    raised, which scorers do on answers that they cannot read. Both score 0. Without a scorer for
    the ground truth the trajectory is lost, because that says nothing about its answer.
    """

    name: str

    async def judge(self, attempt: Attempt, tools: ToolBackend) -> dict[str, float]:
        own = {"timeout": 0.0, "scorer_error": 0.0}
        if attempt.answer is None:
            return no_answer() | own
        try:
            found = await _SCORER.run(judged, attempt.ground_truth, attempt.answer)
        except ValueError as error:  # says nothing about the answer
            raise ToolUnavailable(
                f"{error}; prepare the data again, or install the reasoning-gym that made it",
                tool=self.name,
            ) from error
        if found is None:
            return verdict(0.0) | own | {"timeout": 1.0}
        if (score := reward_number(found)) is None:
            return verdict(0.0) | own | {"scorer_error": 1.0}
        return verdict(score, acc=float(score >= 1.0)) | own

    def truth_problem(self, ground_truth: Any) -> str | None:
        try:
            scorer_and_entry(ground_truth)
        except ImportError:  # where the package is missing, only a run can tell
            return None
        except ValueError as error:
            return str(error)
        return None


def scorer_and_entry(truth: Any) -> tuple[Any, dict[str, Any]]:
    """The scorer of a ground truth, with the config that made its entry; and this entry.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: reasoning-gym has no such task or no such config, or the entry is damaged.
    """
    given = truth if isinstance(truth, dict) else {}
    task, entry, config = given.get("task"), given.get("entry"), given.get("config") or {}
    if not isinstance(task, str) or not isinstance(entry, dict):
        raise ValueError("ground_truth has no `task` and `entry`, which kind=reasoning_gym writes")
    if not isinstance(config, dict):
        raise ValueError("ground_truth.config is no object")
    try:
        entry = untagged(entry)
        lacks = {"question", "answer", "metadata"} - entry.keys()
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"ground_truth.entry of task={task!r} is damaged: {error}") from error
    if lacks:
        raise ValueError(f"ground_truth.entry has no {', '.join(sorted(lacks))}")
    return _scorer(task, json.dumps(config, sort_keys=True)), entry


@lru_cache(256)
def _scorer(task: str, config: str) -> Any:
    """The scorer of a task; `config` is a JSON object of what differs from the task's defaults."""
    factory: Any = importlib.import_module("reasoning_gym.factory")
    if task not in factory.DATASETS:
        raise ValueError(f"the reasoning-gym that is installed has no task={task!r}")
    make, config_type = factory.DATASETS[task]
    try:
        # no scorer depends on the seed, and with one item no task spends time on making more
        made = config_type(**untagged(json.loads(config)), seed=0, size=1)
        return make(config=made).score_answer
    except Exception as error:  # tasks check their configs with asserts, and raise anything
        raise ValueError(
            f"the reasoning-gym that is installed makes no scorer of task={task!r} with "
            f"config={config:.300}: {error!r:.300}"
        ) from error


# --- in the processes -----------------------------------------------------------------------------


def judged(truth: Any, answer: str) -> float:
    """The score of an answer; NaN if the scorer raised, or gave no number.

    Raises:
        ValueError: there is no scorer for the ground truth, whatever the answer is.
    """
    scorer, entry = scorer_and_entry(truth)
    try:
        return float(scorer(answer, entry))
    except Exception:  # on answers that they cannot read scorers raise anything
        return float("nan")


def algebra(text: str) -> str:
    """The text, if it is algebra.

    Raises:
        ValueError: it is not, so that evaluating it could run code.
    """
    others = {name for name in _NAME.findall(text) if len(name) > 1} - NAMES
    if others or not _ALGEBRA.fullmatch(text):
        raise ValueError(f"no algebra: {text:.80}")
    return text


def _prepare() -> None:
    """Prepare a process: scorers evaluate no code, and the process gives up rights."""
    for name in EVALUATES:
        vars(importlib.import_module(f"reasoning_gym.{name}"))["eval"] = ast.literal_eval
    sympy: Any = importlib.import_module("sympy")
    parse = sympy.parse_expr

    def parse_algebra(text: str, *arguments: Any, **options: Any) -> Any:
        return parse(algebra(text), *arguments, **options)

    sympy.parse_expr = parse_algebra
    for name in PARSES:
        module = vars(importlib.import_module(f"reasoning_gym.{name}"))
        if "parse_expr" in module:
            module["parse_expr"] = parse_algebra
    _give_up_rights()


def _give_up_rights() -> None:
    os.environ.clear()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        from tool_server.isolation import confine
        from tool_server.isolation.host import readable_paths
        from tool_server.isolation.seccomp import build_filter

        packages = [Path(path) for path in sys.path if "-packages" in path]
        confine.no_new_privs()
        confine.restrict_files(readable_paths(packages), ["/dev/null"], [])
        confine.leave_root(None)
        confine.load_filter(build_filter(processes=False))
    except (OSError, KeyError, RuntimeError) as error:
        # no code of a model runs here, so this is the second line of defence
        logger.warning("scorers of reasoning-gym are not confined error=%r", error)
    with open(os.devnull, "w") as nothing:  # scorers print, and may write no file
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)


_SCORER = Scorer("reasoning_gym", _prepare)
