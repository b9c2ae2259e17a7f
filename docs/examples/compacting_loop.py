"""An agent loop that compacts its context: a session of several rows.

When the context is full, the model sums up what it found, and a new conversation begins with the
question and the summary. Every conversation is a row of the session; so is the summary.

    agent_loops:
      compacting_agent:
        _target_: docs.examples.compacting_loop.CompactingAgentLoop
        context_length: 512
"""

from typing import Any

from agent_loop.math_agent_loop import MathAgentLoop
from agent_loop.turns.trajectory import StopReason
from agent_loop.turns.turn_loop import Rollout

SUM_UP = "Your context is full. Sum up what you have found."
GO_ON = "So far you have found:\n{summary}\nGo on."


class CompactingAgentLoop(MathAgentLoop):
    """The math agent with a limit to its context.

    Args:
        context_length: tokens of the response of one conversation. A prompt with these tokens must
            fit in `data.max_prompt_length`, because the model reads them to sum them up.
    """

    several_rows = True

    def __init__(self, *args: Any, context_length: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_length = context_length

    async def conversations(self, messages: list[dict[str, Any]]) -> list[Rollout]:
        rows = list[Rollout]()

        async def talk(prompt: list[dict[str, Any]], cause: str, **limits: Any) -> Rollout:
            row = await self.converse([*prompt], cause=cause, **limits)
            row.parent = rows[-1] if rows else None
            rows.append(row)
            return row

        prompt, cause = messages, ""
        while True:
            row = await talk(prompt, cause, response_length=self.context_length)
            if row.stop_reason != StopReason.RESPONSE_BUDGET:
                return rows
            said = {"role": "assistant", "content": words_of(row)}
            asked = {"role": "user", "content": SUM_UP}
            summary = await talk([*prompt, said, asked], "summary", max_turns=1)
            if summary.is_lost:
                return rows
            go_on = {"role": "user", "content": GO_ON.format(summary=words_of(summary))}
            prompt, cause = [*messages, go_on], "compaction"


def words_of(row: Rollout) -> str:
    """What model and tools wrote in a row."""
    return "".join(segment.text for segment in row.trajectory.segments)
