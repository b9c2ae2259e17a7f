"""What agent loops set reaches verl's batch, through our worker and verl's post-processing."""

import asyncio
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

pytest.importorskip("verl")

from omegaconf import OmegaConf
from transformers import BatchFeature, PretrainedConfig
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopMetrics,
    AgentLoopOutput,
    _agent_loop_registry,
)
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema

from agent_loop.loop_settings import settings_of
from agent_loop.training.verl_adapters.engine_client import EngineTurn, RecordingClient, routes_of
from agent_loop.training.verl_adapters.foreign_loop import PASSED, READ
from agent_loop.training.verl_adapters.loop_worker import MixedAgentLoopWorker, _route_shape
from agent_loop.turn_agent_loop import TaggedAgentLoop
from agent_loop.turns.turn_loop import Observation
from tests.agent_loop.test_loop_worker import ROW
from tests.fakes.engine import record_in
from tests.fakes.real_tokenizers import CONTROL, real_tokenizer
from tests.fakes.virtual_loop import run_virtual

TOKENIZER = real_tokenizer("pieces")
IMAGE = CONTROL[0]
SHAPE = (2, 3)
"""Layers, and experts of a token."""

CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call><|im_end|>'
TEXT = [{"role": "user", "content": "what?"}]
PICTURE = [
    {
        "role": "user",
        "content": [{"type": "image", "image": "cat"}, {"type": "text", "text": "what?"}],
    }
]


class Processor:
    """Four placeholders and one row of pixels for each image."""

    tokenizer, image_processor = TOKENIZER, object()
    image_token_id = TOKENIZER.convert_tokens_to_ids(IMAGE)

    def apply_chat_template(self, messages: Any, **how: Any) -> str:
        flat = [
            {
                "role": message["role"],
                "content": message["content"]
                if isinstance(message["content"], str)
                else "".join(part.get("text", IMAGE) for part in message["content"]),
            }
            for message in messages
        ]
        return TOKENIZER.apply_chat_template(
            flat, tokenize=False, add_generation_prompt=how["add_generation_prompt"]
        )

    def __call__(self, text: Any, images: Any = None, **_: Any) -> BatchFeature:
        ids = TOKENIZER.encode(text[0].replace(IMAGE, 4 * IMAGE), add_special_tokens=False)
        features = {"input_ids": [ids], "attention_mask": [[1] * len(ids)]}
        if images:
            features["pixel_values"] = [[0.5]] * len(images)
        return BatchFeature(features)


class Dataset:
    @classmethod
    async def process_multi_modal_info(cls, messages: Any, **_: Any) -> Any:
        parts = [part for m in messages if isinstance(m["content"], list) for part in m["content"]]
        return [part["image"] for part in parts if "image" in part] or None, None, None


class Engine:
    """verl's client: says one text after the other, and returns routes that count the tokens."""

    def __init__(self, *texts: str, routes: Any) -> None:
        self.texts, self.routes = iter(texts), routes

    async def _acquire_server(self, request_id: str) -> Any: ...

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> Any:
        ids = TOKENIZER.encode(next(self.texts), add_special_tokens=False)
        routes = np.arange(1, len(prompt_ids) + len(ids))[:, None, None] + np.zeros(SHAPE, int)
        return SimpleNamespace(
            token_ids=ids,
            log_probs=[-1.0] * len(ids),
            routed_experts=self.routes(routes),
            num_preempted=0,
            extra_fields={"global_steps": 3, "num_cached_tokens": 1},
        )


class Users:
    """A user's loop: two requests with a tool's words between them."""

    keeps_history = True
    output: type[AgentLoopOutput] = AgentLoopOutput
    sets: ClassVar[dict[str, Any]] = {}
    """Further fields of its output."""

    def __init__(self, *, server_manager: Any, **_: Any) -> None:
        self.engine = server_manager

    async def run(self, sampling_params: Any, raw_prompt: Any, **_: Any) -> Any:
        images, _, _ = await Dataset.process_multi_modal_info(raw_prompt)
        text = Processor().apply_chat_template(raw_prompt, add_generation_prompt=True)
        asked = Processor()(text=[text])["input_ids"][0]
        ids, mask = list[int](), list[int]()
        for request in (1, 2):
            before = [*asked, *ids] if self.keeps_history else asked
            answer = await self.engine.generate(
                "id", prompt_ids=before, sampling_params=sampling_params, image_data=images
            )
            ids, mask = ids + answer.token_ids, mask + [1] * len(answer.token_ids)
            if request == 1:
                ids, mask = [*ids, 5, 6], [*mask, 0, 0]
        fields = {"prompt_ids": asked, "response_ids": ids, "response_mask": mask}
        metrics = {"metrics": AgentLoopMetrics(tool_calls=0.5)}
        return self.output.model_validate({**fields, **metrics, **self.sets})


class Hanging(Users):
    async def run(self, *args: Any, **row: Any) -> Any:
        await super().run(*args, **row)
        await asyncio.Event().wait()


class Forgetting(Users):
    keeps_history = False


class Ours(TaggedAgentLoop):
    actions = ("code", "answer")

    async def act(self, action: Any, extras: Any) -> Observation:
        return Observation(text="4")


def config_of(max_turn_length: int | None = None, **source: Any) -> Any:
    tools = {"server_url": "http://127.0.0.1:1", "enable_global_rate_limit": False}
    multi_turn = {
        **{"max_user_turns": 3, "max_assistant_turns": 3, "max_parallel_calls": 1},
        **{"max_tool_response_length": 99, "tool_response_truncate_side": "left"},
        **{"format": "hermes", "max_turn_length": max_turn_length, "tool_config": tools},
    }
    rollout = {
        **{"name": "vllm", "seed": 0, "n": 2, "val_kwargs": {"n": 1}, "full_determinism": False},
        **{"temperature": 1.0, "top_p": 1.0, "prompt_length": 500, "response_length": 500},
        **{"multi_turn": multi_turn, "enable_rollout_routing_replay": True},
    }
    mixed = {"experiment": "x", "run_dir": "/x", "sources": {"nq": {"ratio": 1, **source}}}
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": rollout},
            "algorithm": {"adv_estimator": "grpo"},
            "mixed": mixed,
            "data": {},
        }
    )


async def batched(
    agent: str | type, monkeypatch: pytest.MonkeyPatch, *texts: str, **how: Any
) -> Any:
    """The row of verl's batch that a trajectory becomes."""
    (fields,) = await rows_of(agent, monkeypatch, *texts, **how)
    return fields


async def rows_of(
    agent: str | type,
    monkeypatch: pytest.MonkeyPatch,
    *texts: str,
    prompt: Any = TEXT,
    replay: bool = False,
    routes: Any = lambda routes: routes,
    tools: Any = None,
    agent_settings: Any = None,
    **source: Any,
) -> Any:
    """The rows of verl's batch that a session becomes."""
    worker: Any = object.__new__(MixedAgentLoopWorker)
    worker._written = defaultdict(list)
    worker.config = config_of(**source)
    worker.settings = settings_of(worker.config)
    worker._route_shape = SHAPE if replay else None
    engine = Engine(*(texts or ("ab", "<answer>b</answer>")), routes=routes)
    worker.llm_client = RecordingClient(engine, worker._route_shape)
    worker.tokenizer, worker.hf_model_type = TOKENIZER, "qwen2" + "_vl" * (prompt is PICTURE)
    worker.processor = Processor() if prompt is PICTURE else None
    worker.mm_processor_kwargs, worker.dataset_cls = {}, Dataset
    worker.reward_loop_worker_handles, worker.distillation_enabled = None, False
    schema = {"name": "look", "description": "", "parameters": {"type": "object"}}
    schema["parameters"] |= {"properties": {}, "required": []}
    worker.tools = [
        FunctionTool(
            name="look",
            fn=lambda: "4",
            tool_schema=OpenAIFunctionToolSchema.model_validate(
                {"type": "function", "function": schema}
            ),
        )
    ]
    worker._is_seeded, worker._needs_baseline, worker._baselines = False, False, {}
    if isinstance(agent, type):
        target = f"{agent.__module__}.{agent.__qualname__}"
        entry = {"_target_": target, **(agent_settings or {})}
        monkeypatch.setitem(_agent_loop_registry, "users", OmegaConf.create(entry))
        agent = "users"

    async def client(*_: Any) -> Any:
        return SimpleNamespace(for_source=lambda *_: tools)

    put: list[Any] = []

    async def kv_put(fields: Any, **_: Any) -> None:
        put.extend(fields)

    for module in ("loop_worker", "turn_agent_loop"):
        monkeypatch.setattr(f"agent_loop.{module}.shared_client", client)
    monkeypatch.setattr("verl.trainer.ppo.v1.agent_loop_tq.tq.async_kv_batch_put", kv_put)
    row = ROW | {"uid": "u", "session_id": 0, "global_steps": 4, "raw_prompt": prompt}
    await worker._run_agent_loop(
        {"temperature": 1.0}, trajectory={"validate": False}, agent_name=agent, **row
    )
    return put


# --- images --------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", ["single_turn_agent", "tool_agent", Users])
async def test_a_trajectory_with_an_image_is_trained_with_its_pixels(agent, monkeypatch):
    row = await batched(agent, monkeypatch, prompt=PICTURE)
    assert row["prompts"].tolist().count(Processor.image_token_id) == 4
    assert row["multi_modal_inputs"]["pixel_values"].tolist() == [[0.5]]


def test_a_trajectory_that_was_ended_keeps_its_pixels(monkeypatch):
    row, _ = run_virtual(batched(Hanging, monkeypatch, prompt=PICTURE))
    assert row["prompts"].tolist().count(Processor.image_token_id) == 4
    assert row["multi_modal_inputs"]["pixel_values"].tolist() == [[0.5]]


async def test_images_that_a_loop_names_are_those_of_the_trajectory(monkeypatch):
    monkeypatch.setattr(Users, "sets", {"multi_modal_data": {"images": ["cat", "dog"]}})
    row = await batched(Users, monkeypatch, prompt=PICTURE)
    assert len(row["multi_modal_inputs"]["pixel_values"]) == 2


async def test_our_own_loops_lose_a_prompt_with_an_image_by_name(monkeypatch):
    row = await batched(Ours, monkeypatch, prompt=PICTURE)
    assert "text only" in (record_in(row).fault or "")
    assert not any(row["response_mask"])


async def test_our_own_loop_that_is_lost_in_its_first_turn_has_the_current_version(monkeypatch):
    row = await batched(Ours, monkeypatch, "")  # the engine returns no token
    fields = row["extra_fields"]
    assert record_in(row).fault_tool == "engine"
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (3, 3)


# --- routes of experts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agent", "texts"),
    [
        ("single_turn_agent", ["ab<|im_end|>"]),
        ("tool_agent", [CALL, "ab<|im_end|>"]),
        (Users, ["ab", "<answer>b</answer>"]),
        (Ours, ["<code>2+2</code> cut off", "<answer>b</answer> cut off"]),
        (Ours, ["<code>2+2</code>"] * 2 + ["<code>2+2</code> cut off"]),
    ],
)
async def test_each_token_is_replayed_with_the_engine_s_routes(agent, texts, monkeypatch):
    row = await batched(agent, monkeypatch, *texts, replay=True)
    routes, tokens = row["routed_experts"], len(row["input_ids"])
    assert (routes.shape, routes.dtype) == ((tokens, *SHAPE), torch.int16)
    trained = row["response_mask"].nonzero().flatten().tolist()
    assert len(texts) == 1 or len(trained) < len(row["response_mask"])  # a tool wrote tokens too
    # The route of a token is its place from 1; the engine has none for the last one.
    last = len(row["prompts"]) + trained[-1]
    for layer in routes.flatten(1).unbind(1):
        assert layer[:last].tolist() == list(range(1, last + 1))
        assert set(layer[last + 1 :].tolist()) <= {0}


async def test_without_router_replay_a_row_has_no_routes(monkeypatch):
    assert "routed_experts" not in await batched(Ours, monkeypatch)


async def test_a_lost_trajectory_has_routes_of_the_same_shape(monkeypatch):
    row = await batched(Ours, monkeypatch, prompt=PICTURE, replay=True)
    assert row["routed_experts"].shape == (len(row["input_ids"]), *SHAPE)
    assert not row["routed_experts"].any() and not row["response_mask"].any()


@pytest.mark.parametrize("agent", ["tool_agent", Users, Ours])
@pytest.mark.parametrize(
    "lacks", [lambda routes: None, lambda routes: routes[:-1], lambda routes: routes[:, :1]]
)
async def test_routes_that_the_engine_lacks_are_its_fault(agent, lacks, monkeypatch):
    row = await batched(agent, monkeypatch, replay=True, routes=lacks)
    record = record_in(row)
    assert record.fault_tool == "engine" and "router replay" in (record.fault or "")
    assert not any(row["response_mask"]) and not row["routed_experts"].any()


async def test_a_loop_whose_requests_leave_tokens_out_is_refused_where_routes_are_replayed(
    monkeypatch,
):
    row = await batched(Forgetting, monkeypatch, replay=True)
    assert "are needed for router replay" in (record_in(row).fault or "")
    trained = await batched(Forgetting, monkeypatch)
    assert record_in(trained).fault is None


def test_routes_are_those_of_the_request_that_the_trajectory_continues():
    def turn(prompt: list[int], answer: list[int]) -> Any:
        routes = np.arange(len(prompt) + len(answer) - 1)[:, None, None] + np.zeros(SHAPE, int)
        return EngineTurn(prompt, SimpleNamespace(token_ids=answer, routed_experts=routes))

    side_by_side = [turn([1, 2], [3, 4]), turn([1, 2], [5, 6, 7])]
    assert len(routes_of(side_by_side, [1, 2, 3, 4], SHAPE)) == 3
    assert len(routes_of(side_by_side, [1, 2, 5, 9, 9, 9], SHAPE)) == 3  # the turn was cut
    assert routes_of(side_by_side, [8, 8], SHAPE).shape == (0, *SHAPE)
    assert routes_of([], [8, 8], SHAPE).shape == (0, *SHAPE)


def test_the_shape_of_routes_is_the_model_s():
    config = config_of()
    model: Any = SimpleNamespace(path="m", hf_config=PretrainedConfig())
    model.hf_config.num_hidden_layers = 2
    with pytest.raises(ValueError, match=r"config\.json of m lacks .*num_experts_per_tok"):
        _route_shape(config, model)
    model.hf_config.num_experts_per_tok = 3
    assert _route_shape(config, model) == SHAPE
    config.actor_rollout_ref.rollout.enable_rollout_routing_replay = False
    assert _route_shape(config, model) is None


# --- rewards and extra fields --------------------------------------------------------------------

INFO = {"acc": 0.0, "depth": 4, "pred": "b", "tree": [1]}


@pytest.mark.parametrize(
    ("source", "sets", "score", "acc", "parts"),
    [
        ({}, {"reward_score": 0.25}, 0.25, 0.0, {}),
        ({}, {"reward_score": 1.5}, 1.5, 1.0, {}),
        ({"reward": "loop"}, {"reward_score": 0.25}, 0.25, 0.0, {}),
        ({}, {"reward_score": 1, "extra_fields": {"reward_extra_info": INFO}}, 1, 0, {"depth": 4}),
        ({"reward_terms": {"format": {"weight": 0.5}}}, {"reward_score": 1}, 1.5, 1, {"task": 1}),
        ({"reward": "qa"}, {"reward_score": 0.25}, 1.0, 1.0, {"loop_score": 0.25, "loop_acc": 0.0}),
        ({}, {}, 1.0, 1.0, {"em": 1.0}),
    ],
)  # fmt: skip
async def test_a_loop_s_own_reward_is_the_reward_unless_the_source_names_another(
    source, sets, score, acc, parts, monkeypatch
):
    monkeypatch.setattr(Users, "sets", sets)
    row = await batched(Users, monkeypatch, "so", "<answer>ab</answer>", **source)
    assert row["rm_scores"].sum() == score
    info, own = (
        row["extra_fields"]["reward_extra_info"],
        record_in(row).reward_parts,
    )
    assert (info["score"], info["acc"], info["format"]) == (score, acc, 1.0)
    assert own.items() >= parts.items()


async def test_a_loop_s_own_fields_stay_beside_ours(monkeypatch):
    theirs = {"reward_extra_info": INFO, "min_global_steps": 9, "tool_rewards": [0.5]}
    monkeypatch.setattr(Users, "sets", {"extra_fields": theirs, "num_turns": 7})
    row = await batched(Users, monkeypatch)
    extra = row["extra_fields"]
    assert extra["tool_rewards"] == [0.5] and extra["min_global_steps"] == 3
    assert (extra["reward_extra_info"]["depth"], extra["reward_extra_info"]["pred"]) == (4, "b")
    assert "tree" not in extra["reward_extra_info"]
    assert (row["num_turns"], row["metrics"]["tool_calls"]) == (7, 0.5)


async def test_verl_s_own_fields_of_its_loops_reach_the_batch(monkeypatch):
    row = await batched("tool_agent", monkeypatch, CALL, "ab")
    assert row["extra_fields"]["tool_rewards"] == [0.0]
    assert row["num_turns"] == 4  # the prompt, two turns and a tool's answer
    assert row["metrics"]["tool_calls"] > 0


class Wider(AgentLoopOutput):
    tree: Any = None


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ({"extra_fields": {"mixed": {}}}, "has mixed: the trainer has values of its own"),
        ({"extra_fields": {"session": threading.Lock()}}, "extra_fields.session of a loop of"),
        ({"reward_score": float("nan")}, "want a finite number"),
        ({"reward_score": 1e39}, "want a finite number"),
        ({"tree": 1}, "has tree: verl's batch takes no such field"),
    ],
)
async def test_what_cannot_be_passed_on_costs_its_trajectory_and_is_named(sets, words, monkeypatch):
    monkeypatch.setattr(Users, "sets", sets)
    monkeypatch.setattr(Users, "output", Wider)
    row = await batched(Users, monkeypatch)
    assert words in (record_in(row).fault or "")
    assert not any(row["response_mask"]) and row["extra_fields"]["reward_extra_info"]["loop_error"]


async def test_a_loop_that_is_to_judge_and_does_not_is_named(monkeypatch):
    row = await batched(Users, monkeypatch, reward="loop")
    assert "set no reward_score" in (record_in(row).fault or "")


def test_every_field_of_verl_s_output_is_read_or_passed_on():
    assert {*READ, *PASSED} == AgentLoopOutput.model_fields.keys()
