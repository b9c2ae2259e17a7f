"""Mutation scores: how many small faults planted in a module make its own tests fail.

    python -m benchmarks.mutants                        # all targets, 60 minutes at most
    python -m benchmarks.mutants --target gcra --mutants 20

A mutant is one changed expression or one removed statement: `<` becomes `<=`, `and` becomes `or`, a
condition is negated, a number grows by one, a call or an assignment to a field is left out. Which
ones are tried depends on the seed and on the code around them, not on line numbers or folders, so a
moved module is tried with the same mutants.

Every mutant stands in a copy of the tracked files, so subprocesses of tests meet it too. A worker
imports other projects' packages once, and forks a child for each mutant; the child imports ours and
runs pytest until the first failure. Property tests have 25 examples, the same ones each time. A
mutant counts as killed, too, if its tests take several times as long as without it. A share says
less than its survivors: some of them change nothing that anybody can see.

`--out FILE` gets a line for each mutant.
"""

import argparse
import ast
import contextlib
import ctypes
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]

PYTEST = (
    *("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly"),
    *("--hypothesis-profile", "mutants", "-m", "not ray and not nightly and not sandbox"),
)
SLOWER = 5.0
"""A mutant whose tests take this many times as long, and `GRACE_S` more, is stopped and killed."""

GRACE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A module and the tests that are its own, the quick ones first."""

    module: str
    tests: tuple[str, ...]


TARGETS = {
    "gcra": Target(
        module="rate_limit/gcra.py",
        tests=(
            "tests/rate_limit/test_gcra.py",
            "tests/rate_limit/test_shares.py",
            "tests/rate_limit/test_file_limiter.py",
        ),
    ),
    "file_limiter": Target(
        module="rate_limit/file_limiter.py",
        tests=(
            "tests/rate_limit/test_file_limiter.py",
            "tests/rate_limit/test_waiting.py",
            "tests/rate_limit/test_tampering.py",
            "tests/rate_limit/test_stats.py",
        ),
    ),
    "mixture_plan": Target(
        module="samplers/mixture_plan.py",
        tests=(
            "tests/samplers/test_mixture_plan.py",
            "tests/samplers/test_mixture_rows.py",
            "tests/samplers/adaptive/test_curriculum.py",
            "tests/samplers/adaptive/test_windows.py",
        ),
    ),
    "replay_buffer": Target(
        module="samplers/replay_buffer.py",
        tests=("tests/samplers/test_replay_buffer.py", "tests/samplers/test_hybrid_switch.py"),
    ),
    "ledger": Target(module="samplers/ledger.py", tests=("tests/samplers/test_ledger.py",)),
    "audit": Target(
        module="samplers/audit.py",
        tests=(
            "tests/samplers/test_audit.py",
            "tests/verl_mixed/run/test_run_audit.py",
            "tests/verl_mixed/views/test_decisions.py",
        ),
    ),
    "trajectory": Target(
        module="agent_loop/turns/trajectory.py",
        tests=(
            "tests/agent_loop/turns/test_trajectory_properties.py",
            "tests/agent_loop/turns/test_turn_loop.py",
            "tests/agent_loop/turns/test_outcomes.py",
        ),
    ),
    "turn_loop": Target(
        module="agent_loop/turns/turn_loop.py",
        tests=(
            "tests/agent_loop/turns/test_turn_loop.py",
            "tests/agent_loop/turns/test_outcomes.py",
            "tests/agent_loop/turns/test_deadlines.py",
            "tests/agent_loop/turns/test_stopping.py",
            "tests/agent_loop/turns/test_trajectory_properties.py",
        ),
    ),
    "advantage": Target(
        module="agent_loop/training/advantage.py",
        tests=(
            "tests/agent_loop/training/test_advantage.py",
            "tests/agent_loop/training/test_advantage_rows.py",
            "tests/agent_loop/training/test_session_rows.py",
        ),
    ),
    "session_loss": Target(
        module="agent_loop/training/session_loss.py",
        tests=(
            "tests/agent_loop/training/test_session_rows.py",
            "tests/agent_loop/training/test_gradient.py",
        ),
    ),
    "run_state": Target(
        module="verl_mixed/run/state.py",
        tests=(
            "tests/verl_mixed/run/test_run_state.py",
            "tests/verl_mixed/run/test_run_name.py",
            "tests/verl_mixed/launch/test_retries.py",
        ),
    ),
    "tool_client": Target(
        module="agent_loop/calls/client.py",
        tests=(
            "tests/agent_loop/calls/test_client.py",
            "tests/agent_loop/calls/test_client_answers.py",
            "tests/agent_loop/calls/test_client_servers.py",
            "tests/agent_loop/calls/test_session_servers.py",
            "tests/agent_loop/calls/test_cache.py",
            "tests/agent_loop/calls/test_limiter.py",
        ),
    ),
}


# --- which mutants -----------------------------------------------------------------------------

_SWAPS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of a module's source."""

    where: str
    """Qualified name of the function or class that holds it; empty at the module's top."""

    line: int
    kind: str
    old: str
    new: str
    source: str
    """The whole module with the change."""


def _replacements(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The kinds of change for one node, with the text that takes its place."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for op in _SWAPS.get(type(node.ops[0]), ()):
            changed = ast.Compare(node.left, [op()], node.comparators)  # type: ignore[list-item]
            yield "comparison", f"({ast.unparse(changed)})"
    elif isinstance(node, ast.BinOp):
        for op in _SWAPS.get(type(node.op), ()):
            yield "arithmetic", f"({ast.unparse(ast.BinOp(node.left, op(), node.right))})"  # type: ignore[arg-type]
    elif isinstance(node, ast.BoolOp):
        for op in _SWAPS[type(node.op)]:
            yield "and, or", f"({ast.unparse(ast.BoolOp(op(), node.values))})"  # type: ignore[arg-type]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "sign", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        grown = node.value + 1 if isinstance(node.value, int) else node.value * 2 or 1.0
        yield "constant", repr(grown)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        changed = ast.Call(ast.Name(_CALLS[node.func.id]), node.args, node.keywords)
        yield "call", ast.unparse(changed)
    elif isinstance(node, ast.Return) and node.value is not None:
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield "return", "return None"
    elif isinstance(node, ast.Break):
        yield "loop", "continue"
    elif isinstance(node, ast.Continue):
        yield "loop", "break"
    elif _is_effect(node):
        yield "removed", "pass"


def _is_effect(node: ast.AST) -> bool:
    """Whether a statement can be left out and the module still has all its names."""
    if isinstance(node, ast.Expr):
        called = node.value.value if isinstance(node.value, ast.Await) else node.value
        return isinstance(called, ast.Call) and not _is_logging(called)
    if isinstance(node, ast.Assign):
        return not any(isinstance(target, ast.Name | ast.Tuple) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Delete)


def _is_logging(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and "log" in ast.unparse(call.func.value).lower()


def _conditions(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        yield node.test
    elif isinstance(node, ast.comprehension):
        yield from node.ifs


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below, without annotations, decorators, defaults of types, and texts of errors."""
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert):
        return
    if isinstance(node, ast.Call) and _is_logging(node):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def mutants_of(source: str) -> list[Mutant]:
    """All mutants of a module, in the order of its lines.

    Args:
        source: text of the module.
    """
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    raw, made = source.encode(), list[Mutant]()

    def add(node: ast.AST, where: str, kind: str, new: str) -> None:
        located: ast.expr = node  # type: ignore[assignment]  # statements and expressions have places
        assert located.end_lineno and located.end_col_offset is not None
        first = starts[located.lineno - 1] + located.col_offset
        last = starts[located.end_lineno - 1] + located.end_col_offset
        text = (raw[:first] + new.encode() + raw[last:]).decode()
        with contextlib.suppress(SyntaxError):
            compile(text, "mutant", "exec")
            old = " ".join(ast.unparse(node).split())
            made.append(
                Mutant(where=where, line=located.lineno, kind=kind, old=old, new=new, source=text)
            )

    def visit(node: ast.AST, where: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            where = f"{where}.{node.name}".lstrip(".")
        for kind, new in _replacements(node):
            add(node, where, kind, new)
        for test in _conditions(node):
            add(test, where, "negated", f"(not ({ast.unparse(test)}))")
        for child in _children(node):
            visit(child, where)

    visit(ast.parse(source), "")
    return sorted(made, key=lambda mutant: mutant.line)


def chosen(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of the mutants in the order to try them: by a hash of the seed and the code."""
    seen = Counter[str]()
    ranked: list[tuple[str, Mutant]] = []
    for mutant in mutants:
        key = "|".join((str(seed), mutant.where, mutant.kind, mutant.old, mutant.new))
        seen[key] += 1
        ranked.append((hashlib.sha256(f"{key}|{seen[key]}".encode()).hexdigest(), mutant))
    return [mutant for _, mutant in sorted(ranked, key=lambda pair: pair[0])[:count]]


# --- a worker: one copy of the tree, one fork a mutant -------------------------------------------


def _work() -> None:
    """Read orders from standard input, one line of JSON each, and answer each with one line."""
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what a killed test leaves comes to us
    os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"  # no module of ours before the fork
    for line in sys.stdin:
        order = json.loads(line)
        if "preload" in order:
            for name in order["preload"]:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
            answer: dict[str, object] = {"loaded": len(sys.modules)}
        else:
            answer = _run_forked(order["tests"], order["limit_s"], Path(order["log"]))
        print(json.dumps(answer), flush=True)


def _run_forked(tests: Sequence[str], limit_s: float, log: Path) -> dict[str, object]:
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _run_tests(tests, log)
    code: int | None = None
    while code is None and time.monotonic() - began < limit_s:
        done, status = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
        time.sleep(0.02)
    for process in [*psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return {"code": code, "seconds": round(time.monotonic() - began, 2)}


def _run_tests(tests: Sequence[str], log: Path) -> None:
    """In a forked child: run pytest, write the names of the modules that it imported, and end."""
    code = 3
    try:
        os.setsid()
        screen = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(screen, 1)
        os.dup2(screen, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.path.insert(0, os.getcwd())
        os.environ.pop("VERL_USE_EXTERNAL_PLUGINS")
        if "verl" in sys.modules:  # as the end of `import verl` does
            for point in entry_points(group="verl.plugins"):
                point.load()
        import pytest

        code = int(pytest.main([*PYTEST, *tests]))
        log.with_suffix(".modules").write_text("\n".join(sys.modules))
    finally:
        sys.stdout.flush()
        os._exit(code)


class Worker:
    """A process that runs tests in a copy of the tree."""

    def __init__(self, scratch: Path) -> None:
        self.tree = scratch / "tree"
        self.log = scratch / "log"
        environ = {
            **os.environ,
            "PYTHONPATH": str(self.tree),
            "PYTHONDONTWRITEBYTECODE": "1",  # a mutant may have the size and time of another
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled"),
        }
        command = [sys.executable, "-c", "from benchmarks.mutants import _work; _work()"]
        self._process = subprocess.Popen(
            command,
            cwd=self.tree,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **order: object) -> dict[str, object]:
        assert self._process.stdin and self._process.stdout
        print(json.dumps(order), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the worker in {self.tree} ended: {self._process.wait()}")
        return json.loads(answer)

    def run(self, tests: Sequence[str], limit_s: float) -> tuple[int | None, float]:
        """Exit code of pytest, None if it was stopped; and its seconds."""
        answer = self.ask(tests=list(tests), limit_s=limit_s, log=str(self.log))
        return answer["code"], float(str(answer["seconds"]))  # type: ignore[return-value]

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def copy_tree(target: Path) -> None:
    """Copy the tracked files, and those that git does not ignore, compiled to bytecode."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (REPOSITORY / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name)
    compiling = [sys.executable, "-m", "compileall", "-q", str(target)]
    subprocess.run(compiling, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


# --- a target --------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Result:
    """What became of a mutant."""

    target: str
    where: str
    line: int
    kind: str
    old: str
    new: str
    result: str
    """killed, stopped (too slow) or survived."""

    seconds: float


def _others(log: Path) -> list[str]:
    """The modules of other projects that the tests imported."""
    ours = {path.name for path in REPOSITORY.iterdir() if (path / "__init__.py").exists()}
    names = log.with_suffix(".modules").read_text().split("\n")
    return [name for name in names if name.partition(".")[0] not in {*ours, "__main__", "conftest"}]


def run_target(
    name: str, scratches: Sequence[Path], count: int, seed: int, until: float
) -> list[Result]:
    """Try the mutants of a module on all workers, until the time is up.

    Raises:
        RuntimeError: the tests fail without any mutant.
    """
    target = TARGETS[name]
    source = (REPOSITORY / target.module).read_text(encoding="utf-8")
    every = mutants_of(source)
    picked = chosen(every, count, seed)
    first = Worker(scratches[0])
    code, seconds = first.run(target.tests, 900)
    if code != 0:
        raise RuntimeError(f"{name}: exit {code} without a mutant; see {first.log}")
    others = _others(first.log)
    first.close()
    preload = _sound_preload(scratches[0], target, others)
    workers = [Worker(scratch) for scratch in scratches]
    queue, results, lock = list(reversed(picked)), list[Result](), threading.Lock()

    def serve(worker: Worker) -> None:
        worker.ask(preload=preload)
        _, plain_s = worker.run(target.tests, 900)
        while True:
            with lock:
                if not queue or time.monotonic() > until:
                    return
                mutant = queue.pop()
            place = worker.tree / target.module
            place.write_text(mutant.source, encoding="utf-8")
            for stale in place.parent.glob(f"__pycache__/{place.stem}.*.pyc"):
                stale.unlink()
            code, spent_s = worker.run(target.tests, SLOWER * plain_s + GRACE_S)
            found = asdict(mutant)
            del found["source"]
            result = "survived" if code == 0 else "stopped" if code is None else "killed"
            with lock:
                results.append(Result(target=name, result=result, seconds=spent_s, **found))
            place.write_text(source, encoding="utf-8")

    threads = [threading.Thread(target=serve, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for worker in workers:
        worker.close()
    kept = len(results)
    survivors = sum(result.result == "survived" for result in results)
    print(
        f"{name}: {kept} of {len(every)} mutants, {kept - survivors} killed, "
        f"tests {seconds:.0f} s in a new process",
        flush=True,
    )
    return sorted(results, key=lambda result: result.line)


def _sound_preload(scratch: Path, target: Target, others: Sequence[str]) -> list[str]:
    """The modules to import before the fork: without verl's where the tests then fail."""
    without = [name for name in others if name.partition(".")[0] not in ("verl", "transfer_queue")]
    for preload in (others, without):
        worker = Worker(scratch)
        worker.ask(preload=list(preload))
        code, _ = worker.run(target.tests, 900)
        worker.close()
        if code == 0:
            return list(preload)
    return []


def as_table(results: Sequence[Result]) -> str:
    """The killed share of each module, as markdown."""
    rows = ["| module | mutants | killed | share |", "| --- | ---: | ---: | ---: |"]
    for name, target in TARGETS.items():
        own = [result for result in results if result.target == name]
        if own:
            killed = sum(result.result != "survived" for result in own)
            share = 100 * killed / len(own)
            rows.append(f"| {target.module} | {len(own)} | {killed} | {share:.0f} % |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--mutants", type=int, default=100, help="of each module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60, help="in all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a line of JSON for each mutant is added to it")
    arguments = parser.parse_args()
    began, results = time.monotonic(), list[Result]()
    names = arguments.target or list(TARGETS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        scratches = [Path(folder) / str(number) for number in range(arguments.jobs)]
        for scratch in scratches:
            copy_tree(scratch / "tree")
        for number, name in enumerate(names):
            spent_s = time.monotonic() - began
            left_s = (60 * arguments.minutes - spent_s) / (len(names) - number)
            until = time.monotonic() + left_s  # what a quick module leaves, slower ones get
            try:
                found = run_target(name, scratches, arguments.mutants, arguments.seed, until)
            except RuntimeError as error:
                print(error, flush=True)
                continue
            results += found
            if arguments.out:
                with arguments.out.open("a", encoding="utf-8") as out:
                    out.writelines(json.dumps(asdict(result)) + "\n" for result in found)
    print(as_table(results))


if __name__ == "__main__":
    main()
