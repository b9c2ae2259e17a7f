"""What keeps a run from starting, and that it is said all at once."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.launch import make_plan
from tests.cluster.conftest import RunEnviron, write_source


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


def test_a_source_with_a_ratio_needs_rows_in_training_and_validation(
    run_environ: RunEnviron,
) -> None:
    found = problems_of(run_environ | {"NQ_RATIO": "1"})

    assert [problem.split(" (")[0] for problem in found] == [
        "no rows of source='nq' in data.train_files",
        "no rows of source='nq' in data.val_files",
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
    environ = run_environ | {"TRAIN_FILES": f"{run_environ['TRAIN_FILES']},{odd}"}

    assert problems_of(environ) == []
    (found,) = problems_of(environ, "mixed.sources.math.agent=null")
    assert f"{odd}: 3 rows of source='math' have agent_name='stranger'" in found


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("actor_rollout_ref.actor.ppo_mini_batch_size=3", "is no multiple of"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=7", "does not divide the 20"),
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=7", "does not divide the 20"),
        ("actor_rollout_ref.actor.optim.lr=-1", "optim.lr=-1"),
        ("trainer.total_training_steps=null", "total_training_steps=None"),
        ("actor_rollout_ref.actor.strategy=fsdp", "must be 'fsdp2'"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "must be 1"),
        ("ray_kwargs.ray_init.num_gpus=4", "num_gpus=4"),
        ("mixed.apportionment=sometimes", "mixed.apportionment"),
        ("actor_rollout_ref.model.path=/gone", "no config.json there"),
    ],
)
def test_a_value_verl_cannot_run_with_is_one_problem(
    run_environ: RunEnviron, override: str, word: str
) -> None:
    (found,) = problems_of(run_environ, override)

    assert word in found


def test_a_busy_dashboard_port_is_a_problem(run_environ: RunEnviron, busy_port: int) -> None:
    (found,) = problems_of(run_environ | {"RAY_DASHBOARD_PORT": str(busy_port)})

    assert f"dashboard_port={busy_port}: the port is in use" in found


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
    plan = make_plan(["+mixed.sources.trivia.ratio=0.2"], {})
    (problem,) = plan.problems(data=False)
    assert "source='trivia'" in problem and "TRAIN_FILES" in problem


def test_a_missing_file_is_told_beside_the_keys_that_have_no_value() -> None:
    found = problems_of({"TRAIN_FILES": "/gone.parquet"})

    assert [problem.split(":")[0] for problem in found] == [
        "actor_rollout_ref.model.path",
        "data.val_files",
        "data.train_files",
    ]
    assert "/gone.parquet: no such file" in found[-1]


def test_a_machine_with_too_few_gpus_is_told_before_anything_starts(
    run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.preflight.cuda_devices", lambda: 1)
    two = ("trainer.device=cuda", "trainer.n_gpus_per_node=2")

    (found,) = problems_of(run_environ, *two)
    assert "n_gpus_per_node=2: this machine shows 1 NVIDIA GPUs" in found

    assert problems_of(run_environ, *two, "++ray_kwargs.ray_init.address=10.0.0.1:6379") == []
    assert problems_of(run_environ, "trainer.device=cuda", "trainer.n_gpus_per_node=1") == []
