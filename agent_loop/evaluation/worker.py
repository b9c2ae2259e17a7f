"""The worker process of an evaluation: runs sessions as a training worker does, returns records.

verl adapter: `AgentLoopWorker` (experimental/agent_loop/agent_loop.py at 0.9.1), without
TransferQueue. `SessionRunner` has the loops, tools, limits, deadlines, rewards and seeds.
"""

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

from agent_loop.records.evaluation_records import Record, record_of
from agent_loop.row import Row
from agent_loop.training.verl_adapters.loop_worker import SessionRunner


class EvaluationWorker(SessionRunner, AgentLoopWorker):
    def __init__(self, config: Any, llm_client: Any) -> None:
        super().__init__(config, llm_client)
        llm_client.tokenizer = self.tokenizer  # a client of texts needs it

    async def evaluate(self, columns: dict[str, Any], sample: int, step: int) -> Record:
        """Run one session of a row.

        Args:
            columns: of the dataset.
            sample: number of the session among those of its row.
            step: training step of the weights, from which the seeds are made.
        """
        self._start_watching()
        trajectory = {"step": step, "sample_index": 0, "rollout_n": sample, "validate": True}
        columns = {**columns, "uid": "evaluation", "session_id": sample, "global_steps": step}
        default = self.config.actor_rollout_ref.rollout.agent.default_agent_loop
        columns.setdefault("agent_name", default)
        row = Row.from_columns(columns)
        with self.settings.watchdog.watch(row.source, row.row_id):
            await self.settings.starts.enter()
            outputs = await self._run(validation_sampling(self.config), trajectory, columns)
        return record_of(outputs, row, step)


def validation_sampling(config: Any) -> dict[str, Any]:
    """The sampling parameters of a validation, as verl's worker makes them
    (`AgentLoopWorkerTQ.generate_sequences`, trainer/ppo/v1/agent_loop_tq.py at 0.9.1)."""
    rollout = config.actor_rollout_ref.rollout
    return {
        "temperature": rollout.val_kwargs.temperature,
        "top_p": rollout.val_kwargs.top_p,
        "top_k": rollout.val_kwargs.top_k,
        "repetition_penalty": 1.0,
        "logprobs": rollout.calculate_log_probs,
    }
