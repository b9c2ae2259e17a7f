"""Our agent loops in a recipe of verl's own: verl's config, worker, reward manager and function."""

import asyncio
import pickle
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from tensordict import NonTensorData
from transformers import Qwen2Config
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from agent_loop.code_execution_agent_loop import CodeExecutionAgentLoop
from agent_loop.loop_settings import settings_of
from agent_loop.turns.tags import Action
from agent_loop.turns.turn_loop import Observation, Rollout
from config.schema import ConfigError
from tests.fakes.real_tokenizers import calling_tokenizer
from tests.fakes.tool_server import running

VerlsWorker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class  # pyright: ignore[reportAttributeAccessIssue]
TOKENIZER = calling_tokenizer("hermes")

AGENTS = f"""
- name: code
  _target_: agent_loop.code_execution_agent_loop.CodeExecutionAgentLoop
  system_prompt: Write programs between {{code_start_tag}} and {{code_end_tag}}.
- {{name: search, _target_: agent_loop.search_agent_loop.SearchAgentLoop, topk: 2}}
- {{name: math, _target_: agent_loop.math_agent_loop.MathAgentLoop}}
- {{name: native, _target_: agent_loop.native_agent_loop.NativeAgentLoop, tool_names: [calculate]}}
- {{name: twice, _target_: {__name__}.Twice}}
- {{name: broken, _target_: {__name__}.Broken}}
- {{name: pays_much, _target_: {__name__}.Pays, score: 1e39}}
- {{name: pays, _target_: {__name__}.Pays, score: 1}}
"""
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "6*7"}}</tool_call>'
ANSWER = "<answer>42</answer>"
RAN = {"status": "Success", "run_result": {"status": "Finished", "stdout": "42\n"}}
FOUND = {"result": [[{"document": {"contents": "42"}, "score": 1.0}]]}


class Twice(CodeExecutionAgentLoop):
    """Two conversations in a session."""

    several_rows = True

    async def conversations(self, messages: list[dict[str, Any]]) -> list[Rollout]:
        return [await self.converse(list(messages)), await self.converse(list(messages))]


class Pays(CodeExecutionAgentLoop):
    """Has a reward of its own."""

    def __init__(self, *args: Any, score: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.score = score

    async def conversations(self, messages: list[dict[str, Any]]) -> list[Rollout]:
        rollout = await self.converse(messages)
        rollout.verdict = {"score": self.score}
        return [rollout]


class Broken(CodeExecutionAgentLoop):
    async def act(self, action: Action, extras: dict[str, Any]) -> Observation:
        raise KeyError("of a loop")


class Engine:
    """verl's client, which says one text after the other."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = iter(texts)

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> Any:
        ids = TOKENIZER.encode(next(self.texts), add_special_tokens=False)
        return SimpleNamespace(
            token_ids=ids,
            log_probs=[-1.0] * len(ids),
            routed_experts=None,
            num_preempted=0,
            extra_fields={"global_steps": 3},
        )


class Rewards:
    """A handle of verl's reward worker, with a user's `custom_reward_function`."""

    def __init__(self, config: DictConfig) -> None:
        self.manager = NaiveRewardManager(config, TOKENIZER, self.judge)
        self.seen: list[dict[str, Any]] = []
        self.compute_score = self

    async def remote(self, data: Any) -> dict[str, Any]:
        return await self.manager.run_single(pickle.loads(pickle.dumps(data)))  # as Ray does

    def judge(self, solution_str: str, ground_truth: Any, extra_info: Any, **_: Any) -> float:
        self.seen.append({"text": solution_str, **extra_info})
        return float(extra_info.get("answer") == str(ground_truth["target"]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    TOKENIZER.save_pretrained(folder)
    Qwen2Config(architectures=["Qwen2ForCausalLM"], num_hidden_layers=1).save_pretrained(folder)
    (folder / "agents.yaml").write_text(AGENTS)
    return folder


def recipe(model: Path, run: Path, *own: str) -> DictConfig:
    """verl's config with what a user types."""
    rollout = "actor_rollout_ref.rollout"
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={model}",
                f"{rollout}.name=vllm",
                f"{rollout}.n=1",
                f"{rollout}.agent.agent_loop_config_path={model}/agents.yaml",
                f"trainer.default_local_dir={run}",
                *own,
            ],
        )


async def rows_of(
    config: DictConfig, monkeypatch: pytest.MonkeyPatch, says: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any], Rewards]:
    """What one prompt becomes in TransferQueue: key -> its fields, and key -> its tag."""
    rows, tags = dict[str, Any](), dict[str, Any]()

    async def put(key: str, tag: Any, **_: Any) -> None:
        tags[key] = tag

    async def put_rows(keys: Any, fields: Any, tags: Any, **_: Any) -> None:
        for key, row, tag in zip(keys, fields, tags, strict=True):
            rows[key] = row
            await put(key, tag)

    queue = SimpleNamespace(init=lambda: None, async_kv_put=put, async_kv_batch_put=put_rows)
    monkeypatch.setattr("verl.trainer.ppo.v1.agent_loop_tq.tq", queue)
    before = dict(_agent_loop_registry)
    rewards = Rewards(config)
    worker = VerlsWorker(config, Engine(says), reward_loop_worker_handles=[rewards])
    row = {
        "data_source": "users/own",
        "raw_prompt": [{"role": "user", "content": "what?"}],
        "reward_model": {"style": "rule", "ground_truth": {"target": 42}},
        "extra_info": {"index": 7},
        "uid": "3f0c-1",
        "index": 7,
    }
    batch = list_of_dict_to_tensordict([row])
    batch["global_steps"] = NonTensorData(4)
    try:
        await worker.generate_sequences(batch)
        await asyncio.gather(*worker.background_tasks)
    finally:
        _agent_loop_registry.clear()
        _agent_loop_registry.update(before)
    return rows, tags, rewards


@pytest.mark.parametrize(
    ("agent", "says", "tool"),
    [
        ("code", ["<code>print(42)</code>", ANSWER], RAN),
        ("search", ["<search>42</search>", ANSWER], FOUND),
        ("math", ["<code>6*7</code>", r"\boxed{42}<|im_end|>"], {"result": 42}),
        ("native", [CALL + "<|im_end|>", ANSWER + "<|im_end|>"], {"result": 42}),
    ],
)
async def test_verls_worker_runs_our_loops_and_verls_reward_gets_the_answer(
    agent, says, tool, model, tmp_path, monkeypatch
):
    config = recipe(
        model, tmp_path / "run", f"actor_rollout_ref.rollout.agent.default_agent_loop={agent}"
    )
    async with running([tool]) as server:
        monkeypatch.setenv("TOOL_SERVER_URL", server.url)
        rows, tags, rewards = await rows_of(config, monkeypatch, says)
    assert tags["3f0c-1"] == {"status": "finished"}
    assert list(rows) == ["3f0c-1_0_0"]
    row = rows["3f0c-1_0_0"]
    sampled = [t for text in says for t in TOKENIZER.encode(text, add_special_tokens=False)]
    assert row["responses"][row["response_mask"].bool()].tolist() == sampled
    assert not row["response_mask"].bool().all()
    assert row["rm_scores"].sum() == 1
    assert row["extra_fields"]["reward_extra_info"] == {"acc": 1}
    (seen,) = rewards.seen
    assert (seen["answer"], seen["stop_reason"], seen["fault"]) == ("42", "answered", None)
    assert (seen["index"], seen["num_turns"]) == (7, 4)
    assert "42" in seen["text"]
    assert len(server.seen) == 1
    assert tags["3f0c-1_0_0"]["min_global_steps"] == 3


async def test_the_system_prompt_of_the_file_names_the_tags(model, tmp_path, monkeypatch):
    name = "actor_rollout_ref.rollout.agent.default_agent_loop=code"
    rows, _, _ = await rows_of(recipe(model, tmp_path, name), monkeypatch, [ANSWER])
    prompt = TOKENIZER.decode(rows["3f0c-1_0_0"]["prompts"])
    assert "Write programs between <code> and </code>." in prompt


async def test_rows_have_the_columns_of_verls_own_loop(model, tmp_path, monkeypatch):
    columns = []
    for agent in ("single_turn_agent", "code"):
        name = f"actor_rollout_ref.rollout.agent.default_agent_loop={agent}"
        rows, _, _ = await rows_of(recipe(model, tmp_path, name), monkeypatch, [ANSWER])
        columns.append({key: type(x) for key, x in rows["3f0c-1_0_0"].items()})
    assert columns[0] == columns[1]


async def test_a_session_that_a_fault_ended_has_no_gradient_and_the_reward_is_told(
    model, tmp_path, monkeypatch
):
    name = "actor_rollout_ref.rollout.agent.default_agent_loop=code"
    async with running([401]) as server:
        monkeypatch.setenv("TOOL_SERVER_URL", server.url)
        says = ["<code>print(42)</code>", ANSWER]
        rows, tags, rewards = await rows_of(recipe(model, tmp_path, name), monkeypatch, says)
    assert tags["3f0c-1"] == {"status": "finished"}
    assert not rows["3f0c-1_0_0"]["response_mask"].any()
    (seen,) = rewards.seen
    assert (seen["answer"], seen["stop_reason"]) == (None, "infra_error")
    assert "401" in seen["fault"]


async def test_an_error_in_the_code_of_a_loop_fails_its_group(model, tmp_path, monkeypatch):
    name = "actor_rollout_ref.rollout.agent.default_agent_loop=broken"
    rows, tags, _ = await rows_of(recipe(model, tmp_path, name), monkeypatch, ["<code>1</code>"])
    assert (rows, tags["3f0c-1"]) == ({}, {"status": "failure"})


async def test_a_loops_own_reward_is_refused_if_it_is_none(model, tmp_path, monkeypatch, caplog):
    name = "actor_rollout_ref.rollout.agent.default_agent_loop=pays"
    rows, _, _ = await rows_of(recipe(model, tmp_path, name), monkeypatch, [ANSWER])
    assert rows["3f0c-1_0_0"]["rm_scores"].sum() == 1
    with caplog.at_level("ERROR"):
        much = recipe(model, tmp_path, f"{name}_much")
        rows, tags, _ = await rows_of(much, monkeypatch, [ANSWER])
    assert (rows, tags["3f0c-1"]) == ({}, {"status": "failure"})
    assert "set score=1e+39: want a finite number" in caplog.text


async def test_all_rows_of_a_session_have_the_reward_of_its_last(model, tmp_path, monkeypatch):
    name = "actor_rollout_ref.rollout.agent.default_agent_loop=twice"
    says = ["<answer>1</answer>", ANSWER]
    rows, _, rewards = await rows_of(recipe(model, tmp_path, name), monkeypatch, says)
    assert list(rows) == ["3f0c-1_0_0", "3f0c-1_0_1"]
    assert [float(row["rm_scores"].sum()) for row in rows.values()] == [1.0, 1.0]
    assert [seen["answer"] for seen in rewards.seen] == ["42"]


def test_a_recipe_sets_what_it_likes_of_ours(model, tmp_path):
    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    config = recipe(
        model,
        tmp_path,
        f"{multi_turn}._target_=agent_loop.multi_turn_config.MixedMultiTurnConfig",
        f"+{multi_turn}.tool_config.rate_limit_per_minute=60",
        "+mixed.deadlines.trajectory_s=900",
    )
    settings = settings_of(config)
    assert settings.tools.rate_limit_per_minute == 60
    assert settings.trajectory_s == 900
    assert settings.mixed.run_dir == str(tmp_path)
    assert not settings.judges
    assert settings.budget.max_turns == settings.budget.response_length  # verl's null: no limit


def test_a_wrong_key_is_still_refused(model, tmp_path):
    with pytest.raises(ConfigError, match=r"mixed\.deadline: .*did you mean mixed.deadlines"):
        settings_of(recipe(model, tmp_path, "+mixed.deadline.trajectory_s=900"))


def test_replay_of_routes_is_refused(model, tmp_path):
    replay = "actor_rollout_ref.rollout.enable_rollout_routing_replay=true"
    with pytest.raises(ValueError, match="no routes from this project's loops; set it to false"):
        settings_of(recipe(model, tmp_path, replay))
