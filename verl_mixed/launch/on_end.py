"""`ON_END`: the user's command that is run when a run has ended, to tell somebody."""

import subprocess
from collections.abc import Callable, Mapping
from typing import Literal

from verl_mixed.run.state import RunFolder

TIMEOUT_S = 60.0

Verdict = Literal["complete", "failed", "stopped", "interrupted"]


def tell(
    command: str,
    folder: RunFolder,
    verdict: Verdict,
    cause: str,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> None:
    """Run the command in a shell; what goes wrong with it is printed, and changes nothing.

    Its environment has RUN_NAME, RUN_VERDICT, RUN_CAUSE (empty for a complete run), RUN_STEP and
    RUN_FOLDER.
    """
    facts = {
        "RUN_NAME": folder.path.name,
        "RUN_VERDICT": verdict,
        "RUN_CAUSE": cause,
        "RUN_STEP": str(folder.last_step()),
        "RUN_FOLDER": str(folder.path),
    }
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            env={**environ, **facts},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"ON_END failed: {error}")
        return
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        say(f"ON_END ended with exit {done.returncode}{': ' + last[0] if last else ''}")
