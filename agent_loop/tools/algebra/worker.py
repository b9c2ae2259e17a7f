"""The algebra process: reads one expression per line and writes one answer per line, as JSON.

`agent_loop.tools.algebra.pool` starts and kills it. It limits its own memory. If its parent dies,
it ends at the end of its input, or by an alarm signal while it calculates.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable

ALARM_GRACE_S = 2.0
"""Seconds between the time limit, when the parent kills the worker, and the worker's alarm."""


def main(timeout_s: float, memory_mb: int) -> None:
    """Answer until the input ends, or until an answer used more than half of `memory_mb`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    # Answers go to a copy of stdout; stdout itself becomes stderr, because sympy may print.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from agent_loop.tools.algebra.build import solve_text

    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, timeout_s + ALARM_GRACE_S)
        answer = answer_of(json.loads(line), solve_text)
        signal.setitimer(signal.ITIMER_REAL, 0)
        last = peak_mb() > memory_mb / 2
        print(json.dumps([answer, last]), file=answers, flush=True)
        if last:
            return


def peak_mb() -> float:
    """Peak memory of this process. `ru_maxrss` is not used, because it includes the parent's memory
    before the exec."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) / 1024


def answer_of(expression: str, solve: Callable[[str], str]) -> dict[str, str]:
    """The answer of `POST /calculate`."""
    from agent_loop.tools.calculator import CalculationError

    try:
        return {"result": solve(expression)}
    except CalculationError as error:
        return {"error": str(error)}
    except RecursionError:
        return {"error": "expression nested too deep"}
    except MemoryError:
        return {"error": "the calculation needs too much memory"}


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
