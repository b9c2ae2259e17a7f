"""Stock clients of SandboxFusion against our server: its own from PyPI, and verl's reward."""

import base64
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

sandbox_fusion = pytest.importorskip("sandbox_fusion")

pytestmark = pytest.mark.sandbox

ADDS = "a, b = map(int, input().split())\nprint(a + b)"
SERVE = """
import sys
from pathlib import Path
from tool_server.sandbox import sandbox
from tool_server.app import serve
from tool_server.settings import ServerSettings
sandbox.WALL_FACTOR = 1000  # the machine may be busy with other tests
serve(ServerSettings(port=0), ready_file=Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    ready = tmp_path_factory.mktemp("server") / "ready.json"
    command = [sys.executable, "-c", SERVE, str(ready)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert "listening" in server.stdout.readline()
            yield json.loads(ready.read_text())["url"]
        finally:
            server.terminate()


def run(url: str, **request):
    return sandbox_fusion.run_code(
        sandbox_fusion.RunCodeRequest(**request), endpoint=url, max_attempts=1
    )


def test_a_program_runs(url):
    answer = run(url, code="print(input()[::-1])", language="python", stdin="abc")
    assert answer.status == "Success" and answer.message == ""
    assert answer.run_result.status == "Finished"
    assert (answer.run_result.stdout, answer.run_result.return_code) == ("cba\n", 0)
    assert answer.run_result.execution_time > 0


@pytest.mark.parametrize(
    ("request_", "summary"),
    [
        ({"code": "1/0"}, "RunFailed"),
        ({"code": "while True: pass", "run_timeout": 0.3}, "RunTimeout"),
        ({"code": "print(1)"}, "Success"),
        ({"code": "int main() {", "language": "cpp"}, "CompileFailed"),
        ({"code": "int main() { return 3; }", "language": "cpp"}, "RunFailed"),
        ({"code": "exit 4", "language": "bash"}, "RunFailed"),
    ],
)
def test_its_summary_tells_how_a_program_ended(url, request_, summary):
    names = ("Success", "Failed", "CompileFailed", "CompileTimeout", "RunFailed", "RunTimeout")
    mapping = sandbox_fusion.SummaryMapping(**{name: name for name in names})
    answer = run(url, **{"language": "python"} | request_)
    assert sandbox_fusion.summary_run_code_result(answer, mapping) == summary


def test_files_go_in_and_come_out(url):
    answer = run(
        url,
        code="import helper; open('out/b.txt', 'w').write(helper.text)",
        language="python",
        files={
            "helper.py": base64.b64encode(b"text = 'made'").decode(),
            "out/a.txt": base64.b64encode(b"given").decode(),
        },
        fetch_files=["out/a.txt", "out/b.txt", "out/missing.txt"],
    )
    assert answer.status == "Success", answer
    files = {path: base64.b64decode(content) for path, content in answer.files.items()}
    assert files == {"out/a.txt": b"given", "out/b.txt": b"made"}


@pytest.mark.parametrize("path", ["../x", "/etc/x"])
def test_a_path_out_of_the_folder_is_refused(url, path):
    with pytest.raises(Exception, match="leads out of the program's folder"):
        run(url, code="1", language="python", files={path: ""})


def test_a_language_that_is_not_there_is_an_error_with_those_that_are(url):
    with pytest.raises(Exception, match="language='racket' is not known: this server runs python"):
        run(url, code="1", language="racket")


async def test_its_async_client_works_too(url):
    request = sandbox_fusion.RunCodeRequest(code="print(7)", language="python")
    answer = await sandbox_fusion.run_code_async(request, endpoint=url, max_attempts=1)
    assert answer.run_result.stdout == "7\n"


def submit(url: str, completion: str, tests: list, **config):
    request = sandbox_fusion.SubmitRequest(
        dataset="ours",
        id=3,
        completion=completion,
        config=sandbox_fusion.TestConfig(
            **{"language": "python", "dataset_type": "CommonOJDataset"}
            | {"provided_data": {"id": 3, "content": "add", "test": tests}}
            | config
        ),
    )
    return sandbox_fusion.submit(request, endpoint=url, max_attempts=1)


def case(stdin: str, stdout: str) -> dict:
    return {"input": {"stdin": stdin}, "output": {"stdout": stdout}}


def test_a_submission_is_judged_by_its_tests(url):
    answer = submit(url, f"So:\n```python\n{ADDS}\n```", [case("1 2", "3"), case("4 5", "9\n")])
    assert answer.accepted and answer.id == 3 and answer.extracted_code == ADDS
    assert [test.passed for test in answer.tests] == [True, True]
    assert answer.tests[1].exec_info.run_result.stdout == "9\n"


def test_judging_ends_at_the_first_test_that_fails_unless_all_are_wanted(url):
    tests = [case("1 2", "3"), case("1 2", "4"), case("1 2", "3")]
    answer = submit(url, ADDS, tests)
    assert not answer.accepted
    assert [test.passed for test in answer.tests] == [True, False]
    answer = submit(url, ADDS, tests, extra={"run_all_cases": True})
    assert [test.passed for test in answer.tests] == [True, False, True]


def test_a_submission_in_another_language_is_compiled(url):
    code = "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }"
    assert submit(url, f"```cpp\n{code}\n```", [case("1 2", "3")], language="cpp").accepted


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"provided_data": {}}, "provided_data.test"),
        ({"provided_data": {"test": [{"input": {"f": ""}, "output": {}}]}}, "only stdin"),
        ({"dataset_type": "HumanEvalDataset"}, "use CommonOJDataset"),
        ({"language": None}, "config.language"),
    ],
)
def test_a_submission_that_cannot_be_judged_says_why(url, config, said):
    with pytest.raises(Exception, match=said):
        submit(url, ADDS, [case("1 2", "3")], **config)


# --- verl -----------------------------------------------------------------------------------------


def score(url: str, code: str, tests: dict) -> tuple[float, list[str]]:
    reward = pytest.importorskip("verl.utils.reward_score.sandbox_fusion")
    completion = f"```python\n{code}\n```"
    value, metadata = reward.compute_score(
        f"{url}/run_code", None, 1024, completion, json.dumps(tests), timeout=2
    )
    return value, [case["status"] for case in metadata]


def test_verls_reward_runs_against_it(url):
    tests = {"inputs": ["1 2", "3 4"], "outputs": ["3", "8"]}
    assert score(url, ADDS, tests) == (0.5, ["success", "wrong_answer"])


@pytest.mark.parametrize(
    ("code", "status"), [("1/0", "runtime_error"), ("while True: pass", "timeout")]
)
def test_verls_reward_tells_how_a_program_failed(url, code, status):
    assert score(url, code, {"inputs": ["1"], "outputs": ["1"]}) == (0.0, [status])


def test_verls_reward_calls_a_function_by_its_name(url):
    tests = {"inputs": ["[1, 2]\n3"], "outputs": ["6"], "fn_name": "total"}
    code = "def total(numbers, more):\n    return sum(numbers) + more"
    assert score(url, code, tests) == (1.0, ["success"])
