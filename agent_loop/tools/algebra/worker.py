"""The process that does algebra: an expression a line in, an answer a line out, both JSON.

Started and killed by `agent_loop.tools.algebra.pool`. It bounds its own memory, and ends by itself
when its parent is gone: at the end of its input, or by the kernel's alarm while it calculates.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable

ALARM_GRACE_S = 2.0
"""How long after the time limit the alarm rings; the parent should have killed it by then."""


def main(timeout_s: float, memory_mb: int) -> None:
    """Answer until the input ends.

    Args:
        timeout_s: of one expression.
        memory_mb: address space; half of it used once is a reason to end after that answer.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    # What sympy prints must not be taken for an answer.
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
    """Most memory that this program used. `ru_maxrss` would count the parent, which an exec does
    not forget."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) / 1024


def answer_of(expression: str, solve: Callable[[str], str]) -> dict[str, str]:
    """What `POST /calculate` says."""
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
