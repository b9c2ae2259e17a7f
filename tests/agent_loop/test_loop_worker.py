"""The worker that hosts agent loops: whatever a loop does costs its trajectory and is named."""

import asyncio
import itertools
import json
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("verl")

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils.tensordict_utils import assign_non_tensor_data, get_tensordict
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from agent_loop.loop_lag import LoopLag
from agent_loop.loop_settings import STARTS_PER_PASS, LoopSettings
from agent_loop.row import Row
from agent_loop.seeds import seed_from
from agent_loop.training.verl_adapters import loop_worker
from agent_loop.training.verl_adapters.engine_client import (
    RecordingClient,
    faults_of_trajectory,
    seeds_of_trajectory,
    turns_of_trajectory,
)
from agent_loop.training.verl_adapters.loop_worker import (
    MixedAgentLoopManager,
    MixedAgentLoopWorker,
)
from agent_loop.turn_agent_loop import _Engine
from agent_loop.turns.turn_loop import Budget, Stop
from agent_loop.watchdog import Watchdog
from config.schema import MixedConfig, ToolConfig
from samplers.queue_view import ENDED
from tests.fakes.real_tokenizers import real_tokenizer
from tests.fakes.virtual_loop import VirtualLoop, run_virtual

TOKENIZER = real_tokenizer("pieces")
ROW = {
    "data_source": "nq",
    "extra_info": {"row_id": "nq:1"},
    "reward_model": {"ground_truth": json.dumps({"target": ["ab"]})},
}


UID = f"{'0' * 32}.7.nq"
OWN = {"uid": UID, "agent_name": "loop", "session_id": 0}
TRAIN = {"validate": False, "step": 3}


async def put_nothing(output: Any, validate: bool, **row: Any) -> None: ...


class Loop:
    """A loop that is not ours; asks the engine once and then does what its subclass does."""

    def __init__(self, *, server_manager: Any, **_: Any) -> None:
        self.engine = server_manager

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        output = await self.engine.generate("id", prompt_ids=[1], sampling_params={})
        return self.finish(list(output.token_ids))

    def finish(self, ids: list[int]) -> Any:
        return AgentLoopOutput(
            prompt_ids=[1],
            response_ids=ids,
            response_mask=[1] * len(ids),
            metrics=AgentLoopMetrics(),
        )


class Raising(Loop):
    def finish(self, ids: list[int]) -> Any:
        raise KeyError("the table is torn")


class Several(Loop):
    def finish(self, ids: list[int]) -> Any:
        return [super().finish(ids)] * 2


class Twice(Several):
    several_rows = True


class Nothing(Loop):
    def finish(self, ids: list[int]) -> Any:
        return []


class Rows(Loop):
    """Two conversations side by side, in one of which the engine goes on."""

    several_rows = True

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        async def say(ids: list[int]) -> list[int]:
            output = await self.engine.generate("id", prompt_ids=ids, sampling_params={})
            return list(output.token_ids)

        first, helper = await say([1]), await say([9, 9])
        then = await say([1, *first, 7])
        ids = [*first, 7, *then]
        mask = [1] * len(first) + [0] + [1] * len(then)
        rows = [([9, 9], helper, [1] * len(helper)), ([1], ids, mask)]
        return [
            AgentLoopOutput(
                prompt_ids=prompt,
                response_ids=response,
                response_mask=bits,
                metrics=AgentLoopMetrics(),
            )
            for prompt, response, bits in rows
        ]


class TimingOut(Loop):
    def finish(self, ids: list[int]) -> Any:
        raise TimeoutError("search backend: read timed out")


class Cancelled(Loop):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        inner = asyncio.ensure_future(asyncio.Event().wait())
        inner.cancel()
        await inner


class Hanging(Loop):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        await super().run(sampling_params, **row)
        await asyncio.Event().wait()


class Slow(Loop):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        await asyncio.sleep(4.0)
        return await super().run(sampling_params, **row)


class Swallowing(Loop):
    """Takes a failed request for the end of the conversation."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        with suppress(Exception):
            return await super().run(sampling_params, **row)
        return self.finish([])


class VerlsClient:
    """Answers "ab" at once, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.sampled: list[dict[str, Any]] = []
        self.acquired, self.answer, self.released = (asyncio.Event() for _ in range(3))

    async def _acquire_server(self, request_id: str, **_: Any) -> tuple[str, Any]:
        self.acquired.set()
        await self.answer.wait()
        return "server", None

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        assert (server_id, request_id) == ("server", "id")
        self.released.set()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:
        self.sampled.append(sampling_params)
        if self.error is not None:
            raise self.error
        ids = TOKENIZER.encode("ab", add_special_tokens=False)
        return SimpleNamespace(
            token_ids=ids, log_probs=[-1.0] * len(ids), extra_fields={"global_steps": 3}
        )


def worker_of(kind: type[Loop], verls_client: VerlsClient, **config: Any) -> Any:
    """A worker without Ray, whose every agent is of one kind."""
    mixed = {"experiment": "x", "run_dir": "/x", "sources": {"nq": {"ratio": 1, "reward": "qa"}}}
    worker: Any = object.__new__(MixedAgentLoopWorker)
    worker._written = defaultdict(list)
    worker.settings = LoopSettings(
        mixed=MixedConfig.model_validate(mixed),
        tools=ToolConfig(server_url="http://127.0.0.1:1", enable_global_rate_limit=False),
        budget=Budget(max_turns=3, response_length=60),
        trajectory_s=5.0,
        max_actions=1,
        backend="hf",
        sampling={},
        watchdog=Watchdog(60.0),
    )
    worker.tokenizer = TOKENIZER
    worker.llm_client = RecordingClient(verls_client)
    worker._make_loop = lambda name: kind(server_manager=worker.llm_client)
    worker.config = OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": {"seed": 0, "n": 2, "val_kwargs": {"n": 1}}},
            "algorithm": {"adv_estimator": "grpo"},
        }
    )
    worker._is_seeded, worker._needs_baseline, worker._baselines = True, False, {}
    worker._route_shape = None
    vars(worker).update(config)
    return worker


def row_of(agent: str, **columns: Any) -> Row:
    return Row.from_columns(ROW | {"agent_name": agent} | columns)


def hosted(kind: type[Loop], error: Exception | None = None, **row: Any) -> Any:
    """The output of one trajectory, in virtual time."""
    worker = worker_of(kind, VerlsClient(error))

    async def run() -> Any:
        turns: list[Any] = []
        turns_of_trajectory.set(turns)
        faults_of_trajectory.set([])
        return (await worker._host(row_of("loop", **row), {}, ROW | row, turns))[-1]

    output, _ = run_virtual(run())
    return output


@pytest.fixture(autouse=True)
def no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    async def client(*_: Any) -> Any:
        return SimpleNamespace(for_source=lambda *_: None)

    monkeypatch.setattr("agent_loop.training.verl_adapters.loop_worker.shared_client", client)


def test_a_loop_that_is_not_ours_is_judged_and_recorded():
    output = hosted(Loop)
    assert output.reward_score == 1.0
    assert output.response_logprobs == [-1.0, -1.0]
    assert output.record.stop_reason == "answered"
    assert output.extra_fields["min_global_steps"] == 3


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Raising, "KeyError: 'the table is torn'"),
        (Several, "returned 2 outputs for one session, and Several does not say that it may"),
        (Twice, "nor return them twice"),
        (Nothing, "returned no output"),
        (TimingOut, "TimeoutError: search backend"),
        (Cancelled, "CancelledError"),
    ],
)
def test_what_a_loop_raises_costs_its_trajectory_and_is_named(kind, words):
    output = hosted(kind)
    record = output.record
    assert record.stop_reason == "infra_error" and words in record.fault
    assert "Traceback" in record.loop_error
    assert not any(output.response_mask)
    parts = output.extra_fields["reward_extra_info"]
    assert (parts["loop_error"], parts["infra_error"], output.reward_score) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("kind", [Loop, Swallowing])
def test_an_engine_that_fails_is_infrastructure_whatever_the_loop_makes_of_it(kind):
    record = hosted(kind, ConnectionError("the actor died")).record
    assert (record.fault_tool, record.loop_error) == ("engine", None)
    assert "the actor died" in record.fault


def test_a_loop_past_its_deadline_is_lost_with_what_it_has():
    output = hosted(Hanging)
    assert output.record.stop_reason == "deadline"
    assert TOKENIZER.decode(output.response_ids) == "ab" and not any(output.response_mask)
    assert output.extra_fields["reward_extra_info"]["infra_error"] == 1.0


async def test_a_server_that_nobody_waits_for_any_more_is_given_back():
    verls_client = VerlsClient()
    client: Any = RecordingClient(verls_client)
    waiting = asyncio.ensure_future(client._client._acquire_server("id"))
    await verls_client.acquired.wait()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    verls_client.answer.set()
    await verls_client.released.wait()


class HeldPrompts:
    """A worker that keeps what it is given."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.generate_sequences = self

    def remote(self, batch: Any) -> None:
        assert batch["global_steps"] == 3
        self.prompts += list(batch["uid"])


@given(st.integers(1, 7), st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_workers_get_as_many_prompts_as_the_others_over_all_calls(workers, sizes):
    manager: Any = object.__new__(MixedAgentLoopManager)
    manager.agent_loop_workers = [HeldPrompts() for _ in range(workers)]
    manager._next_worker = 0
    given: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "agent_loop.training.verl_adapters.loop_worker.ray.get", lambda references: references
        )
        for size in sizes:
            uids = [f"u{len(given) + at}" for at in range(size)]
            # as TransferQueue gives the prompts of a resumed run back
            nested = torch.nested.as_nested_tensor([torch.zeros(1)] * size, layout=torch.jagged)
            columns: Any = {"uid": np.array(uids, dtype=object), "dummy_tensor": nested}
            batch = get_tensordict(columns)
            assign_non_tensor_data(batch, "global_steps", 3)
            manager.generate_sequences(batch)
            given += uids
    held = [worker.prompts for worker in manager.agent_loop_workers]
    assert sorted(uid for uids in held for uid in uids) == sorted(given)
    assert max(map(len, held)) - min(map(len, held)) <= 1


def test_a_worker_that_died_is_asked_for_once_and_its_error_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Staying:
        def __init__(self, name: str) -> None:
            self.stay = self
            self.name, self.asked = name, 0

        def remote(self) -> str:
            self.asked += 1
            return self.name

    dead: list[str] = []
    manager: Any = object.__new__(MixedAgentLoopManager)
    manager.agent_loop_workers = [Staying("one"), Staying("two")]
    manager._lives = []

    def get(references: list[str]) -> None:
        raise RuntimeError(f"{references} died")

    monkeypatch.setattr(
        "agent_loop.training.verl_adapters.loop_worker.ray.wait",
        lambda lives, timeout: ([one for one in lives if one in dead], []),
    )
    monkeypatch.setattr("agent_loop.training.verl_adapters.loop_worker.ray.get", get)
    manager.check_workers()
    manager.check_workers()
    assert [worker.asked for worker in manager.agent_loop_workers] == [1, 1]
    dead.append("two")
    with pytest.raises(RuntimeError, match=r"\['two'\] died"):
        manager.check_workers()


class Starting(Loop):
    """Counts the passes of the event loop at its start."""

    passes = 0
    began: ClassVar[list[int]] = []

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        self.began.append(Starting.passes)
        return await super().run(sampling_params, **row)


def test_trajectories_that_start_together_leave_passes_of_the_loop_to_others(monkeypatch):
    def count() -> None:
        Starting.passes += 1
        asyncio.get_running_loop().call_soon(count)

    async def run() -> None:
        asyncio.get_running_loop().call_soon(count)
        trajectories = [worker._run_agent_loop({}, TRAIN, **row) for _ in range(9)]
        await asyncio.gather(*trajectories)

    monkeypatch.setattr(Starting, "began", [])
    worker, row = worker_of(Starting, VerlsClient()), ROW | OWN
    worker._agent_loop_postprocess = put_nothing
    run_virtual(run())
    assert len(Starting.began) == 9
    assert max(Counter(Starting.began).values()) <= STARTS_PER_PASS


def test_a_trajectory_has_the_lag_of_its_worker_in_its_record(monkeypatch):
    worker = worker_of(Loop, VerlsClient())
    lag = LoopLag(clock=lambda: asyncio.get_running_loop().time())
    worker.settings = replace(worker.settings, lag=lag)
    put: list[Any] = []

    async def postprocess(outputs: list[Any], validate: bool, **row: Any) -> None:
        put.extend(outputs)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        lag.start()
        loop.call_later(1.0, loop.stand_still, 2.0)
        await worker._run_agent_loop({}, TRAIN, **ROW, **OWN)
        lag.stop()

    worker._agent_loop_postprocess = postprocess
    worker._make_loop = lambda name: Slow(server_manager=worker.llm_client)
    run_virtual(run())
    assert 1.8 <= put[0].record.loop_lag_s <= 2.4


# --- seeds and baselines ------------------------------------------------------------------------


def prompted(kind: type[Loop] = Loop, monkeypatch: Any = None, **own: Any) -> tuple[Any, Any]:
    """What a worker puts into the queue for one prompt, and what the engine was asked; `said` gets
    the tags, and `refuses` the number of each put of a tag, to say whether it fails."""
    client = VerlsClient()
    worker, put = worker_of(kind, client, **own), list[tuple[dict[str, Any], Any]]()
    numbers = itertools.count(1)

    async def postprocess(outputs: list[Any], validate: bool, **row: Any) -> None:
        put.extend((row, output) for output in outputs)

    async def kv_put(**said: Any) -> None:
        if own.get("refuses", lambda _: False)(number := next(numbers)):
            raise ConnectionError(f"put {number}")
        own.get("said", []).append(said)

    worker._agent_loop_postprocess = postprocess
    monkeypatch.setattr("verl.trainer.ppo.v1.agent_loop_tq.tq.async_kv_put", kv_put)
    validate = own.get("validate", False)
    prompt = ROW | {"uid": f"{'0' * 32}.7.nq", "agent_name": "loop"}
    trajectory = {"validate": validate, "step": 3}
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    try:
        run_virtual(worker._run_prompt(prompt, sampling, trajectory=trajectory))
    finally:
        assert not worker._written
    return put, client.sampled


@given(st.lists(st.tuples(st.integers(), st.text()), unique=True, min_size=2, max_size=20))
def test_seeds_differ_where_what_they_are_made_of_does(facts):
    seeds = [seed_from(*fact) for fact in facts]
    assert len(set(seeds)) == len(facts) and all(0 <= seed < 2**63 for seed in seeds)


def test_each_trajectory_has_seeds_of_its_own_and_has_them_again(monkeypatch):
    (_, first), (_, again) = prompted(monkeypatch=monkeypatch), prompted(monkeypatch=monkeypatch)
    seeds = [params["seed"] for params in first]
    assert len(set(seeds)) == 2
    assert sorted(seeds) == sorted(params["seed"] for params in again)


@pytest.mark.parametrize(
    ("kind", "validate", "partition", "members", "rows"),
    [(Loop, False, "train", 2, 1), (Loop, True, "val", 1, 1), (Rows, False, "train", 2, 2)],
)
def test_a_group_is_named_to_the_replay_buffer_after_its_end(
    kind: type[Loop],
    validate: bool,
    partition: str,
    members: int,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
):
    said = list[Any]()
    prompted(kind, monkeypatch, validate=validate, said=said)
    uid = f"{'0' * 32}.7.nq"
    assert [tags["tag"] for tags in said[:2]] == [{"status": "running"}, {"status": "finished"}]
    keys = [f"{uid}_{member}_{row}" for member in range(members) for row in range(rows)]
    assert said[2:] == [
        {"key": uid, "partition_id": ENDED, "tag": {"partition": partition, "keys": keys}}
    ]


@pytest.mark.parametrize(("refused", "members"), [({1}, 0), ({2, 3}, 2)])
def test_a_group_whose_end_verl_cannot_write_is_named_as_one_that_failed(
    refused: set[int], members: int, monkeypatch: pytest.MonkeyPatch
):
    """verl's puts are the first three at most: running, finished, and after an error failure."""
    said = list[Any]()
    with pytest.raises(ConnectionError, match=f"put {max(refused)}"):
        prompted(monkeypatch=monkeypatch, said=said, refuses=lambda put: put in refused)
    uid = f"{'0' * 32}.7.nq"
    keys = [f"{uid}_{member}_0" for member in range(members)]
    assert said[-2:] == [
        {"key": uid, "partition_id": "train", "tag": {"status": "failure"}},
        {"key": uid, "partition_id": ENDED, "tag": {"partition": "train", "keys": keys}},
    ]


def test_the_first_error_is_in_the_chain_if_the_queue_is_gone(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConnectionError, match="put 3") as last:
        prompted(monkeypatch=monkeypatch, refuses=lambda put: True)
    second = last.value.__context__
    assert second is not None and str(second.__context__) == "put 1"


def test_the_rows_of_a_session_have_its_reward_and_each_request_is_in_one_of_them(monkeypatch):
    put, _ = prompted(Rows, monkeypatch)
    helper, whole, *_ = [output for row, output in put if row["session_id"] == 0]
    assert (helper.response_mask, whole.response_mask) == ([1, 1], [1, 1, 0, 1, 1])
    assert helper.reward_score == whole.reward_score == 1.0
    records = [output.record for output in (helper, whole)]
    assert [record.rows for record in records] == [2, 2]
    assert [record.requests for record in records] == [3, 3]
    requests = [[turn.request for turn in record.turns] for record in records]
    assert sorted(map(len, requests)) == [1, 2] and {*requests[0], *requests[1]} == {1, 2, 3}


class SideBySide(Loop):
    """Asks for two answers at once, as a loop that searches a tree of them does."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        asked = [self.engine.generate("id", prompt_ids=[1], sampling_params={}) for _ in range(2)]
        outputs = await asyncio.gather(*asked)
        return self.finish(list(outputs[0].token_ids))


def test_requests_that_a_trajectory_makes_side_by_side_have_seeds_of_their_own(monkeypatch):
    _, sampled = prompted(SideBySide, monkeypatch)
    assert len({params["seed"] for params in sampled}) == len(sampled) == 4


def test_an_engine_that_is_not_to_be_seeded_gets_no_seed(monkeypatch):
    _, sampled = prompted(monkeypatch=monkeypatch, _is_seeded=False)
    assert len(sampled) == 2 and not any("seed" in params for params in sampled)
    assert seeds_of_trajectory.get() is None


class Answering(Loop):
    """Answers "ab", which is right, where it was asked greedily."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        output = await self.engine.generate("id", prompt_ids=[1], sampling_params=sampling_params)
        ids = list(output.token_ids)
        return self.finish(ids if sampling_params["temperature"] == 0 else ids[:1])


def test_remax_runs_one_greedy_trajectory_more_and_trains_the_others(monkeypatch):
    put, sampled = prompted(Answering, monkeypatch, _needs_baseline=True)
    assert sorted(params["temperature"] for params in sampled) == [0, 1.0, 1.0]
    assert sorted(row["session_id"] for row, _ in put) == [0, 1]
    assert [output.extra_fields["reward_baseline"] for _, output in put] == [1.0, 1.0]
    assert [output.reward_score for _, output in put] == [0.0, 0.0]


def test_a_greedy_trajectory_that_is_lost_is_no_baseline(monkeypatch):
    put, _ = prompted(Raising, monkeypatch, _needs_baseline=True)
    assert [output.extra_fields["reward_baseline"] for _, output in put] == [None, None]


def test_the_reward_lies_on_the_last_token_that_the_policy_wrote():
    output = hosted(Loop)
    output.response_ids += [5, 5]
    output.response_mask += [0, 0]
    output.response_logprobs += [0.0, 0.0]
    assert output.as_dict()["rm_scores"].tolist() == [0.0, 1.0, 0.0, 0.0]


# --- versions of the weights --------------------------------------------------------------------


class Remote:
    """A method of an actor."""

    def __init__(self, method: Any) -> None:
        self.remote = method


class PausingServer:
    """A rollout server and its load balancer. The first request of a turn is aborted after one
    token, as by a sync of the weights; the rest comes from newer weights."""

    def __init__(self, versions: list[int]) -> None:
        self.versions = versions
        for name in ("acquire_server", "release_server", "generate"):
            setattr(self, name, Remote(getattr(self, f"_{name}")))
        for name in ("require_acquire_fields", "require_release_fields"):
            setattr(self, name, Remote(self._fields))

    async def _fields(self) -> list[str]:
        return []

    async def _acquire_server(self, **_: Any) -> tuple[str, Any]:
        return "server", self

    def _release_server(self, **_: Any) -> None: ...

    async def _generate(self, **asked: Any) -> TokenOutput:
        ids = TOKENIZER.encode("ab", add_special_tokens=False)
        is_first = asked["prompt_ids"][-1] != ids[0]
        return TokenOutput(
            token_ids=ids[:1] if is_first else ids[1:],
            log_probs=[-1.0],
            stop_reason="aborted" if is_first else "completed",
            extra_fields={"global_steps": self.versions.pop(0)},
        )


class AskingAgain(Loop):
    """Asks for two turns."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        first = await self.engine.generate("id", prompt_ids=[1], sampling_params={})
        asked = [1, *first.token_ids, 7]
        second = await self.engine.generate("id", prompt_ids=asked, sampling_params={})
        output = self.finish([*first.token_ids, 7, *second.token_ids])
        output.response_mask[2] = 0
        return output


@pytest.mark.parametrize("client_class", [FullyAsyncLLMServerClient, LLMServerClient])
def test_a_turn_that_spans_two_versions_of_the_weights_counts_with_the_older(client_class):
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "hf"}}})
    server = PausingServer([3, 4, 4, 6])
    client: Any = client_class(config=config, load_balancer_handle=server)
    worker = worker_of(AskingAgain, VerlsClient())
    worker.llm_client = RecordingClient(client)

    async def run() -> Any:
        turns: list[Any] = []
        turns_of_trajectory.set(turns)
        return (await worker._host(row_of("loop", global_steps=6), {}, ROW, turns))[-1]

    output, _ = run_virtual(run())
    fields, record = output.extra_fields, output.record
    if client_class is LLMServerClient:  # it does not continue an aborted answer
        assert (record.fault_tool, record.stop_reason) == ("engine", "infra_error")
        return
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (3, 6)
    assert record.weight_versions == (3, 6)
    spans = [(turn.min_global_steps, turn.max_global_steps) for turn in record.turns]
    assert spans == [(3, 4), (4, 6)]


def test_our_loops_read_both_versions_of_an_answer():
    loop: Any = SimpleNamespace(settings=worker_of(Loop, VerlsClient()).settings)
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "hf"}}})
    balancer: Any = PausingServer([3, 4])
    loop.server_manager = RecordingClient(
        FullyAsyncLLMServerClient(config=config, load_balancer_handle=balancer)
    )
    generate = _Engine(loop, {}).generate
    stop = Stop(texts=(), token_ids=())
    generated, _ = run_virtual(generate([1], max_tokens=9, stop=stop, request_id="c"))
    assert (generated.min_global_steps, generated.max_global_steps) == (3, 4)
    assert (len(generated.token_ids), loop.server_manager.newest_version) == (2, 4)


@pytest.mark.parametrize(
    ("row", "newest", "version"),
    [({"global_steps": 5001}, 0, 5000), ({"global_steps": 4999}, 5000, 5000), ({}, 0, 0)],
)
def test_a_trajectory_lost_in_its_first_turn_has_the_current_version(row, newest, version):
    worker = worker_of(Loop, VerlsClient(ConnectionError("the actor died")))
    worker.llm_client.newest_version = newest

    async def run() -> Any:
        return (await worker._host(row_of("loop", **row), {}, ROW, []))[-1]

    output, _ = run_virtual(run())
    fields = output.extra_fields
    assert output.record.weight_versions is None
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (version, version)


class Own(Loop):
    """A loop with a setting of its own."""

    def __init__(self, *, depth: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.depth = depth


def test_an_agent_of_the_run_config_runs_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    of_file = OmegaConf.create({"name": "changed", "_target_": "not.This", "depth": 1})
    registry = {"verls": {"_target_": "verl.Loop"}, "changed": of_file}
    ready = worker_of(Own, VerlsClient())
    config = ready.config
    config.data = {}
    rollout = {"name": "hf", "max_num_seqs": 256, "agent": {"num_workers": 1}}
    config.actor_rollout_ref.rollout.update(rollout)
    config.mixed = {"agent_loops": {"own": {"_target_": f"{__name__}.Own", "depth": 2}}}
    config.agent_loops = {"own": {"depth": 3}, "changed": {"_target_": f"{__name__}.Own"}}
    made = {"config": config, "tokenizer": TOKENIZER, "llm_client": VerlsClient(), "tools": None}
    made |= dict.fromkeys(("model_config", "processor", "hf_model_type", "dataset_cls"))
    of_verl = loop_worker._VerlWorker
    monkeypatch.setattr(of_verl, "__init__", lambda worker: vars(worker).update(made))
    monkeypatch.setattr(loop_worker, "_agent_loop_registry", registry)
    monkeypatch.setattr(loop_worker, "settings_of", lambda config: ready.settings)
    worker: Any = MixedAgentLoopWorker()

    async def run() -> Any:
        turns: list[Any] = []
        turns_of_trajectory.set(turns)
        faults_of_trajectory.set([])
        return (await worker._host(row_of("own"), {}, ROW, turns))[-1]

    output, _ = run_virtual(run())
    assert output.reward_score == 1.0
    for agent, depth in {"own": 3, "changed": 1}.items():
        loop = worker._make_loop(agent)
        assert (type(loop).__name__, loop.depth) == ("Own", depth)
    assert registry["verls"] == {"_target_": "verl.Loop"}


@pytest.mark.parametrize(
    ("target", "settings", "is_plain"),
    [
        ("agent_loop.react_agent_loop.ReactAgentLoop", {"tool_names": ["search"], "topk": 2}, True),
        ("agent_loop.react_agent_loop.ReactAgentLoop", {"tool_names": [["search"]]}, False),
        ("my_loops.Loop", {"depth": 2}, True),
        ("my_loops.Loop", {"names": ["search"]}, False),
    ],
)
def test_hydra_builds_only_loops_whose_settings_are_not_plain(target, settings, is_plain) -> None:
    entry = OmegaConf.create({"_target_": target, **settings})
    assert loop_worker._read_plain_settings(entry) == (settings if is_plain else None)
