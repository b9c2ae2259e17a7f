"""A session of a validation inside a run and one of an evaluation have the same record."""

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf
from verl.utils.tensordict_utils import assign_non_tensor_data, get_tensordict

from agent_loop.evaluation.worker import EvaluationWorker, validation_sampling
from agent_loop.records.evaluation_records import RECORD, Record, read_record
from agent_loop.training.verl_adapters.loop_worker import MixedAgentLoopWorker
from tests.agent_loop.test_loop_worker import OWN, ROW, Loop, Raising, VerlsClient, worker_of
from tests.fakes.virtual_loop import run_virtual

SAMPLING = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": -1,
    "calculate_log_probs": True,
    "val_kwargs": {"n": 1, "temperature": 0.4, "top_p": 0.8, "top_k": 5},
    "agent": {"default_agent_loop": "loop"},
}
STEP = 16


@pytest.fixture(autouse=True)
def no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    async def client(*_: Any) -> Any:
        return SimpleNamespace(for_source=lambda *_: None)

    monkeypatch.setattr("agent_loop.training.verl_adapters.loop_worker.shared_client", client)


def worker(kind: type[Loop], client: VerlsClient) -> Any:
    made = worker_of(kind, client, _watchdog=None)
    made.config.actor_rollout_ref.rollout = {"seed": 0, "n": 2, **SAMPLING}
    return made


def evaluated(kind: type[Loop], client: VerlsClient, sample: int = 1) -> Record:
    async def run() -> Record:
        made = worker(kind, client)
        record = await EvaluationWorker.evaluate(made, dict(ROW), sample, STEP)
        made._watchdog.cancel()
        made.settings.lag.stop()
        return record

    return run_virtual(run())[0]


def validated(kind: type[Loop], client: VerlsClient, sample: int = 1) -> Record:
    """As the trainer reads it among verl's `reward_extra_info`."""
    made, put = worker(kind, client), list[Any]()

    async def postprocess(outputs: list[Any], validate: bool, **row: Any) -> None:
        put.extend(outputs)

    made._agent_loop_postprocess = postprocess
    row = ROW | OWN | {"session_id": sample, "uid": "any"}
    trajectory = {"validate": True, "step": STEP}
    run_virtual(made._run_agent_loop(validation_sampling(made.config), trajectory, **row))
    return read_record(put[-1].extra_fields["reward_extra_info"][RECORD].encode())


def test_an_evaluation_has_the_record_and_the_seeds_of_the_validation_of_its_step():
    ours, theirs = VerlsClient(), VerlsClient()
    record = evaluated(Loop, ours)
    assert record == validated(Loop, theirs)
    assert ours.sampled == theirs.sampled and "seed" in ours.sampled[0]
    assert (record.step, record.sample, record.row_id) == (STEP, 1, "nq:1")
    assert not record.lost and record.sampled_tokens == record.response_tokens > 0
    assert record.tokens


def test_samples_of_a_row_have_other_seeds():
    clients = [VerlsClient(), VerlsClient()]
    for sample, client in enumerate(clients):
        evaluated(Loop, client, sample)
    assert clients[0].sampled[0]["seed"] != clients[1].sampled[0]["seed"]


def test_a_loop_that_raises_costs_one_record_and_says_why():
    record = evaluated(Raising, VerlsClient())
    assert record == validated(Raising, VerlsClient())
    assert record.lost and record.stop_reason == "infra_error"
    assert record.fault is not None and "the table is torn" in record.fault


def test_a_trajectory_of_training_has_no_record_among_its_rewards():
    made, put = worker(Loop, VerlsClient()), list[Any]()

    async def postprocess(outputs: list[Any], validate: bool, **row: Any) -> None:
        put.extend(outputs)

    made._agent_loop_postprocess = postprocess
    row = ROW | OWN | {"uid": f"{'0' * 32}.7.nq"}
    run_virtual(made._run_agent_loop({}, {"validate": False, "step": 3}, **row))
    assert RECORD not in put[-1].extra_fields["reward_extra_info"]


def test_sampling_is_that_of_verls_validation():
    seen: list[dict[str, Any]] = []

    class Asked:
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": SAMPLING}})
        background_tasks: ClassVar[set[Any]] = set()

        async def _run_prompt(self, prompt: Any, params: dict[str, Any], **_: Any) -> None:
            seen.append(params)

    async def run() -> None:
        batch = get_tensordict({"index": [0], "uid": ["u"]})
        assign_non_tensor_data(batch, "global_steps", STEP)
        assign_non_tensor_data(batch, "validate", True)
        asked: Any = Asked()
        theirs: Any = MixedAgentLoopWorker.__mro__[2].generate_sequences  # verl's
        await theirs(asked, batch)
        for task in list(asked.background_tasks):
            await task

    run_virtual(run())
    assert seen == [validation_sampling(Asked.config)]
