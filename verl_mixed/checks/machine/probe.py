"""Asks Ray through a process with a deadline, because a call to Ray may hang."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from config import child
from verl_mixed.run.versions import REPOSITORY


def ask_probe(
    words: Sequence[str], environ: Mapping[str, str], deadline_s: float, question: str = ""
) -> tuple[list[dict[str, Any]], float]:
    """The answers of a module and its arguments; its deadline if it was not done by then, else 0.

    Args:
        words: the module and its arguments. It prints one JSON object with `stage` per answer.
        environ: with RAY_AUTH_MODE and the token's place.
        question: what it reads from stdin.
    """
    wanted = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(REPOSITORY),
        "RAY_gcs_rpc_server_connect_timeout_s": "2",  # what answers, and is no Ray, is soon left
        "RAY_gcs_rpc_server_reconnect_timeout_s": "6",
    }
    late_s = 0.0
    with subprocess.Popen(
        child.command(*words),
        env={**environ, **wanted},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as probe:
        try:
            text, said = probe.communicate(question, timeout=deadline_s)
        except subprocess.TimeoutExpired:
            late_s = deadline_s
            probe.kill()
            text, said = probe.communicate()
    answers = [json.loads(line) for line in text.splitlines() if line.startswith('{"stage"')]
    if probe.returncode and not late_s:
        last = (said.strip().splitlines() or [f"exit {probe.returncode}"])[-1]
        answers.append({"stage": "refused", "why": "answer", "words": last})
    return answers, late_s
