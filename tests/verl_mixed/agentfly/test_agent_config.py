"""Config files in AgentFly's style."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from config.lookup import at, flatten
from config.schema import ConfigError
from tests.verl_mixed.conftest import REPO_ROOT
from verl_mixed.agentfly.files import (
    Translation,
    Value,
    hydra_text,
    is_agentflys,
    keep_copies,
    read,
    translate,
    translate_files,
    values_of,
)
from verl_mixed.agentfly.keys import AGENTS, EVERY_SOURCE, KEYS, TOOLS
from verl_mixed.run.compose import compose_config
from verl_mixed.run.settings import overrides_from

TURNS = "actor_rollout_ref.rollout.multi_turn"

AGENT = """
agent:
  agent_type: react
  model_name_or_path: someone/some-model
  template: qwen2.5-no-tool
  backend: async_verl
  tools: [code_interpreter, google_search_serper, answer]
  max_steps: 8
  num_chains: 6
  use_agent: true
  reward_name: math_reward
  system_prompt: Think, then answer.
model:
  path: someone/some-model
  use_remove_padding: false
data:
  train_files: ./train.json
  val_files: ./val.json
  train_batch_size: 64
rollout:
  response_length: 512
  gpu_memory_utilization: 0.5
"""

TRAINING = """
training:
  algorithm: grpo
  learning_rate: 5e-7
  kl_coef: 0.001
  entropy_coeff: 0.001
  total_training_steps: 200
hardware:
  num_gpus: 8
  num_nodes: 2
  tensor_parallel_size: 2
  use_ray: true
monitoring:
  project_name: agents
  experiment_name: my_experiment
  loggers: [console, wandb]
"""


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    """The run config that files change."""
    return container(["profile=laptop"])


def container(overrides: list[str]) -> dict[str, Any]:
    config = compose_config(overrides)
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))


def document(text: str, name: str = "my.yaml") -> list[Value]:
    return [*values_of(Path(name), content_of(text))]


def content_of(text: str) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(text)))


def problems_of(text: str, run: Mapping[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        translate(document(text), run)
    return refused.value.problems


def composed(translation: Translation) -> dict[str, Any]:
    return container(["profile=laptop", *translation.overrides])


def test_two_files_together_say_agent_data_algorithm_hardware_and_name(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = document(AGENT, "agent.yaml") + document(TRAINING, "training.yaml")

    config = composed(translate(values, run))

    source = config["mixed"]["sources"]["json"]
    assert source["agent"] == "react_agent"
    assert source["reward"] == "math_reward"
    assert source["system_prompt"] == "Think, then answer."
    assert config["agent_loops"]["react_agent"]["tool_names"] == ["run_code", "search"]
    assert source["files"] == [str(tmp_path / "train.json")]
    assert source["val_files"] == [str(tmp_path / "val.json")]
    assert {name: one["ratio"] for name, one in config["mixed"]["sources"].items()} == {
        "taco": 0,
        "nq": 0,
        "math": 0,
        "json": 1.0,
    }
    wanted = {
        "actor_rollout_ref.model.path": "someone/some-model",
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 8,
        "actor_rollout_ref.rollout.n": 6,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
        "actor_rollout_ref.actor.optim.lr": 5e-7,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.kl_loss_coef": 0.001,
        "actor_rollout_ref.actor.entropy_coeff": 0.001,
        "algorithm.adv_estimator": "grpo",
        "algorithm.kl_ctrl.kl_coef": 0.001,
        "data.train_batch_size": 64,
        "data.max_response_length": 512,
        "trainer.total_training_steps": 200,
        "trainer.n_gpus_per_node": 8,
        "trainer.nnodes": 2,
        "trainer.project_name": "agents",
        "trainer.logger": ["console", "wandb"],
        "mixed.experiment": "my_experiment",
    }
    assert {key: at(config, key) for key in wanted} == wanted


def test_every_key_of_a_file_has_a_line_that_says_what_it_comes_to(run: dict[str, Any]) -> None:
    translation = translate(document(AGENT, "a.yaml") + document(TRAINING, "t.yaml"), run)

    assert translation.lines[0] == "a.yaml:" and "t.yaml:" in translation.lines
    said = {line.split(" = ")[0].strip() for line in translation.lines if " = " in line}
    assert said == {*flatten(content_of(AGENT)), *flatten(content_of(TRAINING))}
    assert "  agent.num_chains = 6 -> actor_rollout_ref.rollout.n=6" in translation.lines
    assert (
        "  agent.template = qwen2.5-no-tool -> nothing: the model's own chat template is used"
        in translation.lines
    )


def test_everything_that_is_wrong_is_named_at_once_with_file_key_and_the_nearest_known(
    run: dict[str, Any],
) -> None:
    text = """
agent: {num_chain: 8, max_steps: eight, use_agent: false, reward_name: math_reward_thought}
trainer: {save_freqq: 5}
nonsense: {a: 1}
"""

    problems = problems_of(text, run)

    assert len(problems) == 6
    assert problems[0] == (
        "unknown key agent.num_chain=8 (my.yaml): docs/configuration.md lists all keys of "
        "--config; did you mean agent.num_chains?"
    )
    assert problems[1] == "agent.max_steps='eight' (my.yaml): want a whole number; correct it"
    assert problems[2].startswith("agent.use_agent=False (my.yaml): want true: ")
    assert "want one of code, " in problems[3] and "math_reward_format" in problems[3]
    assert "did you mean trainer.save_freq?" in problems[4]
    assert problems[5].startswith("unknown key nonsense.a=1 (my.yaml)")


def test_contradictions_are_said_beside_what_else_is_wrong(run: dict[str, Any]) -> None:
    text = """
training: {save_freq: 5}
monitoring: {save_freq: 6}
agent: {max_steps: 3, max_turns: 4, top_p: x}
data: {ratios: {mine: 1}}
mixed: {nope: 1}
"""

    problems = problems_of(text, run)

    assert len(problems) == 5
    assert problems[0].startswith("agent.top_p='x' (my.yaml): want a number")
    assert problems[1].startswith("unknown key mixed.nope=1 ")
    assert "no source mine" in problems[2]
    assert problems[3] == (
        "monitoring.save_freq=6 (my.yaml) contradicts training.save_freq=5 (my.yaml): both set "
        "trainer.save_freq; remove one of them"
    )
    assert "agent.max_turns=4" in problems[4] and "agent.max_steps=3" in problems[4]


def test_a_profile_that_is_not_there_hides_no_other_mistake(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("hardware: {profile: nope}\nagent: {num_chain: 3}\n")

    with pytest.raises(ConfigError) as refused:
        translate_files([tmp_path / "never.yaml", file], [], {"PROFILE": "laptop"})

    no_file, profile, key = refused.value.problems
    assert "never.yaml: No such file" in no_file
    assert profile.startswith(f"hardware.profile='nope' ({file}): want one of gpu, gpu_async, ")
    assert key.startswith("unknown key agent.num_chain=3")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mixed: {nope: 1}", "docs/settings.md lists all; "),
        ("agent: {nope: 1}", "docs/configuration.md lists all keys of --config; "),
        ("trainer: {nope: 1}", "docs/configuration.md and `verl-mixed check` list all; "),
        (
            "agent: react",
            "agent='react' (my.yaml): it is a section; write keys below it, as agent.",
        ),
        ("trainer: {v1: 3}", "trainer.v1=3 (my.yaml): it is a section; write keys below it, as "),
    ],
)
def test_a_mistake_is_said_with_the_place_to_look_at(
    text: str, said: str, run: dict[str, Any]
) -> None:
    (problem,) = problems_of(text, run)

    assert said in problem


@pytest.mark.parametrize(
    ("text", "agent", "tools"),
    [
        ("{tools: []}", "react_agent", []),
        ("{tools: [answer]}", "react_agent", []),
        ("{agent_type: react, tools: [calculator]}", "react_agent", ["calculate"]),
        ("{agent_type: hf, tools: [calculator, answer]}", "native_agent", ["calculate"]),
        ("{agent_type: hf, tools: [answer]}", "native_agent", []),
        ("{agent_type: native_agent, tools: [google_search]}", "native_agent", ["search"]),
        ("{agent_type: code, tools: [python_executor]}", "code_execution_agent", None),
        ("{tools: [google_search, answer]}", "search_agent", None),
        ("{agent_type: search}", "search_agent", None),
    ],
)
def test_a_list_of_tools_is_exact(
    text: str, agent: str, tools: list[str] | None, run: dict[str, Any]
) -> None:
    config = composed(translate(document(f"agent: {text}"), run))

    assert at(config, "mixed.sources.math.agent") == agent
    loops = [f"agent_loops.{name}.tool_names" for name in ("react_agent", "native_agent")]
    assert [at(config, key) for key in loops if agent in key] in ([tools], [])
    assert not any(at(config, key) for key in loops if agent not in key)


@pytest.mark.parametrize(
    ("text", "call_format"),
    [
        ("agent: {agent_type: hf, model_name_or_path: a/b}", "hermes"),
        ("agent: {agent_type: hf}\nmodel: {path: a/b}", "hermes"),
        ("agent: {agent_type: hf}", None),  # MODEL_PATH may be a folder, whose template decides
        ("agent: {agent_type: hf, model_name_or_path: .}", None),
        ("agent: {agent_type: react, model_name_or_path: a/b}", None),
        (
            "agent: {agent_type: hf, model_name_or_path: a/b, tool_parser_name: glm}",
            "glm",
        ),
        (
            "agent: {agent_type: hf, model_name_or_path: a/b}\n"
            "actor_rollout_ref: {rollout: {multi_turn: {format: kimi}}}",
            "kimi",
        ),
    ],
)
def test_native_calls_of_a_hub_s_model_are_hermes_unless_a_parser_is_named(
    text: str, call_format: str | None, run: dict[str, Any]
) -> None:
    config = composed(translate(document(text), run))

    assert at(config, f"{TURNS}.format") == call_format


def test_the_command_line_goes_through_the_same_table_and_wins(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("agent: {max_steps: 8, num_chains: 4, template: x}\ntraining: {save_freq: 5}\n")
    words = ["agent.max_turns=3", "trainer.save_freq=7", 'agent.tools=["answer"]', "~mixed.x"]

    found = translate_files([file], words, {"PROFILE": "laptop"})

    turns = "actor_rollout_ref.rollout.multi_turn.max_assistant_turns"
    assert {f"{turns}=3", "actor_rollout_ref.rollout.n=4", "trainer.save_freq=7"} <= {
        *found.overrides
    }
    assert found.overrides[-1] == "~mixed.x"
    assert f"  agent.max_steps = 8 -> {turns}=8 (the command line has another)" in found.lines
    assert "command line:" in found.lines


@pytest.mark.parametrize(
    ("word", "override"),
    [
        ("++agent.num_chains=4", "actor_rollout_ref.rollout.n=4"),  # as AgentFly's own Hydra wants
        ("agent_loops.mine._target_=my.Loop", "++agent_loops.mine._target_=my.Loop"),
    ],
)
def test_a_plus_is_not_needed_and_does_no_harm(word: str, override: str) -> None:
    assert translate_files([], [word], {"PROFILE": "laptop"}).overrides == [override]


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("agnet.max_steps=8", "agent.max_steps"),
        ("learning_rate=5e-7", "training.learning_rate"),
        ("profil=laptop", "profile"),
    ],
)
def test_an_unknown_section_on_the_command_line_names_the_nearest_key(word: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {near}\\?"):
        translate_files([], [word], {"PROFILE": "laptop"})


@pytest.mark.parametrize(
    "word",
    ["agent.pool_size=8", "pool_size=8", "tools.pool_size=8", "foo.name=a", "mixed.pool_size=3"],
)
def test_a_key_that_no_known_key_is_near_is_told_where_keys_are_listed_and_no_other_key(
    word: str,
) -> None:
    with pytest.raises(ConfigError, match=r"unknown key .*docs/\w+.md lists all") as error:
        translate_files([], [word, "agent.num_chains=4"], {"PROFILE": "laptop"})
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["trainer.experiment_name=20240101"], {"mixed.experiment": "20240101"}),
        (["agent.max_steps=3", "agent.max_steps=4"], {f"{TURNS}.max_assistant_turns": 4}),
        (["data.ratios={taco: 0.5, nq: 0.5}"], {"mixed.sources.math.ratio": 0}),
        # as a dry run prints the command
        (["data.train_files=[]", "data.val_files=[]", "agent.max_steps=3"], {"data.val_files": []}),
        (
            [f"{TURNS}.tool_config.code_start_tag=[code]", "agent.max_steps=3"],
            {f"{TURNS}.tool_config.code_start_tag": "[code]"},
        ),
        (
            ["mixed.sources.math=null", "mixed.sources.nq.ratio=0", "agent.agent_type=code"],
            {
                "mixed.sources.taco.agent": "code_execution_agent",
                "mixed.sources.nq.agent": "search_agent",
            },
        ),
    ],
)
def test_words_of_the_command_line_mean_what_they_mean_elsewhere(
    words: list[str], wanted: dict[str, Any]
) -> None:
    overrides = translate_files([], words, {"PROFILE": "laptop"}).overrides

    config = container(["profile=laptop", *overrides])
    assert {key: at(config, key) for key in wanted} == wanted


def test_what_the_command_line_says_twice_is_a_contradiction() -> None:
    words = ["trainer.experiment_name=a", "mixed.experiment=b"]

    with pytest.raises(ConfigError, match=r"both set mixed\.experiment"):
        translate_files([], words, {"PROFILE": "laptop"})


@pytest.mark.parametrize(
    ("override", "is_theirs"),
    [
        ("agent.max_steps=3", True),
        ("data.train_files=train.json", True),
        ("data.train_files=[a.parquet,b.parquet]", False),
        ("trainer.experiment_name=x", True),
        ("algorithm.adv_estimator=ppo", True),
        ("algorithm.adv_estimator=grpo", False),
        ("critic.ppo_mini_batch_size=2", False),
        ("trainer.save_freq=2", False),
        ("+agent.max_steps=3", True),
        ("agent_loops.mine._target_=my.Loop", True),
        ("agnet.max_steps=3", True),
        ("+mixed.sources.mine={ratio: 1}", False),
        ("training_engine=dp", False),
        ("profile=gpu", False),
        ("hardware.num_gpus=${oc.env:GPUS}", False),
    ],
)
def test_only_keys_and_values_of_agentfly_ask_for_a_translation(
    override: str, is_theirs: bool
) -> None:
    assert is_agentflys(override) is is_theirs


def test_a_micro_batch_of_rows_ends_micro_batches_by_tokens() -> None:
    gpu = container(["profile=gpu"])
    key = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"

    found = translate(document(f"{key}: 2\nagent: {{max_steps: 3}}"), gpu).overrides

    assert "actor_rollout_ref.actor.use_dynamic_bsz=false" in found
    assert "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2" in found
    assert not any("ref.log_prob_micro" in each for each in found if "rollout.log" not in each)


@pytest.mark.parametrize(
    ("text", "other", "said"),
    [
        ("agent: {agent_type: %s}", "code", "mixed.sources.*.agent"),
        ("data: {source: %s}", "nq", "mixed.sources.*.ratio"),
        ("agent: {reward_name: %s}", "code", "mixed.sources.*.reward"),
        ("monitoring: {project_name: %s}", "b", "trainer.project_name"),
    ],
)
def test_a_key_that_two_files_have_is_named_once_with_what_it_sets(
    text: str, other: str, said: str, run: dict[str, Any]
) -> None:
    both = document(text % "math", "a.yaml") + document(text % other, "b.yaml")

    with pytest.raises(ConfigError) as refused:
        translate(both, run)

    (problem,) = refused.value.problems
    assert problem.endswith(f"='math' (a.yaml): both set {said}; remove one of them")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("agent: {max_steps: 8, max_turns: 9}", "agent.max_turns=9"),
        ("training: {save_freq: 5}\nmonitoring: {save_freq: 6}", "monitoring.save_freq=6"),
        ("training: {use_kl_loss: true}\nactor_rollout_ref: {actor: {use_kl_loss: false}}", "both"),
        ("data: {train_files: a.json, val_files: b.parquet}", "of another kind"),
        ("data: {train_files: a.json, ratios: {nq: 1}}", "is one source"),
        ("data: {ratios: {mine: 1}}", "no source mine"),
        (
            "data: {source: mine, train_files: a.parquet}",
            "no source mine; the mixture has taco, nq, math",
        ),
        ("agent: {agent_type: code, tools: [google_search]}", "or take agent_type=react"),
    ],
)
def test_what_contradicts_itself_is_refused(text: str, said: str, run: dict[str, Any]) -> None:
    (problem,) = problems_of(text, run)

    assert said in problem


@pytest.mark.parametrize("key", ["agent: {agent_type: %s}", "data: {source: %s}"])
def test_two_files_that_say_one_thing_differently_are_refused(
    key: str, run: dict[str, Any]
) -> None:
    both = document(key % "math", "a.yaml") + document(key % "code", "b.yaml")

    with pytest.raises(ConfigError, match=r"='code' \(b.yaml\) contradicts .*='math' \(a.yaml\)"):
        translate(both, run)


def test_one_key_may_be_said_twice_alike(run: dict[str, Any]) -> None:
    text = "agent: {model_name_or_path: a/b, max_steps: 8, max_turns: 8}\nmodel: {path: a/b}"

    overrides = translate(document(text), run).overrides

    assert overrides == [
        "actor_rollout_ref.model.path='a/b'",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8",
    ]


def test_parts_that_agentfly_puts_agent_keys_under_make_no_difference(run: dict[str, Any]) -> None:
    nested = "agent: {init_config: {backend: async_verl}, generation_config: {max_tokens: 64}}"

    overrides = translate(document(nested), run).overrides

    assert overrides == translate(document("agent: {max_tokens: 64}"), run).overrides
    assert overrides == ["actor_rollout_ref.rollout.multi_turn.max_turn_length=64"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tools", "agent"),
    [
        ("[code_interpreter, answer]", "code_execution_agent"),
        ("[google_search_serper]", "search_agent"),
        ("[calculator]", "math_agent"),
        ("[calculator, dense_retrieve]", "react_agent"),
    ],
)
def test_tools_choose_the_agent_where_no_type_is_given(
    tools: str, agent: str, run: dict[str, Any]
) -> None:
    config = composed(translate(document(f"agent: {{tools: {tools}}}"), run))

    assert {one["agent"] for one in config["mixed"]["sources"].values()} == {agent}


def test_ratios_are_the_mixture_and_sources_not_named_are_left_out(run: dict[str, Any]) -> None:
    text = "data: {ratios: {math: 0.75, nq: 0.25}}\nagent: {reward_name: exact_match_reward}"

    sources = composed(translate(document(text), run))["mixed"]["sources"]

    assert {name: one["ratio"] for name, one in sources.items()} == {
        "taco": 0,
        "nq": 0.25,
        "math": 0.75,
    }
    assert {name: one["reward"] for name, one in sources.items()} == {
        "taco": "code",
        "nq": "exact_match_reward",
        "math": "exact_match_reward",
    }


def test_rows_of_parquet_files_keep_the_mixture(run: dict[str, Any], tmp_path: Path) -> None:
    text = f"data: {{train_files: {tmp_path}/a.parquet, val_files: [{tmp_path}/b.parquet]}}"

    overrides = translate(document(text), run).overrides

    assert overrides == [
        f"data.train_files=['{tmp_path}/a.parquet']",
        f"data.val_files=['{tmp_path}/b.parquet']",
    ]


def test_the_run_configs_own_keys_pass_as_they_are(run: dict[str, Any]) -> None:
    text = """
mixed: {sources: {mine: {ratio: 0.5, files: [a.parquet]}}, prompts: {mine: {user: "{question}?"}}}
trainer: {resume_mode: disable}
actor_rollout_ref: {model: {override_config: {attn_implementation: eager}}}
"""

    config = composed(translate(document(text), run))

    assert config["mixed"]["sources"]["mine"] == {"ratio": 0.5, "files": ["a.parquet"]}
    assert config["mixed"]["prompts"]["mine"] == {"user": "{question}?"}
    assert config["trainer"]["resume_mode"] == "disable"
    assert at(config, "actor_rollout_ref.model.override_config.attn_implementation") == "eager"


@pytest.mark.slow
def test_command_line_wins_over_file_over_environment_over_profile(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(
        "training: {learning_rate: 2e-6}\nagent: {num_chains: 6}\ndata: {train_batch_size: 12}\n"
    )
    environ = {
        "PROFILE": "laptop",
        "LEARNING_RATE": "1e-6",
        "ROLLOUT_N": "5",
        "TOTAL_TRAINING_STEPS": "7",
    }
    given = ["actor_rollout_ref.actor.optim.lr=3e-6"]

    translation = translate_files([file], given, environ)
    config = container(overrides_from(environ, [*translation.overrides, *given]))

    assert at(config, "actor_rollout_ref.actor.optim.lr") == 3e-6  # the command line
    assert at(config, "actor_rollout_ref.rollout.n") == 6  # the file
    assert at(config, "data.train_batch_size") == 12  # the file, over the profile
    assert at(config, "trainer.total_training_steps") == 7  # the environment, over the profile
    assert at(config, "trainer.device") == "cpu"  # the profile
    (line,) = [line for line in translation.lines if "learning_rate" in line]
    assert line.endswith("(the command line has another)")


def test_a_file_names_the_profile_whose_keys_it_may_use(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("hardware: {profile: laptop}\n")

    translation = translate_files([file], [], {"PROFILE": "no_such_profile"})

    assert translation.overrides == ["profile=laptop"]
    assert translate_files([file], ["profile=laptop"], {}).overrides == ["profile=laptop"]


def test_values_of_the_environment_stand_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_MODEL", "a/b")
    file = tmp_path / "my.yaml"
    file.write_text("model: {path: '${oc.env:MY_MODEL}'}\ntraining: {learning_rate: 5e-7}\n")

    assert read(file) == [
        Value(key="model.path", value="a/b", path=file),
        Value(key="training.learning_rate", value=5e-7, path=file),
    ]


def test_a_variable_that_is_not_set_is_named_with_its_key(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("model: {path: '${oc.env:NEVER_SET}'}\n")

    with pytest.raises(ConfigError) as refused:
        read(file)

    (problem,) = refused.value.problems
    assert problem.startswith(f"cannot read --config {file}: model.path: ")
    assert "Environment variable 'NEVER_SET' not found" in problem
    assert problem.endswith("set what ${...} names there, or write the value itself")


@pytest.mark.parametrize("text", ["a: [", "- 1", "a: ${b}", "1: 2"])
def test_a_file_that_is_no_config_is_refused_by_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError, match=re.escape(f"--config {file}")):
        read(file)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"never\.yaml: No such file"):
        read(tmp_path / "never.yaml")


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@example("A¹")  # a letter and a digit, but not for Hydra's lexer
@given(st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=6))
def test_a_value_comes_out_of_hydra_as_it_went_in(value: Any) -> None:
    parsed = OverridesParser.create().parse_override(f"a={hydra_text(value)}").value()

    node = OmegaConf.create({"a": parsed})

    assert OmegaConf.to_container(node, resolve=True) == {"a": value}


@pytest.mark.slow
def test_what_the_table_sets_is_in_the_run_config_of_every_profile() -> None:
    for profile in sorted((REPO_ROOT / "config" / "profile").glob("*.yaml")):
        there = flatten(container([f"profile={profile.stem}"])).keys() | {"profile"}
        wanted = {key for one in KEYS.values() for key in one.sets}
        own = {key.removeprefix(EVERY_SOURCE) for key in wanted if key.startswith(EVERY_SOURCE)}
        missing = {key for key in wanted - there if not key.startswith(EVERY_SOURCE)}
        assert own == {"reward", "system_prompt"}
        assert missing == set(), profile


def test_the_page_lists_every_key_with_what_it_sets() -> None:
    page = (REPO_ROOT / "docs" / "configuration.md").read_text()
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", page, re.MULTILINE))

    assert rows.keys() == KEYS.keys() | {f"agent_type: {name}" for name in AGENTS} | {
        f"tools: {name}" for name in TOOLS
    }
    for name, key in KEYS.items():
        for ours in key.sets:
            assert f"`{ours}`" in rows[name], name


def test_copies_of_the_files_are_kept_beside_one_another(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "my.yaml", tmp_path / "b" / "my.yaml"
    for file in (first, second):
        file.parent.mkdir()
        file.write_text(file.parent.name)

    keep_copies([first, second], tmp_path / "kept")

    kept = sorted((tmp_path / "kept").iterdir(), key=os.path.getmtime)
    assert sorted(file.read_text() for file in kept) == ["a", "b"]
    assert all(file.name.endswith("-my.yaml") for file in kept)
