"""What is said where no signature knows the cause; what is no failure of the run at all."""

import pytest

from verl_mixed.diagnose.diagnose import describe
from verl_mixed.diagnose.findings import Finding
from verl_mixed.diagnose.log_scan import Scan

DIED = "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."
STEP = "(TaskRunner pid=7) step:{} - actor/loss:0.1 - actor/grad_norm:0.6 - timing_s/step:6.1\n"
TASK = "(TaskRunner pid=7) "


def scanned(log: str) -> Scan:
    scan = Scan()
    scan.read([log.encode()], "train.log")
    return scan


def findings(log: str) -> list[Finding]:
    return scanned(log).ordered()


def traceback(*errors: str, file: str = "/srv/me/reward.py", before: str = "", by: str = "") -> str:
    joint = by or "The above exception was the direct cause of the following exception:"
    parts = [
        f'Traceback (most recent call last):\n  File "{file}", line 9, in score\n    f()\n{error}\n'
        for error in errors
    ]
    return "".join(f"{before}{line}\n" for line in f"\n{joint}\n\n".join(parts).splitlines())


CRASHES = {
    # what ended the run -> (log, a text of the line that is shown)
    "the first exception of a chain": (
        traceback("KeyError: 'golden'", "own.RewardError: row 7"),
        "KeyError: 'golden'",
    ),
    "an exception during another": (
        traceback("KeyError: 'a'", "own.B: 7", by="During handling of the above exception, x:"),
        "KeyError: 'a'",
    ),
    "what Ray carries": (
        'Traceback (most recent call last):\n  File "ray/worker.py", line 1, in get\n'
        "ray.exceptions.RayTaskError(KeyError): \x1b[36mray::TaskRunner.run()\x1b[39m (pid=7)\n"
        "  File \"/srv/me/reward.py\", line 9, in score\nKeyError: 'golden'\n",
        "KeyError: 'golden'",
    ),
    "a worker's exception, before the death of its actor": (
        traceback("own.Broken: 7", before=TASK) + traceback(DIED),
        "own.Broken: 7",
    ),
    "a worker's exception, below a warning of another process": (
        f"(Other pid=8) WARNING judge: {'x' * 300} retry 2/3\n"
        + traceback("own.BrokenError: 7", before=TASK),
        "own.BrokenError: 7",
    ),
    "a worker's exception, before a script ends long after": (
        traceback("own.BrokenError: 7", before=TASK)
        + f"{TASK}bye\n" * 60
        + "ERROR: train.sh failed\n",
        "own.BrokenError: 7",
    ),
    "an exception below a line of INFO": (
        "12/09 06:49:23 - own - INFO - saving\n" + traceback("own.BrokenError: 7"),
        "own.BrokenError: 7",
    ),
    "an exception with a launcher's prefix": (
        traceback("own.BrokenError: 7", before="[worker-0] ") + traceback(DIED),
        "own.BrokenError: 7",
    ),
    "an exception with a container engine's prefix": (
        "".join(
            f"2026-06-28T06:04:{second:02}.7Z stderr F {line}\n"
            for second, line in enumerate(traceback("own.BrokenError: 7").splitlines())
        ),
        "own.BrokenError: 7",
    ),
    "an exception of a program that a launcher sums up": (
        "WARNING:root:slow\n"
        + traceback("own.BrokenError: 7")
        + "[x] [ERROR] bye\n"
        + traceback(DIED),
        "own.BrokenError: 7",
    ),
    "an exception that led to another traceback": (
        traceback("KeyError: 'a'") + "== Status ==\n" * 9 + traceback("own.TrialError: 1 of 1"),
        "KeyError: 'a'",
    ),
    "an exception that a wrapper carries": (
        traceback("own.WrapperError: Caught it:")
        + traceback("own.BrokenError: 7").replace("Traceback", "Original Traceback"),
        "own.BrokenError: 7",
    ),
    "an exception of a rank": (
        traceback("own.WrapperError: ranks [0]")
        + traceback("own.BrokenError: 7").replace("last):", "last): (RANK 0)"),
        "own.BrokenError: 7",
    ),
    "an exception without words": (traceback("AssertionError"), "AssertionError, raised by `f()`"),
    "an exception behind a time-out": (
        traceback("own.Broken: 7", "TimeoutError: timed out"),
        "own.Broken: 7",
    ),
    "a time-out alone": (traceback("TimeoutError: timed out"), "TimeoutError: timed out"),
    "a segmentation fault": ("run.sh: line 3: 81 Segmentation fault (core dumped)\n", "run.sh"),
    "a killed program": ("fine\nKilled\n", "Killed"),
    "a check of Ray's": (
        "[2026-11-22 08:51:58,244 C 81 99] (raylet) main.cc:7: the table is torn\n",
        "the table is torn",
    ),
    "an end of a raylet": (
        "[2026-11-22 08:51:58,244 E 81 99] (raylet) main.cc:7: exiting, the table is torn\n",
        "the table is torn",
    ),
    "ssh's words": ("ssh: error in the table of keys\n", "table of keys"),
    "tmux's words": ("fine\ntmux: error: the table is torn\n", "the table is torn"),
    "an exception after pip": (
        "Successfully installed own-1.0\n" + traceback("own.BrokenError: 7"),
        "own.BrokenError: 7",
    ),
    "a wrong argument": ("main.py: error: unrecognized arguments: --x\n", "unrecognized"),
    "srun's words": ("srun: error: the table is torn\n", "the table is torn"),
}


@pytest.mark.parametrize("what", CRASHES)
def test_an_error_that_no_signature_knows_is_shown_as_the_cause(what: str) -> None:
    log, says = CRASHES[what]

    found = findings("fine\n" * 50 + STEP.format(3) + log + "(W pid=1) bye\n" * 5)

    assert found[0].signature.id == "unknown-error"
    assert found[0].severity == "fatal"
    assert says in found[0].first.text


def test_the_exception_that_followed_is_shown_too() -> None:
    shown = "\n".join(describe(scanned(CRASHES["the first exception of a chain"][0])))

    assert "line:   KeyError: 'golden'" in shown
    assert "then:   own.RewardError: row 7" in shown


def test_where_only_consequences_are_known_rays_error_lines_are_shown() -> None:
    line = "[2026-11-22 08:51:58,244 E 81 99] (raylet) table.cc:7: the table is torn"

    assert describe(scanned(f"{line}\n{DIED}\n"))[-1].endswith(line)


SURVIVED = {
    # what a run goes on after
    "a worker's exception": traceback("KeyError: 'golden'", before=TASK),
    "an exception of the driver": traceback("KeyError: 'golden'"),
    "a fatal signature": "RuntimeError: CUDA error: misaligned address\n",
    "a line of a program": "ssh: error in the table of keys\n",
}


@pytest.mark.parametrize("what", SURVIVED)
def test_what_a_run_goes_on_after_is_not_fatal(what: str) -> None:
    for after in (
        STEP.format(4) + STEP.format(5),
        "{'train_runtime': 7.1, 'epoch': 3.0}\n",
        "0: submitit INFO - Job completed successfully\n",
        "INFO:agent.server.api:[default] worker group successfully finished. Waiting 300 seconds\n",
    ):
        found = findings(SURVIVED[what] + after)
        assert [each for each in found if each.severity == "fatal"] == []


def test_a_known_warning_that_ends_a_run_is_its_cause() -> None:
    name = "socket.gaierror: [Errno -3] Temporary failure in name resolution"
    found = findings(traceback(name, before="[worker-0] ") + f"[worker-1] {DIED}\n")

    assert (found[0].signature.id, found[0].severity) == ("name-resolution", "fatal")


@pytest.mark.parametrize(("after", "severity"), [("", "fatal"), ("fine\n" * 9, "warning")])
def test_an_exception_below_a_warning_is_one_if_its_process_goes_on(
    after: str, severity: str
) -> None:
    log = "WARNING:own:7\n" + traceback("OSError: No space left on device") + after

    assert [each.severity for each in findings(log)] == [severity]


def test_an_end_by_hand_is_no_failure() -> None:
    found = findings(STEP.format(1) + traceback("KeyboardInterrupt"))

    assert [(each.signature.id, each.severity) for each in found] == [("interrupted", "warning")]


MILD = (
    "WARNING 11-22 09:19:52 [platform.py:7] No CUDA GPUs are available",
    "WARNING:2026-11-22 08:51:58,244:No space left on device: the cache is switched off",
    "2026-11-22 08:51:58,244 - WARNING - own.cache - No space left on device",
    "/srv/x/a.py:7: UserWarning: No CUDA GPUs are available",
    "No space left on device, retrying in 3 s",
    "slurmstepd: error: *** STEP 7.2 ON n1 CANCELLED AT 2026-05-01T03:55:40 ***",
)


@pytest.mark.parametrize("line", MILD)
def test_what_its_writer_calls_a_warning_is_one(line: str) -> None:
    assert [each.severity for each in findings(f"{line}\n")] == ["warning"]
    assert findings(f"{line}\nOSError: No space left on device\n")[0].severity == "fatal"


RESPONSE = traceback("torch.OutOfMemoryError: CUDA out of memory.", file="a.py")
SAMPLE = (
    f"{TASK}[prompt] <|im_start|>user\n{TASK}Why?<|im_end|>\n{TASK}[response] I ran it:\n"
    + "".join(f"{TASK}{line}\n" for line in RESPONSE.splitlines())
    + f"{TASK}Killed\n{TASK}OSError: [Errno 28] No space left on device\n"
    + f"{TASK}[ground_truth] 7\n{TASK}[score] 0.0\n"
)
NOISE = {
    "a sample of a validation": SAMPLE,
    "the same without Ray's prefix": SAMPLE.replace(TASK, ""),
    "a trajectory as JSON": '{"step": 3, "response": "Traceback (most recent call last):\\n  File '
    '\\"a.py\\"\\nModuleNotFoundError: No module named \'sympy\'", "score": 0.0}\n',
    "a tool's result, quoted": f"{TASK}turn=2 tool_result='Traceback (most recent call last):\\n"
    "ModuleNotFoundError: No module named \\'sympy\\''\n",
    "messages, quoted": f"{TASK}[{{'role': 'tool', 'content': 'CUDA out of memory. Killed'}}]\n",
    "a tool's tag": f"{TASK}<tool_response>\n{TASK}OSError: No space left on device\n"
    f"{TASK}</tool_response>\n",
    "a model's own program": traceback("ZeroDivisionError: division by zero", file="<string>"),
    "a model's program in a file": traceback("KeyError: 7", file="/tmp/tmpab12/main.py"),
    "names of metrics": f"{TASK}critic/error_rate/mean: 0.1, val/timeout_rate: 0.0, killed=0\n",
    "a progress bar": "tool error rate:  31%|###       | 5/16 [00:49<01:30, 8.12s/it]\r",
    "a warning of Python": "/srv/x/a.py:7: UserWarning: Failed to load the fast kernel: error 7\n",
    "a connection that is tried again": "n1:5:7 [0] NCCL INFO socketPollConnect: connect returned "
    "Connection refused, retrying (1/34) after sleep for 100 msec\n",
    "a retry": "WARNING:2026-11-22 08:51:58,244:request failed: timeout=3, retrying (1/5)\n",
    "an exception that is retried": f"{TASK}WARNING - attempt 1 of 3 failed, retrying\n"
    + traceback("own.Broken: 7", before=TASK),
    "an exception that is retried, as the next line says": traceback("own.BrokenError: 7")
    + "saving failed (attempt 1/5), retrying in 30 s\n",
    "a failed retry": "wandb: ERROR Retry attempt failed:\n" + traceback("own.BrokenError: 7"),
    "a bus that corrects an error": "kernel: [7.6] pcieport 0000:9a:00.0: PCIe Bus Error: "
    "severity=Corrected, type=Data Link Layer\n",
    "an exception of a destructor": "Exception ignored in: <function A.__del__ at 0x7f>\n"
    + traceback("AttributeError: 'A' object has no attribute 'b'"),
    "Ray's metrics": "[2026-11-22 08:51:58,244 E 81 99] core_worker_process.cc:837: Failed to "
    "establish connection to the metrics exporter agent. Metrics will not be exported.\n",
    "a package that is not there": "WARNING 11-22 09:19:52 [interface.py:171] Failed to import "
    "from vllm._C: ModuleNotFoundError(\"No module named 'vllm._C'\")\n",
    "a count of errors": "finished: 0 errors, 0 failed, 12 ok\n",
    "an INFO line": "INFO 11-22 09:19:52 [config.py:7] no error handler is set\n",
    "a healthy srun": "srun: job 4711 has been allocated resources\n",
}


@pytest.mark.parametrize("noise", NOISE)
def test_noise_of_a_healthy_run_is_no_finding(noise: str) -> None:
    """Neither in the middle of a run nor at its end."""
    assert [each.signature.id for each in findings(NOISE[noise])] == []
    assert [each.signature.id for each in findings(NOISE[noise] + "(W pid=1) fine\n" * 40)] == []


def test_a_healthy_log_with_all_the_noise_is_no_finding() -> None:
    log = "".join(STEP.format(n) + text for n, text in enumerate(NOISE.values(), start=1)) * 3

    assert [each.signature.id for each in findings(log)] == []


def test_a_failure_after_a_sample_of_the_models_text_is_found() -> None:
    found = findings(SAMPLE + f"{TASK}OSError: [Errno 28] No space left on device\n")

    assert [(each.signature.id, each.count) for each in found] == [("disk-full", 1)]


def test_a_sample_that_never_ends_hides_the_next_lines_only() -> None:
    log = f"{TASK}[response] and so\n" + f"{TASK}on\n" * 500 + f"{TASK}No space left on device\n"

    assert [each.signature.id for each in findings(log)] == ["disk-full"]
