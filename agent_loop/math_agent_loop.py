r"""Agent loop of MATH: a calculator or Python; the answer is between tags or in a `\boxed{}`."""

from typing import Any, Literal

from agent_loop.tool_actions import calculate
from agent_loop.turn_agent_loop import TaggedAgentLoop
from agent_loop.turns.tags import Action, ActionKind
from agent_loop.turns.turn_loop import Observation


class MathAgentLoop(TaggedAgentLoop):
    r"""`<code>` goes to the calculator or to Python. The answer is `<answer>`, or the last
    `\boxed{}` of a turn without tags.

    Args:
        code_runs: `calculator`: an arithmetic expression; `python`: a program.
    """

    actions = (ActionKind.CODE, ActionKind.ANSWER)
    answer_boxed = True

    def __init__(
        self, *args: Any, code_runs: Literal["calculator", "python"] = "calculator", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if code_runs not in ("calculator", "python"):
            raise ValueError(
                f"unknown code_runs={code_runs!r} of the math agent: choose calculator or python; "
                "set it in rollout.agent.agent_loop_config_path"
            )
        self.code_runs = code_runs

    async def act(self, action: Action, extras: dict[str, Any]) -> Observation:
        if self.code_runs == "python":
            return await self.run_code(action.content, "")
        return await calculate(self.client, action.content)
