"""What the guides promise, or ask to look at: the test, file or command that holds it."""

import argparse
import ast
import re
from pathlib import Path

import pytest

from tests.guides.table import FAILURES, Shown
from verl_mixed.cli import command_module
from verl_mixed.diagnose.log_scan import Scan

ROOT = Path(__file__).parents[2]
MIXTURE, BUFFER = "tests/samplers/test_mixture_plan.py", "tests/samplers/test_replay_buffer.py"
DOCTOR = "tests/verl_mixed/commands/test_doctor.py"
E2E, NODES = "tests/e2e/test_training.py", "tests/nodes/test_setup.py"

PROMISES: tuple[tuple[str, str], ...] = (
    # the README's features
    (
        "batch schedules are computed before",
        f"{MIXTURE}::test_what_is_due_in_a_batch_sums_to_its_size",
    ),
    (
        "exact ratios in each batch",
        f"{MIXTURE}::test_a_batch_whose_quotas_are_whole_holds_exactly_them",
    ),
    (
        "exact ratios in each trained batch",
        f"{E2E}::test_every_trained_batch_holds_exactly_the_planned_prompts",
    ),
    (
        "an agent for each source",
        "tests/e2e/test_chaos.py::test_a_loop_from_outside_the_repository_runs_and_what_it_raises_is_counted",
    ),
    (
        "the composition of batches is watched",
        "tests/samplers/test_door.py::test_a_step_with_wrong_counts_says_so_and_the_run_so_far_too",
    ),
    (
        "one rate for all processes",
        "tests/rate_limit/test_every_window.py::test_64_processes_keep_the_rate_in_every_window_and_use_it_up",
    ),
    (
        "no violation of an API's limit",
        "tests/rate_limit/test_processes.py::test_callers_killed_at_random_moments_never_exceed_the_rate",
    ),
    (
        "limits a minute, with bursts",
        "tests/rate_limit/test_gcra.py::test_burst_passes_at_once_then_one_per_emission_interval",
    ),
    (
        "several turns with tools",
        f"{E2E}::test_every_tool_call_passed_the_limiter_in_the_name_of_its_source",
    ),
    (
        "results are masked out of the loss",
        "tests/agent_loop/turns/test_turn_loop.py::test_whatever_the_model_says_every_mask_bit_is_accounted_for",
    ),
    # the README's commands of the cluster
    ("setup starts head and workers", "tests/nodes/test_runs.py::test_both_hosts_train"),
    ("restart", f"{NODES}::test_restart_starts_every_node_anew"),
    ("cleanup", f"{NODES}::test_cleanup_gives_the_hosts_back_as_they_were"),
    ("tmux attach", f"{NODES}::test_attach_shows_the_session"),
    (
        "a custom agent by its _target_",
        "tests/verl_mixed/checks/test_agent_blocks.py::test_blocks_register_agents_over_those_of_the_file",
    ),
    (
        "tail -f logs/train_*.log",
        "tests/verl_mixed/launch/test_launch.py::test_each_start_leaves_a_link_to_the_log",
    ),
    (
        "the dashboard's address",
        "tests/verl_mixed/launch/test_ray_lines.py::test_the_dashboard_has_an_address_to_open_and_a_tunnel_where_one_is_needed",
    ),
    # AgentFly: what its guides say of a run
    (
        "ray start --head, then train",
        "tests/verl_mixed/launch/test_joined_ray.py::test_a_ray_that_was_started_by_hand_is_named_and_joined_when_ray_address_says_so",
    ),
    (
        "ray stop, rm ray_current_cluster",
        "tests/verl_mixed/launch/test_joined_ray.py::test_an_address_that_an_earlier_ray_left_neither_fails_a_run_nor_is_joined",
    ),
    (
        "a Slurm job of several nodes",
        "tests/nodes/test_runs.py::test_slurm_saves_before_the_time_is_over_and_the_next_job_completes_the_run",
    ),
    (
        "searches are cached for all processes",
        "tests/agent_loop/calls/test_cache_store.py::test_what_one_wrote_another_reads",
    ),
    (
        "W&B saves files",
        "tests/agent_loop/records/test_wandb_artifacts.py::test_an_offline_run_holds_the_artifacts_and_their_files_outlive_the_originals",
    ),
    (
        "resumes from the last checkpoint",
        "tests/nodes/test_runs.py::test_resume_goes_on_from_the_checkpoint",
    ),
    (
        "resumes from a named checkpoint",
        "tests/agent_loop/training/test_checkpoints.py::test_a_start_from_a_named_checkpoint_keeps_it_for_the_next_one",
    ),
    (
        "a baseline before training",
        "tests/agent_loop/records/test_source_metrics.py::test_validation_is_counted_per_source_and_without_what_was_lost",
    ),
    # tutorial 6's scripts
    (
        "health_check.py: Python packages",
        f"{DOCTOR}::test_a_package_of_ours_that_is_missing_is_bad",
    ),
    ("health_check.py: GPU", f"{DOCTOR}::test_gpus_that_a_run_cannot_use_are_named"),
    ("health_check.py: Ray", f"{DOCTOR}::test_an_address_where_nothing_listens_is_bad"),
    (
        "health_check.py: disk",
        f"{DOCTOR}::test_a_full_disk_is_bad_and_a_disk_that_ray_finds_full_a_warning",
    ),
    ("health_check.py: data files", f"{DOCTOR}::test_data_files_are_looked_at_by_their_ends"),
    (
        "moving average of a metric",
        "tests/verl_mixed/views/test_summary.py::test_a_moving_average_is_the_mean_of_each_window_and_looks_back_only",
    ),
    (
        "mean, std, min, max of a metric",
        "tests/guides/test_quick_starts.py::test_agentflys_quick_start_trains_to_its_end",
    ),
)
"""A promise, and the test that proves it."""

TYPED = (
    # what a guide's script takes -> the command here, and its option or argument
    ("train_advanced.py --dry-run", "train", "--dry-run"),
    ("train_advanced.py --validate-only", "train", "--validate-only"),
    ("train_advanced.py CONFIG", "train", "--config"),
    ("diagnose_training_issue", "diagnose", "LOG"),
    ("compute_moving_average, get_metric_summary", "report", "RUN"),
)


@pytest.mark.parametrize(("promise", "proof"), PROMISES)
def test_each_promise_has_its_proof(promise: str, proof: str) -> None:
    file, _, name = proof.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tests = {node.name for node in ast.walk(tree) if isinstance(node, functions)}

    assert name in tests, promise


@pytest.mark.parametrize(("asked", "command", "word"), TYPED)
def test_what_a_guides_script_takes_a_command_takes(asked: str, command: str, word: str) -> None:
    parser = argparse.ArgumentParser()
    command_module(command).add_arguments(parser)
    takes = {name for one in parser._actions for name in (*one.option_strings, one.metavar)}

    assert word in takes, asked
    page = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    assert re.search(rf"`verl-mixed {command}[` ]", page), asked


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.line)
def test_diagnose_knows_the_failures_of_the_guides(failure: Shown) -> None:
    scan = Scan()

    scan.read([f"{failure.line}\n".encode()], "train.log")

    said = [f"{found.signature.cause} {found.signature.remedy}" for found in scan.ordered()]
    assert any(failure.says in text for text in said), said


def test_every_place_that_coming_from_names_is_there() -> None:
    page = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    places = set(re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|yaml|sh|md|sbatch))`", page))

    missing = sorted(place for place in places if not (ROOT / place).exists())
    assert places and not missing
