"""The worker process that runs agent loops, this project's and others.

verl adapter: `AgentLoopWorkerTQ` and `AgentLoopManagerTQ` (trainer/ppo/v1/agent_loop_tq.py at
0.9.1), chosen by `rollout.agent.agent_loop_manager_class`. In verl a loop that raises fails its
group, without a message. Here it costs one trajectory, which has no gradient, is counted and is
logged. Other loops (verl's `tool_agent` and `single_turn_agent`, or a user's) get what the loops of
this project have: a deadline, the watchdog, the reward of their source, and a record.
"""

import asyncio
import itertools
import json
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import hydra
import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import NonTensorData
from verl.experimental.agent_loop.agent_loop import (
    DictConfigWrap,
    ToolListWrap,
    _agent_loop_registry,
)
from verl.trainer.ppo.v1.agent_loop_tq import (
    AgentLoopManagerTQ,
    AgentLoopWorkerTQ,
    apply_greedy_sampling_params,
)
from verl.utils import tensordict_utils as tu

from agent_loop.calls.client import shared_client
from agent_loop.deadline import Deadline
from agent_loop.loop_lag import spare_full_collections
from agent_loop.loop_settings import ROUTE_KEYS, most_open_requests, settings_of
from agent_loop.records.evaluation_records import RECORD, line_of, record_of
from agent_loop.records.trajectory_record import StopReason
from agent_loop.row import Row
from agent_loop.seeds import seed_from
from agent_loop.training.verl_adapters.engine_client import (
    EngineTurn,
    RecordingClient,
    current_version,
    faults_of_trajectory,
    routes_of,
    seeds_of_trajectory,
    turns_of_trajectory,
)
from agent_loop.training.verl_adapters.foreign_loop import (
    add_routes,
    late_rollout,
    pass_on,
    rollouts_of,
)
from agent_loop.training.verl_adapters.verl_tools import client_of_trajectory, through_client
from agent_loop.turn_agent_loop import JudgedOutput, TurnAgentLoop, check_sequences, judged_outputs
from agent_loop.turns.codec import codec_of
from agent_loop.turns.trajectory import Trajectory
from agent_loop.turns.turn_loop import Rollout, is_being_cancelled
from agent_loop.watchdog import waits_for
from config.agents import BLOCKS, with_blocks
from samplers.queue_view import ENDED
from samplers.uid import prompt_of
from tool_server.wire.protocol import Fault

_VerlWorker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class  # pyright: ignore[reportAttributeAccessIssue]


class SessionRunner:
    """Runs one session of a row: its agent loop, deadline, seeds, reward and record.

    The part of a worker that is the same in training, validation and evaluation. It is mixed into a
    class of verl, whose attributes it uses.
    """

    config: Any
    llm_client: Any
    model_config: Any
    tokenizer: Any
    processor: Any
    hf_model_type: Any
    dataset_cls: Any
    tools: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _register_blocks(self.config)
        self.settings = settings_of(self.config)
        self._route_shape = _route_shape(self.config, self.model_config)
        rollout = self.config.actor_rollout_ref.rollout
        most_open = most_open_requests(rollout.max_num_seqs, rollout.agent.num_workers)
        self.llm_client = RecordingClient(self.llm_client, self._route_shape, most_open)
        codec_of(self.tokenizer).add_ends(_engine_ends(self.model_config))
        self._watchdog: asyncio.Task[None] | None = None
        # vLLM samples faster without a seed for each request.
        self._is_seeded = rollout.name == "hf" or rollout.full_determinism
        spare_full_collections()

    async def stay(self) -> None:
        """Wait for ever. The caller's reference to the result ends with this process."""
        await asyncio.Event().wait()

    def _start_watching(self) -> None:
        """Start what watches the sessions of this process; called in its event loop."""
        if self._watchdog is None:
            self._watchdog = asyncio.create_task(self.settings.watchdog.run())
            self.settings.lag.start()

    async def _run(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], columns: dict[str, Any]
    ) -> list[JudgedOutput]:
        """Run one session of a row, with its record of engine requests and its seeds."""
        row = Row.from_columns(columns)
        columns = {name: value for name, value in columns.items() if name != "agent_name"}
        turns: list[EngineTurn] = []
        token = turns_of_trajectory.set(turns)
        faults_token = faults_of_trajectory.set([])
        seeds_token = seeds_of_trajectory.set(self._seeds_of(trajectory, row))
        try:
            outputs = await self._host(row, sampling_params, columns, turns)
            for output in outputs:
                if self._route_shape is not None and output.routed_experts is None:
                    ids = output.prompt_ids + output.response_ids
                    output.routed_experts = routes_of(turns, ids, self._route_shape)
            return outputs
        finally:
            turns_of_trajectory.reset(token)
            seeds_of_trajectory.reset(seeds_token)
            faults_of_trajectory.reset(faults_token)

    def _seeds_of(self, trajectory: dict[str, Any], row: Row) -> Iterator[int] | None:
        """Seeds of the trajectory's requests, the same in every run with the same config."""
        if not self._is_seeded:
            return None
        if trajectory["validate"]:
            prompt = ("val", trajectory["step"], row.source, row.row_id)
        else:
            prompt = ("train", *prompt_of(row.uid))
        seed = self.config.actor_rollout_ref.rollout.seed
        own = seed_from(seed, *prompt, row.session)
        return (seed_from(own, request) for request in itertools.count(1))

    async def _host(
        self,
        row: Row,
        sampling_params: dict[str, Any],
        columns: dict[str, Any],
        turns: list[EngineTurn],
    ) -> list[JudgedOutput]:
        """Run a loop. The outputs have reward and record, also if the loop raises."""
        settings, source = self.settings, row.source
        tools: Any = None  # not needed for a lost trajectory, which gets no reward
        try:
            loop = self._make_loop(row.agent or "")
            if isinstance(loop, TurnAgentLoop):  # has deadlines, reward and record itself
                own: Any = await loop.run(sampling_params, **columns)
                return own if isinstance(own, list) else [own]
            deadline = settings.deadline_of(row.step_deadline)
            client = await shared_client(settings.tools, settings.mixed)
            client_of_trajectory.set(client.for_source(source, deadline))
            rollouts = await self._run_foreign(loop, sampling_params, row, columns, turns, deadline)
            tools = client.for_source(source, settings.reward_deadline())
            if self._route_shape is not None:
                for rollout in rollouts:
                    add_routes(rollout, turns, self._route_shape, source)
        except Exception as error:
            rollouts = [self._lost(error)]
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            rollouts = [self._lost(error)]  # not the loop was cancelled, but something inside it
        version = current_version(self.llm_client, row.global_steps)
        judged = await judged_outputs(rollouts, row, tools, settings, version)
        for rollout, output in judged:
            pass_on(rollout, output)
        return [output for _, output in judged]

    async def _run_foreign(
        self,
        loop: Any,
        sampling_params: dict[str, Any],
        row: Row,
        columns: dict[str, Any],
        turns: list[EngineTurn],
        deadline: Deadline,
    ) -> list[Rollout]:
        """Run another project's loop. At the deadline it is ended, and the session is lost."""
        settings, source = self.settings, row.source
        codec = codec_of(self.tokenizer)
        running = asyncio.ensure_future(
            loop.run(settings.sampling_of(source, sampling_params), **columns)
        )
        try:
            done, _ = await asyncio.wait([running], timeout=deadline.left_s())
        finally:
            running.cancel()
            await asyncio.wait([running])
        if not done:
            return [late_rollout(turns, codec, deadline)]
        output = running.result()
        if faults := faults_of_trajectory.get():
            raise faults[0]  # the loop caught it, and went on without the answer
        outputs = output if isinstance(output, list) else [output]
        check_sequences(type(loop), len(outputs), source)
        return rollouts_of(outputs, turns, codec, settings, source)

    def _make_loop(self, agent_name: str) -> Any:
        if agent_name not in _agent_loop_registry:
            raise LookupError(
                f"no agent={agent_name!r}: known are {sorted(_agent_loop_registry)}; register it "
                "in the file of rollout.agent.agent_loop_config_path, or below agent_loops"
            )
        config = _agent_loop_registry[agent_name]
        arguments = {
            "trainer_config": DictConfigWrap(config=self.config),
            "server_manager": self.llm_client,
            "tokenizer": self.tokenizer,
            "processor": self.processor,
            "hf_model_type": self.hf_model_type,
            "dataset_cls": self.dataset_cls,
            "data_config": DictConfigWrap(self.config.data),
            "tools": ToolListWrap(self.tools),
        }
        kind = hydra.utils.get_object(config["_target_"])
        if not (isinstance(kind, type) and issubclass(kind, TurnAgentLoop)):
            timeout_s = self.settings.tools.timeout
            arguments["tools"] = ToolListWrap(through_client(self.tools or [], timeout_s))
        settings = _plain_settings(config)
        if settings is None:
            return hydra.utils.instantiate(config=config, **arguments)
        return kind(**settings | arguments)

    def _lost(self, error: BaseException) -> Rollout:
        """An empty trajectory, for a loop that raised."""
        filler_id = self.tokenizer.eos_token_id
        rollout = Rollout(
            trajectory=Trajectory([filler_id]), stop_reason=StopReason.INFRA_ERROR, answer=None
        )
        rollout.trajectory.finish(filler_id)
        is_infra = isinstance(error, Fault)
        rollout.lose((is_infra and error.tool) or "loop", f"{type(error).__name__}: {error}")
        rollout.loop_error = None if is_infra else traceback.format_exc()
        return rollout


class MixedAgentLoopWorker(SessionRunner, _VerlWorker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._needs_baseline = self.config.algorithm.adv_estimator == "remax"
        self._baselines: dict[str, asyncio.Task[float | None]] = {}  # by uid
        self._written: defaultdict[str, list[str]] = defaultdict(list)
        """uid -> keys of the trajectories of its group in TransferQueue."""

    async def generate_sequences(self, batch: Any) -> None:
        self._start_watching()
        if "step_seconds_left" in batch:  # a deadline would be on the clock of another process
            left = batch["step_seconds_left"]
            left_s = float(left[0] if isinstance(left, list) else left)
            batch["step_deadline"] = NonTensorData(time.monotonic() + left_s)
        await super().generate_sequences(batch)

    async def _run_prompt(
        self,
        prompt: dict[str, Any],
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        trace: bool = False,
    ) -> None:
        """verl's. Then the replay buffer is told that the group ended, because otherwise it would
        have to list all keys to see it."""
        uid, partition_id = prompt["uid"], "val" if trajectory["validate"] else "train"
        try:
            await self._run_group(prompt, sampling_params, trajectory, trace)
        except Exception:
            # verl could not write the end of the group, and the buffer ignores one that runs
            await tq.async_kv_put(key=uid, partition_id=partition_id, tag={"status": "failure"})
            raise
        finally:
            tag = {"partition": partition_id, "keys": self._written.pop(uid, [])}
            await tq.async_kv_put(key=uid, partition_id=ENDED, tag=tag)

    async def _run_group(
        self,
        prompt: dict[str, Any],
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        trace: bool,
    ) -> None:
        """For `remax` (Li et al. 2023) each group gets one greedy trajectory more, whose reward is
        the baseline, and which is not trained."""
        if not self._needs_baseline or trajectory["validate"]:
            await super()._run_prompt(prompt, sampling_params, trajectory=trajectory, trace=trace)
            return
        uid, greedy = prompt["uid"], dict(sampling_params)
        apply_greedy_sampling_params(greedy)
        columns = {name: value for name, value in prompt.items() if not name.startswith("__")}
        self._baselines[uid] = asyncio.create_task(self._baseline(greedy, trajectory, columns))
        try:
            await super()._run_prompt(prompt, sampling_params, trajectory=trajectory, trace=trace)
        finally:
            self._baselines.pop(uid).cancel()

    async def _baseline(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], columns: dict[str, Any]
    ) -> float | None:
        """Reward of a greedy trajectory; None if it was lost or is masked."""
        row = Row.from_columns(columns)
        with self.settings.watchdog.watch(row.source, row.row_id):
            columns |= {"session_id": "greedy"}
            outputs = await self._run(sampling_params, trajectory, columns)
        is_judged = any(any(output.response_mask) for output in outputs)
        return outputs[-1].reward_score if is_judged else None

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        trace: bool = True,
        **columns: Any,
    ) -> None:
        lag, row = self.settings.lag, Row.from_columns(columns)
        with self.settings.watchdog.watch(row.source, row.row_id):
            before = lag.now()
            await self.settings.starts.enter()
            outputs = await self._run(sampling_params, trajectory, columns)
            lag_s = lag.since(before)
            for output in outputs:
                output.record.loop_lag_s = lag_s
            if trajectory["validate"]:
                record = record_of(outputs, row, int(trajectory["step"]))
                outputs[-1].extra_fields["reward_extra_info"][RECORD] = json.dumps(line_of(record))
            if (baseline := self._baselines.get(row.uid)) is not None:
                waits_for("baseline")
                reward = await asyncio.shield(baseline)
                for output in outputs:
                    output.extra_fields["reward_baseline"] = reward
            waits_for("transfer queue")
            columns.pop("agent_name")
            session = f"{row.uid}_{row.session}"
            self._written[row.uid] += [f"{session}_{place}" for place in range(len(outputs))]
            await self._agent_loop_postprocess(outputs, trajectory["validate"], **columns)


def _register_blocks(config: DictConfig) -> None:
    """Register the agent loops of the run config, over those of verl and of the file.

    Every worker gets the config, so no file has to be there on every node.
    """
    given = [OmegaConf.select(config, block) for block in BLOCKS]
    blocks: list[Any] = [OmegaConf.to_container(each, resolve=True) for each in given if each]
    names = {name for block in blocks for name in block}
    registry: dict[str, Any] = _agent_loop_registry
    known = {name: entry for name, entry in registry.items() if name in names}
    for name, entry in with_blocks(known, blocks).items():
        registry[name] = OmegaConf.create(entry)


def _route_shape(config: Any, model_config: Any) -> tuple[int, int] | None:
    """Layers and experts of a token, which the engine's routes have; None if none are replayed.

    Raises:
        ValueError: the model's config does not say them.
    """
    if not config.actor_rollout_ref.rollout.get("enable_rollout_routing_replay"):
        return None
    model = model_config.hf_config.get_text_config()
    layers, experts = (getattr(model, name, None) for name in ROUTE_KEYS)
    if layers is None or experts is None:
        raise ValueError(
            f"rollout.enable_rollout_routing_replay=true: config.json of {model_config.path} lacks "
            f"{' or '.join(ROUTE_KEYS)}; set it to false for a model without experts"
        )
    return layers, experts


def _engine_ends(model_config: Any) -> list[int]:
    """Tokens of the generation config at which the engine ends a message."""
    ids = getattr(getattr(model_config, "generation_config", None), "eos_token_id", None)
    return [i for i in (ids if isinstance(ids, list | tuple) else [ids]) if i is not None]


# The config is kept too: otherwise a new object could get the id of a deleted one.
_plain: dict[int, tuple[Any, dict[str, Any] | None]] = {}


def _plain_settings(config: Any) -> dict[str, Any] | None:
    """The settings of a loop, if they are plain values; else None, and hydra must build the loop.

    `hydra.utils.instantiate` takes 4 ms of CPU, more than the rest of a short trajectory.
    """
    if id(config) not in _plain:
        _plain[id(config)] = config, _read_plain_settings(config)
    return _plain[id(config)][1]


def _read_plain_settings(config: Any) -> dict[str, Any] | None:
    if not isinstance(config.get("_target_"), str):
        return None
    settings = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    values: Any = OmegaConf.to_container(settings, resolve=True, throw_on_missing=True)
    # hydra gives lists as a kind of OmegaConf's, which loops of others may expect
    takes_lists = values.pop("_target_").startswith("agent_loop.")
    is_plain = all(
        not str(name).startswith("_")
        and (_is_scalar(value) or (takes_lists and _is_list_of_scalars(value)))
        for name, value in values.items()
    )
    return {str(name): value for name, value in values.items()} if is_plain else None


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _is_list_of_scalars(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_scalar, value))


class MixedAgentLoopManager(AgentLoopManagerTQ):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(MixedAgentLoopWorker)
        self._next_worker = 0
        self._lives: list[Any] = []
        """A reference for each worker, which is ready if the worker died."""

    def check_workers(self) -> None:
        """Raise Ray's error if a worker died.

        verl sends prompts to the workers and asks nothing back, so a step whose prompts died with
        their worker would wait until `mixed.max_wait_s`.
        """
        if not self._lives:
            self._lives = [worker.stay.remote() for worker in self.agent_loop_workers]
        dead, _ = ray.wait(self._lives, timeout=0)
        if dead:
            ray.get(dead)

    def generate_sequences(self, prompts: Any) -> None:
        """Deal prompts to the workers, each as many as the others, give or take one prompt.

        verl gives 33 prompts to 17 of 32 workers, and each single prompt that replaces another to
        the first worker.
        """
        workers = self.agent_loop_workers
        each, more = divmod(len(prompts), len(workers))
        sizes = [each + (at < more) for at in range(len(workers) if each else more)]
        ends = list(itertools.accumulate(sizes))
        order = [(self._next_worker + at) % len(workers) for at in range(len(sizes))]
        self._next_worker = (self._next_worker + more) % len(workers)
        # `split` does not know the nested columns of prompts that a resumed run reads back.
        parts = [
            tu.index_select_tensor_dict(prompts, list(range(end - size, end)))
            for end, size in zip(ends, sizes, strict=True)
        ]
        ray.get(
            [
                workers[at].generate_sequences.remote(part)
                for at, part in zip(order, parts, strict=True)
            ]
        )
