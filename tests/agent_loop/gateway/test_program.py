"""Agent programs as real processes, on the host and in a sandbox."""

import asyncio
import json
import os
import shlex
import signal
import socket
import sys
import textwrap
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from aiohttp import web

from agent_loop.calls.guarded_process import KEPT
from agent_loop.gateway.program import AgentProgram, ProgramEnd, Serve
from agent_loop.gateway.server import MAX_CONNECTIONS, Gateway
from config.gateway import GatewayOptions, with_absolute_paths
from tests.fakes.daemons import DAEMONS, processes_with
from tool_server.isolation.errors import SandboxUnavailable
from tool_server.sandbox.bubblewrap import BubblewrapSandbox

PORT = 8123
ROW = json.dumps({"prompt": "how many?"}).encode()


def sandbox_is_missing() -> str:
    try:
        BubblewrapSandbox().close()
    except SandboxUnavailable as error:
        return str(error)
    return ""


MISSING = sandbox_is_missing()
in_sandbox = [pytest.mark.sandbox, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
WHERE = ["host", pytest.param("sandbox", marks=in_sandbox)]


@asynccontextmanager
async def nobody(listener: socket.socket) -> AsyncIterator[None]:
    with listener:
        yield


@pytest.fixture
def make() -> Callable[..., AgentProgram]:
    """A program of these lines of Python."""

    def make(where: Any, code: str, **settings: Any) -> AgentProgram:
        command = shlex.join(["python", "-c", textwrap.dedent(code)])
        return program_of(command, where, **settings)

    return make


def program_of(command: str, where: Any, **settings: Any) -> AgentProgram:
    return AgentProgram(GatewayOptions(command=command, where=where, **settings))


async def end_of(program: AgentProgram, serve: Serve = nobody, row: bytes = ROW) -> ProgramEnd:
    return await program.run({"OPENAI_API_KEY": "key"}, row, port=PORT, serve=serve)


async def until(is_true: Callable[[], object], every_s: float = 0.01) -> None:
    while not is_true():  # noqa: ASYNC110 - what other processes do sets no event
        await asyncio.sleep(every_s)


@pytest.fixture
def mark() -> Iterator[str]:
    """An argument by which the processes of a test are found."""
    text = uuid.uuid4().hex
    yield text
    for pid in processes_with(text):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """A gateway that repeats what it gets."""

    async def repeat(_: Gateway, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async for chunk in request.content.iter_any():
            await response.write(chunk)
        return response

    monkeypatch.setattr(Gateway, "_handle", repeat)
    return Gateway().serving


# --- what a program gets, and what is known of its end -------------------------------------------


@pytest.mark.parametrize("where", WHERE)
async def test_a_program_gets_its_row_its_variables_and_nothing_secret(
    make: Callable[..., AgentProgram], where: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NAMED", "1")
    monkeypatch.setenv("SECRET", "2")
    program = make(
        where,
        """
        import json, os, sys
        row = sys.stdin.read()
        assert row == open(os.environ["MIXED_ROW_FILE"]).read()
        assert os.getcwd() == os.path.realpath(os.environ["MIXED_SESSION_DIR"])
        assert sys.stdin.read() == "" and "SECRET" not in os.environ
        open("output", "w").write("relative")
        print(row, os.environ["NAMED"], os.environ["OPENAI_API_KEY"], sys.prefix, end="\\n \\n")
        """,
        env=["NAMED"],
    )
    end = await end_of(program)
    assert end == ProgramEnd(exit_code=0, answer=f"{ROW.decode()} 1 key {sys.prefix}", stderr="")


ENDS = [
    ("exit 7", {}, ProgramEnd(exit_code=7, answer=None, stderr="")),
    ("kill -9 $$", {}, ProgramEnd(exit_code=-9, answer=None, stderr="")),
    ("kill -15 $$", {}, ProgramEnd(exit_code=-15, answer=None, stderr="")),
    (r"printf 'a\n\377\n\n'; echo e >&2", {}, ProgramEnd(exit_code=0, answer="�", stderr="e\n")),
    ("exec <&-; exec >&-; exec 2>&-; exit 3", {}, ProgramEnd(exit_code=3, answer=None, stderr="")),
    (
        "echo no; mkdir a; echo ' 42 ' > $MIXED_SESSION_DIR/a/b",
        {"answer_file": "a/b"},
        ProgramEnd(exit_code=0, answer="42", stderr=""),
    ),
    ("echo 42", {"answer_file": "b"}, ProgramEnd(exit_code=0, answer=None, stderr="")),
    *(
        (
            f"{line}; echo no",
            {"answer_file": "a/b"},
            ProgramEnd(exit_code=0, answer=None, stderr=""),
        )
        for line in (
            "mkdir a; ln -s /etc/hostname a/b",
            "ln -s /etc a; ln -s hostname b",
            "mkdir -p a/b",
            "mkdir a; mkfifo a/b",
        )
    ),
]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("script", "settings", "expected"), ENDS)
async def test_the_end_is_what_the_program_left(
    where: Any, script: str, settings: dict[str, Any], expected: ProgramEnd
):
    program = program_of(shlex.join(["sh", "-c", script]), where=where, **settings)
    assert await end_of(program) == expected


@pytest.mark.parametrize("where", WHERE)
async def test_output_is_kept_to_a_bound_and_a_row_need_not_be_read(
    make: Callable[..., AgentProgram], where: str
):
    program = make(
        where,
        """
        import os, sys
        for _ in range(200):
            os.write(1, b"x" * (1 << 20))
        os.write(2, b"y" * (1 << 20))
        print("end")
        """,
    )
    end = await end_of(program, row=b"r" * (8 << 20))
    assert end.answer is not None and len(end.answer) == KEPT["stdout"] - 1  # without the last "\n"
    assert end.answer.endswith("xxend") and end.stderr == "y" * KEPT["stderr"]


async def test_output_that_an_outsider_holds_open_is_not_waited_for(tmp_path: Path):
    script = "touch $$; until [ -e go ]; do sleep 0.01; done; echo 42"
    program = program_of(shlex.join(["sh", "-c", script]), where="host", cwd=str(tmp_path))
    task = asyncio.create_task(end_of(program))
    await until(lambda: os.listdir(tmp_path))
    (pid,) = os.listdir(tmp_path)
    held = os.open(f"/proc/{pid}/fd/1", os.O_WRONLY)
    (tmp_path / "go").touch()
    assert (await task).answer == "42"
    os.close(held)


# --- nothing is left -----------------------------------------------------------------------------


@pytest.mark.parametrize("where", WHERE)
async def test_no_process_and_no_folder_outlives_the_program(
    make: Callable[..., AgentProgram],
    where: str,
    mark: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = make(where, DAEMONS.replace("MARK", repr(mark)) + "    print('done')")
    await asyncio.to_thread(program.check)
    before = len(os.listdir("/proc/self/fd"))
    end = await end_of(program)
    assert end.answer == "done"
    assert processes_with(mark) == []
    assert not [name for name in os.listdir(tmp_path) if name.startswith("mixed-")]
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("cancellations", [1, 2])
@pytest.mark.parametrize("where", WHERE)
async def test_a_cancelled_run_ends_when_everything_is_gone(
    make: Callable[..., AgentProgram], where: str, mark: str, cancellations: int
):
    program = make(where, DAEMONS.replace("MARK", repr(mark)) + "    time.sleep(1000)")
    task = asyncio.create_task(end_of(program))
    await until(lambda: len(processes_with(mark)) > 3)
    for _ in range(cancellations):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert processes_with(mark) == []


@pytest.mark.parametrize("where", WHERE)
async def test_a_run_that_is_cancelled_while_it_starts_leaves_nothing(
    make: Callable[..., AgentProgram], where: str, mark: str
):
    program = make(where, f"import time; time.sleep(1000); {mark!r}")
    await asyncio.to_thread(program.check)
    before = len(os.listdir("/proc/self/fd"))
    for processes in (0, 1, 2) * 5:
        task = asyncio.create_task(end_of(program))
        await until(lambda least=processes: len(processes_with(mark)) >= least, every_s=0)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert processes_with(mark) == []
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_a_cancelled_program_on_the_host_may_end_by_itself(mark: str, tmp_path: Path):
    script = "trap 'echo seen > seen; exit' TERM; touch ready; sleep 1000 & wait"
    command = shlex.join(["sh", "-c", script, mark])
    task = asyncio.create_task(end_of(program_of(command, where="host", cwd=str(tmp_path))))
    await until((tmp_path / "ready").exists)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (tmp_path / "seen").read_text() == "seen\n"


WORKER = """
import asyncio, sys
from tests.agent_loop.gateway.test_program import program_of, end_of

asyncio.run(end_of(program_of(sys.argv[2], where=sys.argv[1])))
"""


@pytest.mark.parametrize("where", WHERE)
async def test_a_program_does_not_outlive_a_killed_worker(
    where: str, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = textwrap.dedent(DAEMONS.replace("MARK", repr(mark))) + "time.sleep(1000)"
    command = shlex.join(["python", "-c", code])
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, where, command)
    await until(lambda: len(processes_with(mark)) > 4)
    worker.kill()
    await worker.wait()
    await until(lambda: not processes_with(mark))


@pytest.mark.parametrize("where", WHERE)
async def test_two_hundred_sessions_start_at_once(where: Any):
    program = program_of("sh -c 'echo $N'", where=where)
    await asyncio.to_thread(program.check)
    before = len(os.listdir("/proc/self/fd"))
    ends = await asyncio.gather(
        *(program.run({"N": str(n)}, ROW, port=PORT, serve=nobody) for n in range(200))
    )
    assert [end.answer for end in ends] == [str(n) for n in range(200)]
    assert len(os.listdir("/proc/self/fd")) <= before


# --- the sandbox ---------------------------------------------------------------------------------

LOOKS = """
    import os, sys
    from beside import seen
    assert sys.argv[1:] == ["agents"]
    found, public = [], ""
    roots = ["/", *(f"/proc/{pid}/{name}" for pid in os.listdir("/proc") if pid.isdigit()
                    for name in ("cwd", "root/tmp"))]
    for root in roots:
        for folder, folders, files in os.walk(root, followlinks=root != "/"):
            if folder == "/":
                python = {path.split("/")[1] for path in (sys.prefix, sys.base_prefix)}
                folders[:] = set(folders) - {"proc", "sys", "usr", "dev"} - python
            for name in files:
                path = os.path.join(folder, name)
                try:
                    text = open(path, "rb").read()
                except OSError:
                    continue
                public = public or (name == "public.txt" and text.decode())
                if text == b"the answer":
                    found.append(path)
    print(seen, public, found)
"""

ESCAPES = """
    import ctypes, glob, json, os, signal, socket
    plan = json.load(open(os.environ["MIXED_ROW_FILE"]))
    reached = []
    def attempt(what, action):
        try:
            if action() not in (-1, b"", []):
                reached.append(what)
        except OSError:
            pass
    def connect(family, address):
        with socket.socket(family) as tried:
            tried.connect(address)
    for path in plan["read"]:
        attempt(f"read {path}", lambda: open(path, "rb").read())
        attempt(f"list {path}", lambda: os.listdir(path))
    for path in plan["write"]:
        attempt(f"write {path}", lambda: open(f"{path}/x", "w"))
    for path in glob.glob("/proc/[0-9]*/environ"):
        attempt(path, lambda: plan["secret"].encode() in open(path, "rb").read() or -1)
    attempt("port of the host", lambda: connect(socket.AF_INET, ("127.0.0.1", plan["port"])))
    attempt("port of the host", lambda: connect(socket.AF_INET6, ("::1", plan["port"])))
    attempt("network", lambda: connect(socket.AF_INET, ("1.1.1.1", 53)))
    attempt("abstract socket", lambda: connect(socket.AF_UNIX, plan["abstract"]))
    attempt("machine's host", lambda: socket.socket(socket.AF_VSOCK))
    attempt("first process", lambda: os.kill(1, 9) or os.kill(1, 15))
    libc = ctypes.CDLL(None, use_errno=True)
    attempt("mount", lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, 0))
    attempt("remount", lambda: libc.mount(b"none", b"/", b"", 0x1020, 0))
    attempt("unshare", lambda: libc.unshare(0x10000000))
    attempt("setuid", lambda: os.setuid(0))
    attempt("raw socket", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    for name in ("CapPrm", "CapEff", "CapAmb"):
        attempt(name, lambda: int(status[name], 16) or -1)
    attempt("no-new-privs", lambda: 1 - int(status["NoNewPrivs"]) or -1)
    for fd in range(3, 1000):
        attempt(f"descriptor {fd}", lambda: os.fstat(fd))
    print(json.dumps(reached))
"""


def project_with_answers(folder: Path) -> Path:
    """A folder to start in, with an agent; answers are there and in `other`, beside it."""
    project, other = folder / "project", folder / "other"
    folder.chmod(0o755)
    for file in (
        *("project/data/raw.jsonl", "project/data/prepared/rows.jsonl", "project/.env"),
        *("project/runs/mine/trajectories/1.jsonl", "project/agents/rows.jsonl"),
        *("project/store/linked.jsonl", "other/train.jsonl", "other/temporary/session"),
    ):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("the answer")
    (project / "linked.jsonl").symlink_to("store/linked.jsonl")
    (project / "away").symlink_to(other)
    (folder / "alias").symlink_to(other)
    (project / "agents" / "beside.py").write_text("seen = 'beside'")
    (project / "agents" / "agent.py").write_text(textwrap.dedent(LOOKS))
    (other / "public.txt").write_text("public")
    return project


@pytest.mark.sandbox
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
class TestSandbox:
    async def test_nothing_of_the_host_is_within_reach(
        self,
        make: Callable[..., AgentProgram],
        gateway: Serve,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ):
        secret = uuid.uuid4().hex
        monkeypatch.setenv("SECRET", secret)
        (tmp_path / "secret").write_text(secret)
        (tmp_path / "cwd").mkdir()
        (tmp_path / "cwd" / "visible").write_text("yes")
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.socket(socket.AF_UNIX) as abstract,
        ):
            abstract.bind(f"\0{secret}")
            abstract.listen()
            plan = {
                "read": [
                    "/root",
                    str(tmp_path / "secret"),
                    "/etc/shadow",
                    "/home",
                    "/run",
                    "/var",
                    "/sys",
                    f"/proc/{os.getpid()}/environ",
                    __file__,
                    "/dev/mem",
                ],
                "write": [
                    "/",
                    "/usr",
                    "/etc",
                    "/dev",
                    "/root",
                    str(tmp_path),
                    str(tmp_path / "cwd"),
                    sys.prefix,
                    "/proc/sys/kernel",
                ],
                "secret": secret,
                "port": server.getsockname()[1],
                "abstract": f"\0{secret}",
            }
            cwd = str(tmp_path / "cwd")
            code = ESCAPES + "    open('visible')"
            end = await end_of(make("sandbox", code, cwd=cwd), gateway, json.dumps(plan).encode())
        # of /root only the way to the interpreter is there
        assert end.stderr == ""
        reached = json.loads(end.answer or "")
        assert [each for each in reached if each != "list /root"] == []
        assert os.listdir(cwd) == ["visible"]

    @pytest.mark.skipif(not (which("curl") and which("node")), reason="needs curl and node")
    async def test_stock_clients_reach_the_gateway_under_its_address(self, gateway: Serve):
        url = f"http://127.0.0.1:{PORT}/s/1/v1"
        script = f"""
            set -e
            post=$(curl -sS -d from-curl {url})
            test "$post" = from-curl
            head -c 30000000 /dev/urandom > /tmp/a
            curl -sS --data-binary @/tmp/a {url} | cmp - /tmp/a
            node -e '
                fetch("{url}", {{method: "POST", body: "from-node"}})
                    .then(reply => reply.text()).then(console.log)
            '
        """
        program = program_of(shlex.join(["sh", "-c", script]), where="sandbox")
        end = await end_of(program, gateway)
        assert (end.exit_code, end.stderr, end.answer) == (0, "", "from-node")

    async def test_a_program_has_a_bounded_number_of_connections(
        self, make: Callable[..., AgentProgram], gateway: Serve
    ):
        program = make(
            "sandbox",
            f"""
            import socket
            tried = [socket.create_connection(("127.0.0.1", {PORT})) for _ in range(100)]
            closed = 0
            for each in reversed(tried):
                each.settimeout(0.5)
                try:
                    closed += each.recv(1) == b""
                except ConnectionError:
                    closed += 1
                except TimeoutError:
                    break
            print(closed)
            """,
        )
        assert (await end_of(program, gateway)).answer == str(100 - MAX_CONNECTIONS)

    @pytest.mark.parametrize(
        ("code", "answer"),
        [
            (
                """
                children = 0
                try:
                    while children < 1000:
                        if os.fork() == 0:
                            time.sleep(1000)
                        children += 1
                except OSError:
                    print(children > 10 and children < 40)
                """,
                "True",
            ),
            (
                """
                def fill(path):
                    try:
                        with open(path, "wb") as file:
                            while True:
                                file.write(bytes(1 << 20))
                    except OSError as error:
                        return error.errno
                print([fill(path) for path in ("/tmp/x", "/dev/shm/x", os.environ["HOME"] + "/x")])
                """,
                "[28, 28, 28]",
            ),
            ("try: bytearray(1 << 30)\nexcept MemoryError: print('refused')", "refused"),
            ("os.fork() or time.sleep(1000)\nos.kill(-1, 9)\nprint('alive')", "alive"),
            (
                """
                if os.fork() == 0:
                    os.setsid()
                    while True:
                        try: os.fork()
                        except OSError: pass
                print("ended")
                """,
                "ended",
            ),
        ],
        ids=["fork bomb", "full disk", "memory", "signals to all", "fork bomb at the end"],
    )
    async def test_limits_hold(
        self,
        make: Callable[..., AgentProgram],
        code: str,
        answer: str,
        monkeypatch: pytest.MonkeyPatch,
    ):
        monkeypatch.setattr("agent_loop.gateway.sandbox.FILES_MB", 32)
        code = "import os, time\n" + textwrap.dedent(code)
        end = await end_of(make("sandbox", code, memory_mb=512, processes=32))
        assert (end.answer, end.exit_code) == (answer, 0), end.stderr

    async def test_answers_records_and_secrets_are_hidden_wherever_they_lie(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        project = project_with_answers(tmp_path)
        monkeypatch.chdir(project)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "other" / "temporary"))
        for cwd in (None, ".", "agents"):
            script = "agent.py" if cwd == "agents" else "agents/agent.py"
            entry = {"command": f"python {script} agents", "readable": [str(tmp_path / "alias")]}
            entry |= {} if cwd is None else {"cwd": cwd}
            named = (
                "data",
                "runs",
                ".env",
                "agents/rows.jsonl",
                "linked.jsonl",
                "away/train.jsonl",
                "not/made/yet",
            )
            made = with_absolute_paths(entry, [str(project / path) for path in named])
            end = await end_of(program_of(**{**entry, **made}, where="sandbox"), row=b"{}")
            assert (end.answer, end.stderr) == ("beside public []", "")

    async def test_what_is_made_after_the_first_session_is_hidden_from_the_next(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        os.chmod(tmp_path, 0o755)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
        (tmp_path / "temporary").mkdir()
        (tmp_path / "script.sh").write_text("echo $(cat checkpoints/rows logs/rows)")
        made = with_absolute_paths({"command": "sh script.sh", "cwd": "."}, ["checkpoints", "logs"])
        program = program_of(**{"command": "sh script.sh", **made}, where="sandbox")
        await end_of(program, row=b"{}")
        for folder in ("checkpoints", "logs"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "rows").write_text("42")
        assert (await end_of(program, row=b"{}")).answer is None


# --- check ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"command": "no-such-program x"}, "command='no-such-program' .*there is no program"),
        ({"command": "./x.py"}, r"command='./x.py' .*there is no program"),
        ({"command": "sh", "cwd": "/no/such"}, "this node has no folder /no/such"),
        ({"command": "sh -c 'x"}, "No closing quotation; correct its quotes"),
        ({"command": " "}, "write a program"),
        ({"command": "sh", "env": ["NO_SUCH_1"]}, "env names NO_SUCH_1.*export it"),
        ({"command": "sh", "readable": ["/no/such"]}, "readable='/no/such'"),
        ({"command": "sh", "answer_file": "../x"}, r"answer_file='../x'.*MIXED_SESSION_DIR"),
        ({"command": "sh", "answer_file": "/x"}, r"answer_file='/x'"),
        ({"command": "sh", "cwd": "/", "where": "sandbox"}, "secrets of the host"),
        *(
            (
                {"command": "sh", "where": "sandbox", "hidden": ["/usr/share"], **shown},
                "/usr/share.*, which lies in /usr/share: .*could read answers",
            )
            for shown in ({"cwd": "/usr/share"}, {"readable": ["/usr/share/doc/.."]})
        ),
    ],
)
def test_check_names_what_is_wrong(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        program_of(**{"where": "host", **settings}).check()


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's program reads its own folders")
def test_a_folder_that_the_sandbox_s_user_may_not_read_is_named(tmp_path: Path):
    tmp_path.chmod(0o700)
    with pytest.raises(ValueError, match=f"may not read {tmp_path} .mode 700.; run `chmod o.rX"):
        program_of("sh", where="sandbox", cwd=str(tmp_path)).check()


@pytest.mark.sandbox
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_program_that_the_sandbox_does_not_show_is_named(tmp_path: Path):
    tmp_path.chmod(0o755)
    script = tmp_path / "agent"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    program_of(str(script), where="sandbox", readable=[str(tmp_path)]).check()
    program_of("./agent", where="sandbox", cwd=str(tmp_path)).check()
    with pytest.raises(ValueError, match=r"agent, which the sandbox does not show.*`readable`"):
        program_of(str(script), where="sandbox").check()


async def test_without_isolation_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"where=sandbox.*bwrap is not on PATH.*where=host"):
        await end_of(program_of("sh", where="sandbox"))
