"""A gateway with the laptop's engine: sessions of programs that nobody here wrote.

All parts are the real ones: the agent loop and its worker, the gateway over HTTP, the CPU decoder
with the demo's model, and a tool server with the demo's corpus. There is no Ray and no trainer:
a session's rows are given to the test. A program runs on the host.
"""

import shlex
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl.utils.dataset.rl_dataset import RLHFDataset

from agent_loop import gateway_agent_loop
from agent_loop.gateway.program import AgentProgram, ProgramEnd
from agent_loop.gateway_agent_loop import GatewayAgentLoop
from agent_loop.loop_settings import settings_of
from agent_loop.records.mask_audit import MaskReport, audit_masks
from agent_loop.records.trajectory_record import TrajectoryRecord, line_of
from agent_loop.training.verl_adapters.engine_client import RecordingClient
from agent_loop.training.verl_adapters.loop_worker import MixedAgentLoopWorker
from cpu_engine.rollout import HFServer
from tests.fakes.engine import record_in
from tests.listening import listening
from tool_server.app import app_runner, create_app
from tool_server.settings import ServerSettings
from verl_mixed.run.compose import compose_config, resolve

AGENT = "a program of others"
TOPK = 2
"""Passages of a search, as the demo's model was taught."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRun:
    """A session of a program that ended, as a line of a trajectory file for each row."""

    records: list[TrajectoryRecord]
    ignored: set[str]
    """Fields that the program sent and that have no effect."""

    program: ProgramEnd

    @property
    def causes(self) -> list[str]:
        return [record.cause for record in self.records]

    @property
    def requests(self) -> int:
        return self.records[-1].requests or 0

    @property
    def calls(self) -> Counter[tuple[str, str]]:
        """Action and status of the calls at the MCP address -> their number."""
        return Counter((c.action, c.status) for record in self.records for c in record.calls)


class _Worker(MixedAgentLoopWorker):
    """A worker that keeps its sessions, without Ray and transfer queue."""

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **row: Any) -> None:
        self.outputs = output


class _Client:
    """verl's client of the rollout server, for a server in this process."""

    _acquire_server = None

    def __init__(self, server: HFServer) -> None:
        self._server = server

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, **_: Any
    ) -> Any:
        return await self._server.generate(prompt_ids, sampling_params, request_id)


@dataclass
class GatewayRig:
    folder: Path
    demo: Path
    worker: Any
    ignored: set[str] = field(default_factory=set[str])
    """Of the last session, as in `AgentRun`."""

    ended: ProgramEnd | None = None
    _records: list[TrajectoryRecord] = field(default_factory=list[TrajectoryRecord])
    _sessions: int = 0

    async def run(
        self, command: Sequence[str | Path], source: str = "math", row: int = 0
    ) -> AgentRun:
        """One session of a program.

        Args:
            source: math or nq; the session has its tool.
            row: of the demo's training rows.
        """
        self.ignored, self.ended = set(), None
        self._sessions += 1
        target = f"{GatewayAgentLoop.__module__}.{GatewayAgentLoop.__qualname__}"
        words = shlex.join(str(word) for word in command)
        agent = {"_target_": target, "command": words, "where": "host", "topk": TOPK}
        cast(Any, _agent_loop_registry)[AGENT] = OmegaConf.create(agent)
        record = pq.read_table(self.demo / f"{source}_train.parquet").slice(row, 1).to_pylist()[0]
        record["raw_prompt"] = record.pop("prompt")
        record |= {"agent_name": AGENT, "uid": f"{'0' * 32}.{self._sessions}.{source}"}
        await self.worker._run_agent_loop(
            {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True},
            {"step": 1, "sample_index": self._sessions, "rollout_n": 0, "validate": False},
            trace=False,
            **record,
            session_id=0,
            global_steps=1,
        )
        records = list[TrajectoryRecord]()
        for place, output in enumerate(self.worker.outputs):
            made = record_in(output.as_dict())
            made.step, made.source, made.row_id = 1, source, record["extra_info"]["row_id"]
            made.key = f"{record['uid']}_0_{place}"
            records.append(made)
        self._records += records
        assert self.ended is not None, records[-1].fault
        return AgentRun(records=records, ignored=self.ignored, program=self.ended)

    def audit(self) -> MaskReport:
        """The audit of all sessions so far."""
        (self.folder / "trajectories").mkdir(exist_ok=True)
        (self.folder / "trajectories/1.jsonl").write_bytes(b"".join(map(line_of, self._records)))
        return audit_masks(self.folder)


@asynccontextmanager
async def gateway_rig(demo: Path, folder: Path) -> AsyncIterator[GatewayRig]:
    """
    Args:
        demo: folder of a demo in which math and nq are native.
        folder: for the run, empty.
    """
    settings = ServerSettings(port=0, corpus_path=demo / "corpus.jsonl")
    async with listening(app_runner(create_app(settings))) as tools:
        rig = GatewayRig(folder, demo, _worker(_config(demo, folder, tools)))

        async def run(*args: Any, **options: Any) -> ProgramEnd:
            rig.ended = await program_run(*args, **options)
            return rig.ended

        program_run = AgentProgram.run
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(cast(Any, _agent_loop_registry), AGENT, None)
            patch.setattr(AgentProgram, "run", run)
            patch.setattr(
                gateway_agent_loop, "_warn_of_ignored", lambda _, name: rig.ignored.add(name)
            )
            yield rig


def _config(demo: Path, folder: Path, tools: str) -> Any:
    rollout = "actor_rollout_ref.rollout"
    composed = compose_config(
        [
            *("mixture=native_tools", f"mixed.run_dir={folder}"),
            *("data.train_files=[a]", "data.val_files=[b]"),
            f"actor_rollout_ref.model.path={demo / 'model'}",
            f"{rollout}.load_format=auto",  # there is no trainer to send weights
            # the instructions of smolagents are thousands of the demo's tokens
            *("data.max_prompt_length=16384", "data.max_response_length=2048"),
            f"{rollout}.multi_turn.format=hermes",
            f"{rollout}.multi_turn.max_assistant_turns=9",
            f"{rollout}.multi_turn.tool_config.server_url={tools}",
            f"{rollout}.multi_turn.tool_config.enable_global_rate_limit=false",
            "mixed.deadlines.trajectory_s=120",
        ]
    )
    return OmegaConf.create(cast(Any, resolve(composed)))


def _worker(config: Any) -> Any:
    server = HFServer(config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, 0)
    worker: Any = object.__new__(_Worker)
    worker.config, worker.settings = config, settings_of(config)
    worker.tokenizer, worker.processor = server.model_config.tokenizer, None
    worker.hf_model_type, worker.dataset_cls = "qwen3", RLHFDataset
    worker.llm_client, worker.tools = RecordingClient(_Client(server)), []
    worker._is_seeded, worker._baselines, worker._route_shape = True, {}, None
    worker._written = defaultdict(list)
    return worker
