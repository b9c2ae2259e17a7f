"""Known failures in logs: each signature on real lines, places, counts, order."""

import json
import re
import subprocess
import sys
import tracemalloc
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from agent_loop.training.alarms import MOST_LAG_S, FaultWindow
from agent_loop.watchdog import Watchdog
from samplers.faults import GroupFaults
from tests.verl_mixed.diagnose.failure_lines import FAILURES, HARMLESS
from verl_mixed import cli
from verl_mixed.diagnose import step_checks
from verl_mixed.diagnose.cues import cues_of
from verl_mixed.diagnose.diagnose import as_json, describe, known, main
from verl_mixed.diagnose.log_scan import Scan
from verl_mixed.diagnose.signatures import (
    BY_ID,
    IN_LINES,
    SIGNATURES,
    Signature,
    parse_signatures,
)
from verl_mixed.diagnose.verdict import first_fatal, remedy_of_one_machine, verdict_on
from verl_mixed.run.compose import compose_config

LINES = [(name, line) for name, lines in FAILURES.items() for line in lines]
KNOWN_LINES = [
    (name, line)
    for row in Path(__file__).with_name("known_lines.tsv").read_text("utf-8").splitlines()
    for name, _, line in [row.partition("\t")]
]
"""Lines of the threads that a signature's `source` names."""

PATTERNS = [pattern.pattern for signature in IN_LINES for pattern in signature.patterns]
PREFIX = re.compile(r"(?:\([^)]*pid=[^)]*\) ?)*(?:ERROR [\d: -]+\[[^]]*\] ?)?")
REPOSITORY = Path(__file__).parents[3]


def scanned(log: bytes | str, **options: int) -> Scan:
    scan = Scan(**options)
    raw = log.encode() if isinstance(log, str) else log
    scan.read([raw], "train.log")
    return scan


def counts_of(scan: Scan) -> dict[str, int]:
    """Signature id -> count, also of events that are not yet a storm."""
    return {name: finding.count for name, finding in scan.findings.items()}


def order(log: str) -> list[str]:
    return [finding.signature.id for finding in scanned(log).ordered()]


# --- signatures ---------------------------------------------------------------------------------


def test_every_signature_of_lines_has_a_real_line() -> None:
    of_threads = {name for name, _ in KNOWN_LINES}
    assert FAILURES.keys() | of_threads == {signature.id for signature in IN_LINES}
    assert len(SIGNATURES) == len(BY_ID) >= 410


def test_a_signature_without_a_source_is_ours_or_of_the_first_release() -> None:
    assert {signature.id for signature in IN_LINES if not signature.source} == FAILURES.keys()


@pytest.mark.parametrize(("name", "line"), LINES)
def test_a_real_line_is_found_by_its_own_signature_alone(name: str, line: str) -> None:
    assert counts_of(scanned(line + "\n")) == {name: 1}


@pytest.mark.parametrize(("name", "line"), KNOWN_LINES)
def test_a_line_of_a_thread_is_found_by_its_own_signature_alone(name: str, line: str) -> None:
    assert counts_of(scanned(line + "\n")).keys() == {name}


@given(st.sampled_from([*LINES, *KNOWN_LINES]), st.randoms(use_true_random=False))
def test_case_does_not_matter(known: tuple[str, str], random: Random) -> None:
    name, line = known
    prefix = PREFIX.match(line)
    head = prefix[0] if prefix else ""
    text = line[len(head) :]
    mixed = "".join(random.choice((c.lower(), c.upper())) for c in text)

    assert name in counts_of(scanned(f"{head}{mixed}\n")) or not mixed.isascii()


@given(st.sampled_from(PATTERNS), st.data())
def test_whatever_a_pattern_finds_holds_one_of_its_cues(pattern: str, data: st.DataObject) -> None:
    found = data.draw(st.from_regex(re.compile(pattern, re.ASCII)))

    assert any(cue in found for cue in cues_of(pattern))


@pytest.mark.parametrize("line", HARMLESS)
def test_what_a_healthy_run_says_is_no_failure(line: str) -> None:
    assert counts_of(scanned(line + "\n")) == {}


def test_a_healthy_log_as_a_whole_is_no_failure() -> None:
    assert counts_of(scanned("\n".join(HARMLESS))) == {}


def test_every_signature_says_what_to_do() -> None:
    for signature in SIGNATURES:
        assert signature.title and signature.cause and len(signature.remedy) > 20, signature.id


SECTION = "[x]\ntitle = t\ncause = c\nremedy = r\n"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[x]\ntitle = t\ncause = c\n", "[x]: missing ['remedy']"),
        (SECTION + "patern = a\n", "unknown ['patern']"),
        (SECTION + SECTION, "already exists"),
        (SECTION.replace("[x]", "[X y]"), "small letters, digits and hyphens"),
        (SECTION + "severity = bad\n", "fatal or warning"),
        (SECTION + "storm = 20 events\n", "storm='20 events'"),
        (SECTION + "cues = a\n", "unknown ['cues']"),
        (SECTION + "pattern = (a\n", "not a regular expression"),
    ],
)
def test_a_signature_that_breaks_a_rule_is_refused(text: str, rule: str) -> None:
    with pytest.raises(ValueError, match=r"^cannot read known/mixed\.ini") as caught:
        parse_signatures(text)

    assert rule in str(caught.value)


def test_the_watchdogs_own_line_is_known() -> None:
    clock = SimpleNamespace(now=0.0)
    dog = Watchdog(stuck_after_s=60.0, clock=lambda: clock.now)
    with dog.watch("nq", "row-1") as activity:
        activity.waits_for, clock.now = "tool", 90.0
        lines = dog.report()

    scan = scanned("\n".join(lines))

    assert scan.findings["stuck-rollouts"].of == {"tool": 1}


def test_the_fault_windows_own_error_is_known() -> None:
    lost = GroupFaults(source="nq", trajectories=4, faults=("tool=search, last error: x",) * 4)
    with pytest.raises(RuntimeError) as caught:
        FaultWindow(limit=0.01, steps=1).check(1, [lost])

    scan = scanned(f"agent_loop.training.alarms.{caught.type.__name__}: {caught.value}\n")

    assert scan.findings["infra-error-limit"].of == {"nq": 1}


# --- lines in all their forms -------------------------------------------------------------------

OOM = FAILURES["cuda-out-of-memory"][0]
ACTOR = "\x1b[36m(WorkerDict pid=7204, ip=10.0.0.5)\x1b[0m "


def test_colours_and_rays_prefix_are_no_part_of_a_line() -> None:
    finding = scanned(f"{ACTOR}\x1b[31m{OOM}\x1b[0m\n").findings["cuda-out-of-memory"]

    assert finding.first is not None
    assert finding.first.text == OOM


def test_rays_repeated_lines_count_as_often_as_it_says() -> None:
    repeated = f"{ACTOR}{OOM}\x1b[32m [repeated 12x across cluster]\x1b[0m\n"

    assert counts_of(scanned(f"{ACTOR}{OOM}\n{repeated}")) == {"cuda-out-of-memory": 13}


def test_a_line_behind_a_progress_bar_is_found_at_its_own_byte() -> None:
    bar = "Training Progress:  10%|#  | 1/10\rTraining Progress:  20%|##  | 2/10\r"
    log = f"first\n{bar}{OOM}\n".encode()

    first = scanned(log).findings["cuda-out-of-memory"].first

    assert first is not None
    assert (first.line, log[first.offset :].decode().strip()) == (2, OOM)


def test_bytes_that_are_not_utf8_do_not_hide_a_line() -> None:
    assert counts_of(scanned(b"\xff\xfe\x00" + OOM.encode() + b"\xff\n")) == {
        "cuda-out-of-memory": 1
    }


def test_of_a_line_of_megabytes_the_beginning_is_looked_at_and_the_next_line_is_found() -> None:
    log = OOM + "x" * 3_000_000 + "No space left on device\n" + "OSError: [Errno 28] No space left"
    log += " on device\n"

    scan = scanned(log)

    assert counts_of(scan) == {"cuda-out-of-memory": 1, "disk-full": 1}
    first = scan.findings["disk-full"].first
    assert first is not None
    assert (first.line, log[first.offset : first.offset + 7]) == (2, "OSError")


@pytest.mark.parametrize("chunk_bytes", [1 << 16, 1 << 30])
def test_what_a_line_says_after_its_first_megabyte_is_passed_over(chunk_bytes: int) -> None:
    log = ("x" * 3_000_000 + f" {OOM}\n").encode()
    scan = Scan()

    scan.read((log[i : i + chunk_bytes] for i in range(0, len(log), chunk_bytes)), "train.log")

    assert counts_of(scan) == {}


def test_a_long_line_is_shown_shortened_around_what_was_found() -> None:
    first = scanned("a" * 5000 + OOM + "b" * 5000 + "\n").findings["cuda-out-of-memory"].first

    assert first is not None
    assert "CUDA out of memory" in first.text
    assert len(first.text) <= 400


def test_times_are_read_in_the_forms_that_components_write() -> None:
    for line, time in (
        ("2026-11-22 09:19:51,614 OSError: [Errno 28] No space left on device", "09:19:51"),
        ("ERROR 11-22 09:19:52 [core.py:1] OSError: No space left on device", "11-22 09:19:52"),
        ("[rank0]:[E321 02:07:08.4 P.cpp:1] No space left on device", "321 02:07:08"),
        ("No space left on device", ""),
    ):
        first = scanned(line + "\n").findings["disk-full"].first
        assert first is not None
        assert (first.time or "").endswith(time)
        assert bool(first.time) == bool(time)


# --- tracebacks ---------------------------------------------------------------------------------


def trace(*exceptions: str, before: str = "", joint: str = "") -> str:
    """Chained tracebacks, as Python prints them."""
    joint = joint or "The above exception was the direct cause of the following exception:"
    parts = []
    for exception in exceptions:
        parts.append(
            "Traceback (most recent call last):\n"
            '  File "verl/trainer/main_ppo.py", line 155, in run\n'
            "    raise RubbleError('No space left on device')\n"
            f"{exception}\n"
        )
    whole = f"\n{joint}\n\n".join(parts)
    return "".join(f"{before}{line}\n" for line in whole.splitlines())


def test_one_traceback_counts_once_and_by_its_cause() -> None:
    refused, limit = FAILURES["tool-server-down"][0], FAILURES["infra-error-limit"][0]
    log = trace(refused, FAILURES["tool-server-down"][1], limit, before=ACTOR)

    scan = scanned(log)

    assert counts_of(scan) == {"tool-server-down": 1}
    first = scan.findings["tool-server-down"].first
    assert first is not None
    assert first.text == refused


def test_in_a_traceback_a_consequence_gives_way_to_a_later_cause() -> None:
    log = trace(FAILURES["actor-died"][0], FAILURES["cuda-out-of-memory"][0])

    assert counts_of(scanned(log)) == {"cuda-out-of-memory": 1}


def test_source_lines_in_a_traceback_do_not_count() -> None:
    assert counts_of(scanned(trace("ValueError: 7"))) == {}


def test_two_tracebacks_count_twice() -> None:
    assert counts_of(scanned(trace(OOM) + trace(OOM))) == {"cuda-out-of-memory": 2}


def test_tracebacks_of_two_workers_that_are_printed_in_turns_are_told_apart() -> None:
    one = trace(OOM, before="(W pid=1) ").splitlines()
    other = trace(FAILURES["open-files"][0], before="(W pid=2) ").splitlines()
    log = "".join(f"{a}\n{b}\n" for a, b in zip(one, other, strict=True))

    assert counts_of(scanned(log)) == {"cuda-out-of-memory": 1, "open-files": 1}


def test_a_traceback_through_rays_task_error_counts_its_cause() -> None:
    log = (
        "Traceback (most recent call last):\n"
        '  File "ray/_private/worker.py", line 1053, in get_objects\n'
        "    raise value.as_instanceof_cause()\n"
        "ray.exceptions.RayTaskError(RubbleError): \x1b[36mray::TaskRunnerV1.run()\x1b[39m "
        "(pid=7204, ip=192.0.2.2)\n"
        "           ^^^^^^^^^^^^\n"
        '  File "agent_loop/training/alarms.py", line 64, in check\n'
        "    raise RubbleError(\n"
        f"{FAILURES['infra-error-limit'][0]}\n"
    )

    assert counts_of(scanned(log)) == {"infra-error-limit": 1}


def test_vllms_prefix_before_every_line_of_a_traceback_is_passed_over() -> None:
    before = "(EngineCore_DP0 pid=99) ERROR 10-25 13:08:43 [core.py:708] "
    log = trace("ValueError: No available memory for the cache blocks.", before=before)

    assert counts_of(scanned(log)) == {"vllm-kv-cache": 1}


def test_a_failure_right_after_a_traceback_is_one_of_its_own() -> None:
    log = trace(OOM) + FAILURES["slurm-cancelled"][0] + "\n" + FAILURES["stuck-rollouts"][0]

    assert counts_of(scanned(log)) == {
        "cuda-out-of-memory": 1,
        "slurm-cancelled": 1,
        "stuck-rollouts": 1,
    }


def test_a_traceback_that_was_never_finished_does_not_swallow_the_log() -> None:
    torn = 'Traceback (most recent call last):\n  File "x", line 1\n'
    torn = "".join(f"(A pid=1) {line}\n" for line in torn.splitlines())
    log = torn + "(B pid=2) fine\n" * 2000 + f"(A pid=1)   {OOM}\n"

    assert counts_of(scanned(torn + f"(A pid=1)   {OOM}\n")) == {}
    assert counts_of(scanned(log)) == {"cuda-out-of-memory": 1}


def test_a_traceback_that_is_told_late_keeps_its_place() -> None:
    log = trace(OOM, before="(A pid=1) ") + f"(B pid=2) {OOM}\n"

    finding = scanned(log).findings["cuda-out-of-memory"]

    assert finding.count == 2
    assert finding.first is not None
    assert finding.first.line == 4


def test_words_of_another_failure_under_a_traceback_are_not_lost() -> None:
    log = trace(OOM) + FAILURES["tool-server-error"][0] + "\n"

    assert counts_of(scanned(log)) == {"cuda-out-of-memory": 1, "tool-server-error": 1}


# --- numbers of steps ---------------------------------------------------------------------------


def record(step: int, **metrics: float) -> str:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return json.dumps({"step": step, "time": 1795337558.2 + step, "metrics": named}) + "\n"


def steps(count: int, **metrics: float) -> str:
    return "".join(record(step, **metrics) for step in range(1, count + 1))


def test_nan_on_the_console_is_divergence() -> None:
    log = "(TaskRunnerV1 pid=1) step:3 - actor/grad_norm:nan - actor/loss:np.float64(0.1) - a/b:1\n"

    finding = scanned(log).findings["loss-not-finite"]

    assert finding.of == {"actor/grad_norm": 1}
    assert finding.first is not None
    assert finding.first.text == "step 3: actor/grad_norm=nan"


def test_a_loss_that_metrics_leave_out_was_not_finite() -> None:
    log = record(1, actor__grad_norm=0.5, timing_s__update_actor=1.0)
    log += record(2, timing_s__update_actor=1.0)

    assert counts_of(scanned(log)) == {"loss-not-finite": 1}


def test_a_gradient_norm_far_above_those_before_is_named() -> None:
    log = steps(10, actor__grad_norm=0.5) + record(11, actor__grad_norm=30.0)

    first = scanned(log).findings["gradient-explosion"].first

    assert first is not None
    assert (first.line, first.text) == (11, "step 11: actor/grad_norm=30, before 0.5")


def test_kl_and_entropy_are_followed() -> None:
    log = steps(8, actor__ppo_kl=0.001, actor__entropy=0.4)
    log += record(9, actor__ppo_kl=0.9, actor__entropy=0.001)

    assert counts_of(scanned(log)) == {"kl-blow-up": 1, "entropy-collapse": 1}


def test_probabilities_that_differ_are_named() -> None:
    log = record(1, training__rollout_probs_diff_mean=0.2)
    log += record(2, training__rollout_actor_probs_pearson_corr=0.5)

    assert counts_of(scanned(log)) == {"probabilities-differ": 2}


def test_losses_of_a_source_and_a_slowed_limiter_are_named() -> None:
    log = record(1, mixed__nq__infra_error_rate=0.25, mixed__limiter__rate_factor=0.3)

    scan = scanned(log)

    assert counts_of(scan) == {"trajectories-lost": 1, "limiter-slowed": 1}
    assert scan.findings["trajectories-lost"].of == {"nq": 1}


def test_event_loops_that_run_late_are_named() -> None:
    log = record(1, mixed__loop_lag_s__p99=MOST_LAG_S) + record(2, mixed__loop_lag_s__p99=0.6)

    assert counts_of(scanned(log)) == {"loop-lag": 1}
    assert step_checks.MOST_LAG_S == MOST_LAG_S


def test_a_slow_step_names_the_phase_that_grew() -> None:
    log = steps(8, timing_s__step=10.0, timing_s__gen=5.0, timing_s__update_actor=4.0)
    log += record(9, timing_s__step=70.0, timing_s__gen=65.0, timing_s__update_actor=4.0)

    finding = scanned(log).findings["slow-step"]

    assert finding.of == {"gen": 1}
    assert finding.first is not None
    assert "70.0 s, usually 10.0 s; gen 65.0 s, usually 5.0 s" in finding.first.text


def test_a_checkpoint_now_and_then_is_no_slow_step_but_a_slow_one_is() -> None:
    usual = steps(6, timing_s__step=10.0, timing_s__gen=9.0)
    saves = {"timing_s__gen": 9.0, "timing_s__save_checkpoint": 60.0, "timing_s__step": 70.0}
    log = (usual + record(7, **saves)) * 3

    assert counts_of(scanned(log)) == {}
    saves |= {"timing_s__save_checkpoint": 900.0, "timing_s__step": 910.0}
    assert scanned(log + record(8, **saves)).findings["slow-step"].of == {"save_checkpoint": 1}


def test_of_a_run_with_metrics_the_console_tells_only_what_they_leave_out(tmp_path: Path) -> None:
    console = "step:1 - actor/loss:nan - mixed/nq/infra_error_rate:0.5 - timing_s/step:1.0\n"
    (tmp_path / "train.log").write_text(console)
    (tmp_path / "metrics.jsonl").write_text(record(1, mixed__nq__infra_error_rate=0.5))

    code, output = run_main([str(tmp_path), "--json"])

    counts = {each["id"]: each["count"] for each in json.loads(output)["findings"]}
    assert (code, counts) == (1, {"loss-not-finite": 1, "trajectories-lost": 1})


# --- storms, order, starts ----------------------------------------------------------------------


def test_one_429_is_no_storm_and_many_in_a_minute_are() -> None:
    line = '10.0.0.7 [22/Nov/2026:09:{:02d}:{:02d} +0000] "POST /search HTTP/1.1" 429 21\n'
    spread = "".join(line.format(minute, 0) for minute in range(40))
    dense = "".join(line.format(5, second) for second in range(40))

    assert order(spread) == []
    assert order(dense) == ["tool-server-overloaded"]
    assert counts_of(scanned(dense)) == {"tool-server-overloaded": 40}


def test_429s_without_a_time_are_a_storm_when_their_lines_are_close() -> None:
    line = FAILURES["tool-server-overloaded"][0] + "\n"

    assert order(line * 30) == ["tool-server-overloaded"]
    assert order((line + "fine\n" * 1000) * 30) == []


def test_causes_come_before_warnings_and_before_what_follows_from_them() -> None:
    log = "\n".join(
        FAILURES[name][0]
        for name in ("stuck-rollouts", "actor-died", "worker-lost", "cuda-out-of-memory")
    )

    assert order(log) == ["cuda-out-of-memory", "actor-died", "worker-lost", "stuck-rollouts"]


def test_words_that_many_components_write_come_after_what_is_known() -> None:
    refused, timeout = FAILURES["connection-refused"][2], FAILURES["timeout"][0]
    known = FAILURES["limiter-timeout"][0]  # a warning
    assert order("\n".join([refused, timeout, known])) == [
        "limiter-timeout",
        "connection-refused",
        "timeout",
    ]
    assert scanned(refused).findings["connection-refused"].of == {"10.0.0.4:6379": 1}
    assert first_fatal(refused) is None  # it does not say why the run ended
    unknown = "own.TornError: the table is torn"
    assert describe(scanned(f"{refused}\n{unknown}\n"))[-1].endswith(unknown)


def test_what_ended_an_earlier_start_of_the_run_comes_last() -> None:
    start = "ray init kwargs: {'num_cpus': 16}\n"
    log = start + OOM + "\n" + start + FAILURES["stuck-rollouts"][0] + "\n"

    assert order(log) == ["stuck-rollouts", "cuda-out-of-memory"]
    assert first_fatal(log) is None
    again = first_fatal(log + OOM)
    assert again is not None
    assert again.signature.id == "cuda-out-of-memory"


@pytest.mark.parametrize(("starts_again", "code"), [(False, 1), (True, 0)])
def test_a_failure_that_the_run_was_restarted_after_is_not_bad(
    tmp_path: Path, starts_again: bool, code: int
) -> None:
    start = "ray init kwargs: {'num_cpus': 16}\n"
    log = tmp_path / "train.log"
    log.write_text(start + OOM + "\n" + start * starts_again)

    assert cli.main(["diagnose", str(log)]) == code


def test_the_tail_of_a_run_names_its_fatal_failure_only() -> None:
    warning = FAILURES["stuck-rollouts"][0] + "\n"

    assert first_fatal(warning + "nothing else") is None
    finding = first_fatal(warning + trace(FAILURES["ray-token"][0]))
    assert finding is not None
    assert finding.signature.id == "ray-token"


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.id)
def test_a_run_on_one_machine_gets_no_advice_about_a_cluster(signature: Signature) -> None:
    remedy = remedy_of_one_machine(signature.remedy)

    assert not re.search("setup_cluster|WORKER_NODES|MASTER_IP", remedy)
    assert len(remedy) > 20
    assert remedy.count("`") % 2 == 0 and remedy.count("(") == remedy.count(")")


def test_a_run_gets_the_verdict_that_diagnose_prints() -> None:
    log = trace(FAILURES["ray-unreachable"][0])
    shown = "\n".join(describe(scanned(log)))

    verdict = verdict_on(log, has_cluster=True)

    assert verdict is not None
    assert all(line.split(":", 1)[-1].strip()[:40] in shown for line in verdict.lines)
    alone = verdict_on(log, has_cluster=False)
    assert alone is not None
    assert "setup_cluster" in verdict.lines[-1] and "setup_cluster" not in alone.lines[-1]


def test_the_cause_of_an_unknown_error_is_its_own_line() -> None:
    verdict = verdict_on(trace("KeyError: 'golden'"), has_cluster=False)

    assert verdict is not None
    assert (verdict.cause, verdict.mends) == ("KeyError: 'golden'", True)


# --- laws ---------------------------------------------------------------------------------------

MIXED = (
    "\n".join(HARMLESS[:12])
    + "\n"
    + trace(*(lines[0] for lines in list(FAILURES.values())[9:14]), before=ACTOR)
    + "\n".join(line for _, line in LINES)
    + "\r\n"
    + steps(7, timing_s__step=10.0, timing_s__gen=5.0)
    + record(8, timing_s__step=99.0, timing_s__gen=90.0)
    + "Training Progress: 1%|\rTraining Progress: 2%|\r"
    + trace("SomethingElse: 1", "KeyError: 'other'", before="(B pid=2) ")
    + "y" * 9000
    + f" {OOM}\nthe end\r"
).encode()


@pytest.mark.slow
@given(
    cuts=st.lists(st.integers(0, len(MIXED)), max_size=30),
    line_bytes=st.sampled_from((900, 1 << 20)),
)
def test_where_chunks_are_cut_never_changes_what_is_found(cuts: list[int], line_bytes: int) -> None:
    ends = sorted({0, *cuts, len(MIXED)})
    chunks = [MIXED[a:b] for a, b in pairwise(ends)]
    scan = Scan(line_bytes=line_bytes)
    scan.read(chunks, "train.log")

    assert as_json(scan) == as_json(scanned(MIXED, line_bytes=line_bytes))


@cache
def _is_mild(name: str, line: str) -> bool:
    """Whether a line says that it is only a warning, or is tried again: a later line of the same
    failure that does not is shown in its place."""
    return scanned(line.encode()).findings[name].shows_mild


@given(
    pieces=st.lists(
        st.tuples(
            st.one_of(st.sampled_from(LINES), st.sampled_from([("", line) for line in HARMLESS])),
            st.sampled_from(("\n", "\r\n", "\r", "\n\n")),
        ),
        max_size=40,
    )
)
def test_counts_and_first_places_are_right(pieces: list[tuple[tuple[str, str], str]]) -> None:
    counts: dict[str, int] = {}
    first: dict[str, int] = {}
    all_mild: set[str] = set()
    log = b""
    for (name, line), end in pieces:
        if name:
            counts[name] = counts.get(name, 0) + 1
            if name not in first or (name in all_mild and not _is_mild(name, line)):
                first[name] = len(log)
                (all_mild.add if _is_mild(name, line) else all_mild.discard)(name)
        log += (line + end).encode()

    scan = scanned(log)

    assert counts_of(scan) == counts
    for name, offset in first.items():
        place = scan.findings[name].first
        assert place is not None
        assert (place.offset, place.line) == (offset, 1 + log.count(b"\n", 0, offset))


SCRAPS = [
    b"Traceback (most recent call last):\n",
    b"step:",
    b'{"step": 1, "metrics": {',
    b'{"step": 1, "metrics": {"actor/loss": 1' + b"0" * 400 + b"}}\n",
    b"\r",
    b"\n",
    b"\x1b[",
    b"(A pid=1) ",
    b" [repeated 99999999999999999x across cluster]",
    b"- a/b:1e999",
]


@given(
    parts=st.lists(
        st.one_of(
            st.binary(max_size=80),
            st.sampled_from(SCRAPS),
            st.sampled_from([line.encode() for _, line in LINES]),
        ),
        max_size=30,
    )
)
def test_no_bytes_make_it_raise(parts: list[bytes]) -> None:
    scan = scanned(b"".join(parts), line_bytes=500)

    json.dumps(as_json(scan))


# --- the command --------------------------------------------------------------------------------


def run_main(arguments: list[str], stdin: bytes | None = None) -> tuple[int, str]:
    """The command in a process of its own, with `-S`: no package can be imported."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "verl_mixed.diagnose", *arguments],
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY)},
        input=stdin,
        capture_output=True,
        check=False,
    )
    return done.returncode, (done.stdout + done.stderr).decode()


def test_a_failure_is_told_with_place_cause_and_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "train.log"
    log.write_text("fine\n" + f"2026-11-22 09:19:51,614 {OOM}\n" * 3)

    code = main([str(log)])

    shown = capsys.readouterr().out
    signature = BY_ID["cuda-out-of-memory"]
    assert code == 1
    assert f"1. FATAL {signature.title} [{signature.id}]" in shown
    assert f"3 times, first at {log}:2 (byte 5), 2026-11-22 09:19:51" in shown
    assert "CUDA out of memory. Tried to allocate 2.00 GiB" in shown
    assert signature.remedy.split(";")[0][:60] in " ".join(shown.split())


def test_it_is_a_subcommand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text(OOM)

    assert cli.main(["diagnose", str(log), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["id"] == "cuda-out-of-memory"


def test_it_runs_without_any_package_and_reads_stdin() -> None:
    code, shown = run_main(["-"], stdin=OOM.encode())

    assert code == 1
    assert "stdin:1 (byte 0)" in shown


def test_a_runs_folder_is_its_logs_and_a_session_folder_all_of_its_logs(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "train.log").write_text(OOM)
    (tmp_path / "run" / "tool_server.log").write_text(FAILURES["tool-server-error"][0])
    (tmp_path / "run" / "metrics.jsonl").touch()
    logs = tmp_path / "session" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text(FAILURES["disk-full"][0])
    (logs / "empty.err").touch()

    code, output = run_main([str(tmp_path / "run"), str(tmp_path / "session"), "--json"])

    findings = {each["id"]: each["first"]["file"] for each in json.loads(output)["findings"]}
    assert code == 1
    assert findings == {
        "cuda-out-of-memory": str(tmp_path / "run" / "train.log"),
        "disk-full": str(logs / "raylet.out"),
        "tool-server-error": str(tmp_path / "run" / "tool_server.log"),
    }


def test_without_any_error_the_last_line_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "train.log"
    log.write_text("fine\nTraining Progress: 3%\n\n")

    assert main([str(log)]) == 0
    assert f"{log}:2 (byte 5): Training Progress: 3%" in capsys.readouterr().out


def test_control_characters_of_a_log_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "train.log"
    log.write_text("OSError: [Errno 28] No space left on device: '\x1b]0;title\x07\x9b2J'\n")

    main([str(log)])

    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\x9b" not in shown


def test_the_list_names_every_signature() -> None:
    rows = known().splitlines()[2:]

    assert [row.split("`")[1] for row in rows] == [signature.id for signature in SIGNATURES]
    assert all(row.replace("\\|", "").count("|") == 4 for row in rows)


@pytest.mark.slow
def test_a_long_log_is_never_held_as_a_whole() -> None:
    chunk = ("\n".join(HARMLESS) + "\n").encode() * 20
    scan = Scan()
    tracemalloc.start()
    try:
        size = scan.read((chunk for _ in range(20)), "train.log")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert size == 20 * len(chunk)
    assert peak < 8 * len(chunk)


NOT_COMPOSED = (
    "mixed.tool_server.",
    "actor_rollout_ref.actor.megatron",
    "actor_rollout_ref.ref.megatron",
    "ray_kwargs.ray_init.runtime_env",
)
"""Sections that a run has only if it sets them."""


def test_every_setting_that_a_remedy_names_exists() -> None:
    config = OmegaConf.to_container(compose_config([]), resolve=False)
    assert isinstance(config, dict)
    keys = {f".{key}" for key in dotted_keys(config)}
    named = {
        (signature.id, key)
        for signature in SIGNATURES
        for key in re.findall(
            r"(?<![\w./+~-])([a-z]\w*(?:\.[a-z_0-9]+)+)\b(?![({])", signature.remedy
        )
        if key.split(".")[0] in config and not key.startswith(NOT_COMPOSED)
    }

    assert len(named) > 100
    assert sorted(each for each in named if not any(k.endswith(f".{each[1]}") for k in keys)) == []


def dotted_keys(node: dict[Any, Any], above: str = "") -> list[str]:
    keys = []
    for name, value in node.items():
        keys.append(f"{above}{name}")
        if isinstance(value, dict):
            keys += dotted_keys(value, f"{above}{name}.")
    return keys
