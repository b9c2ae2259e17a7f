"""ReAct agent loop: thought, action with JSON arguments, observation; any tools."""

from agent_loop.named_tools_loop import NamedToolsLoop
from agent_loop.turns.react import OBSERVATION, ReAct, instructions
from agent_loop.turns.tags import Language


class ReactAgentLoop(NamedToolsLoop):
    """Actions are lines of text; see `agent_loop.turns.react`.

    Args:
        kwargs: `system_prompt` is a text before the instructions; one that contains `{tools}`
            replaces the instructions, and `{tools}` is replaced by the list of tools.
    """

    def language(self) -> Language:
        return ReAct(max_actions=self.settings.max_actions)

    def markers(self) -> tuple[str, str]:
        return f"\n{OBSERVATION} ", "\n"

    def system_text(self) -> str:
        return instructions(super().system_text(), [spec.line for spec in self.specs.values()])
