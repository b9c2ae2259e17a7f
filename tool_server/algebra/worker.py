"""The algebra process: reads one expression per line and writes one answer per line, as JSON.

`tool_server.algebra.pool` starts and kills it. It limits its own memory. If its parent dies,
it ends at the end of its input, or by an alarm signal while it calculates.
"""

import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable

ALARM_GRACE_S = 2.0
"""Seconds between the wall limit, when the parent kills the worker, and the worker's alarm."""

C_CODE_GRACE_S = 1
"""CPU seconds after the limit until the kernel ends a worker whose C code does not end."""


class TooSlow(BaseException):
    """The CPU time is used up. It is no `Exception`, because sympy would catch it and go on."""


def _interrupt(number: int, frame: object) -> None:
    raise TooSlow


def main(cpu_s: float, wall_s: float, memory_mb: int) -> None:
    """Answer until the input ends, or until an answer used its CPU time or more than half of
    `memory_mb`."""
    signal.signal(signal.SIGPROF, _interrupt)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    # Answers go to a copy of stdout; stdout itself becomes stderr, because sympy may print.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from tool_server.algebra.build import solve_text

    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, wall_s + ALARM_GRACE_S)
        used = resource.getrusage(resource.RUSAGE_SELF)
        kill_at = math.ceil(used.ru_utime + used.ru_stime + cpu_s) + C_CODE_GRACE_S
        resource.setrlimit(resource.RLIMIT_CPU, (kill_at, resource.RLIM_INFINITY))
        last = False
        try:
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            try:
                answer = answer_of(json.loads(line), solve_text)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        except TooSlow:
            answer, last = time_limit(cpu_s), True
        signal.setitimer(signal.ITIMER_REAL, 0)
        last = last or peak_mb() > memory_mb / 2
        print(json.dumps([answer, last]), file=answers, flush=True)
        if last:
            return


def time_limit(cpu_s: float) -> dict[str, str]:
    """The answer to an expression that takes too long."""
    return {"error": f"time limit: the calculation took longer than {cpu_s:g} s"}


def peak_mb() -> float:
    """Peak memory of this process. `ru_maxrss` is not used, because it includes the parent's memory
    before the exec."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) / 1024


def answer_of(expression: str, solve: Callable[[str], str]) -> dict[str, str]:
    """The answer of `POST /calculate`."""
    from tool_server.calculator import CalculationError

    try:
        return {"result": solve(expression)}
    except CalculationError as error:
        return {"error": str(error)}
    except RecursionError:
        return {"error": "expression nested too deep"}
    except MemoryError:
        return {"error": "the calculation needs too much memory"}


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
