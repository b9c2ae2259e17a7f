"""What the checks say about 1,500 run configs, so that rewritten checks can be compared.

    python -m tests.recorded.findings --check [--only preflight] [--sample 25]
    python -m tests.recorded.findings --write

A case is what a user types after `verl-mixed check`, with environment variables and files. The
cases are in findings_cases.jsonl. findings_files.json has the files, and the environments that many
cases share. findings.txt has what the checks said, a sentence a line below the name of the case.

The cases come from the tests of 1.1.0 and use none of them. Where a test gave a value to a single
check, the case sets it for a whole run. Left out is what a case cannot bring along: GPUs, packages
and a reasoning-gym that a test pretends to have, ports in use, nodes of a Ray cluster (2 calls),
what a resume may not change, and a few numbers that only a function was given (8 calls).
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

from tests.compose_once import compose_once
from tests.recorded.compare import (
    RECORDED,
    REPO_ROOT,
    changed,
    joined,
    normalised,
    recorded_blocks,
)

FILE = "findings.txt"
PROCESSES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a user types, and where. `<folder>` and `<server>` are filled in when it runs."""

    id: str
    words: list[str]
    """Typed after `verl-mixed check`."""

    base: str = "run"
    """Environment and files that this case has too: a name of `bases` in findings_files.json."""

    environ: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Path in the folder -> a name of `contents` in findings_files.json."""

    machine: bool = False
    """Check this machine too; only in cases where all machines are the same."""

    printed: bool = False
    """Run the whole command: verl's own rules, the estimate and the first prompts too."""


def cases() -> list[Case]:
    """All cases, in the order of the file."""
    lines = (RECORDED / "findings_cases.jsonl").read_text(encoding="utf-8").splitlines()
    return [Case(**json.loads(line)) for line in lines]


@cache
def _stored() -> dict[str, Any]:
    """`bases` and `contents`."""
    return json.loads((RECORDED / "findings_files.json").read_text(encoding="utf-8"))


def findings(case: Case, server: str) -> tuple[str, str]:
    """The case's id, and what the checks say, a sentence a line.

    Changes the environment, the current folder and, for as long as it runs, sys.path.
    """
    paths, modules = sys.path[:], {*sys.modules}
    with tempfile.TemporaryDirectory(prefix="findings-") as made:
        folder = Path(made).resolve()

        def filled(text: str) -> str:
            return text.replace("<folder>", str(folder)).replace("<server>", server)

        base = _stored()["bases"][case.base]
        for name, content in {**base["files"], **case.files}.items():
            _write(folder / name, _stored()["contents"][content], filled)
        path = os.environ["PATH"]
        os.environ.clear()
        os.environ |= {"PATH": path, "HOME": f"{folder}/home", "PYTHONPATH": str(REPO_ROOT)}
        os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "token"}
        os.environ |= {
            name: filled(text) for name, text in {**base["environ"], **case.environ}.items()
        }
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        words = [filled(word) for word in case.words]
        try:
            said = [*(_printed(words) if case.printed else _said(words, machine=case.machine))]
        finally:
            os.chdir(REPO_ROOT)
            sys.path[:] = paths
            for name in {*sys.modules} - modules:  # another case may have another file of this name
                if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                    del sys.modules[name]
    known = [(folder, "<folder>"), (server, "<server>"), (REPO_ROOT, "<checkout>")]
    known += [(sys.prefix, "<python>"), (os.uname().nodename, "<host>")]
    text = normalised("\n".join(line.replace("\n", "\\n") for line in said), known)
    text = re.sub(r"<python>/lib/python3\.\d+", "<python>/lib/python3", text)
    text = re.sub(r"\d+\.\d s of waiting", "some s of waiting", text)
    return case.id, re.sub(r"(?<=\.)[0-9a-f]{8}(?=\.(train|validation)\.parquet)", "<hash>", text)


def _said(words: Sequence[str], *, machine: bool) -> Iterator[str]:
    """The shortest way to the findings: what a plan says, or why there is none."""
    from config.schema import ConfigError
    from verl_mixed.cli import parser_for
    from verl_mixed.commands.arguments import config_overrides
    from verl_mixed.launch.plan import make_plan

    screen = StringIO()  # how AgentFly's keys are translated
    try:
        arguments = parser_for(["check"]).parse_args(["check", *words])
        plan = make_plan(config_overrides(arguments, screen), os.environ)
        found = plan.problems(data=not plan.still_to_make(), machine=machine)
        said = [f"problem: {text}" for text in found]
        said += [f"warning: {text}" for text in plan.warnings()]
    except ConfigError as error:
        said = [f"refused: {text}" for text in error.problems]
    except Exception as error:  # the command prints some of these, and the others are faults
        said = [f"raised {type(error).__name__}: {error}"]
    yield from (f"note: {line}" for line in screen.getvalue().splitlines())
    yield from said


def _printed(words: Sequence[str]) -> Iterator[str]:
    """What `verl-mixed check` prints, except the config."""
    from verl_mixed.cli import main

    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["check", *words])
    lines = out.getvalue().splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith(("--- ", "note: "))]
    yield from lines[starts[0] :] if starts else ()
    yield from err.getvalue().splitlines()
    yield f"exit code {code}"


def _write(path: Path, content: Any, filled: Any) -> None:
    """Write a file from a text, from bytes in hexadecimal, or from a recipe of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        path.write_text(filled(content), encoding="utf-8")
    elif "hex" in content:
        path.write_bytes(bytes.fromhex(content["hex"]))
    elif "folder" in content:
        path.mkdir(exist_ok=True)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist([*_rows(**content)]), path)


def _rows(
    source: str = "",
    count: int = 0,
    agent: str = "",
    first: int = 0,
    every: Mapping[str, Any] | None = None,
    cells: Mapping[str, Mapping[str, Any]] | None = None,
    rows: Sequence[dict[str, Any]] = (),
) -> Iterator[dict[str, Any]]:
    """Rows in verl's columns that any reward can judge; `every` row has some other cells, and so
    have those whose position is in `cells`. Or `rows` as they are."""
    yield from rows
    for position, number in enumerate(range(first, first + count)):
        text = str(number)
        truth = {"target": [text], "answer": text, "inputs": [""], "outputs": [text]}
        name = hashlib.sha1(json.dumps({"number": number}).encode()).hexdigest()[:16]
        info = {"split": "train", "index": number, "row_id": f"{source}:{name}", "extras": "{}"}
        row = {
            "data_source": source,
            "agent_name": agent,
            "prompt": [{"role": "user", "content": f"{source} question {text}<answer>"}],
            "ability": "test",
            "reward_model": {"style": "rule", "ground_truth": json.dumps(truth)},
            "extra_info": info,
        }
        yield row | dict(every or {}) | dict((cells or {}).get(str(position), {}))


class _Answers(BaseHTTPRequestHandler):
    """A tool server or a judge: `<server>/503/health` answers 503, `<server>/NAME/health` the text
    `served/NAME` of findings_files.json, and `<server>/health` that all is well."""

    def do_GET(self) -> None:
        name = self.path.split("/")[1]
        body = str(_stored()["contents"].get(f"served/{name}", '{"status": "ok"}')).encode()
        self.send_response(int(name) if name.isdigit() else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


def run(chosen: Sequence[Case]) -> dict[str, str]:
    """Case -> what the checks say now, in the order of `chosen`."""
    compose_once()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    judge = partial(findings, server=f"http://127.0.0.1:{server.server_port}")
    with multiprocessing.get_context("fork").Pool(PROCESSES) as pool:  # before there are threads
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = dict(pool.imap(judge, chosen, chunksize=4))
    server.shutdown()
    server.server_close()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Record what the checks say, or show what differs; 1 if something does."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--write", action="store_true", help="record what is said now")
    choice.add_argument("--check", action="store_true", help="show what differs")
    parser.add_argument("--only", metavar="ID", default="", help="cases whose id begins so")
    parser.add_argument("--sample", metavar="N", type=int, help="N of them, always the same")
    arguments = parser.parse_args(argv)
    chosen = [case for case in cases() if case.id.startswith(arguments.only)]
    if arguments.sample is not None:
        chosen = [case for case in chosen if not case.printed]  # these start a process that is slow
        chosen = random.Random(0).sample(chosen, min(arguments.sample, len(chosen)))
    found = run(chosen)
    if arguments.write:
        if len(found) < len(cases()):
            parser.error("--write records all cases; leave out --only and --sample")
        text = joined(found, "python -m tests.recorded.findings --write")
        (RECORDED / FILE).write_text(text, encoding="utf-8")
        print(f"{FILE}: {len(found)} cases")
        return 0
    difference = changed(FILE, recorded_blocks(FILE), found)
    print(difference or f"{len(found)} cases are as recorded")
    return int(bool(difference))


if __name__ == "__main__":
    sys.exit(main())
