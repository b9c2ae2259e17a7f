"""The native loop as an agent behind the gateway is: a call that cannot be read ends it, because a
client sees such a call as the text of the last message."""

from typing import Any

from agent_loop.native_agent_loop import NativeAgentLoop
from agent_loop.turns.tags import Action, ActionKind


class NativeUntilMistake(NativeAgentLoop):
    def dialogue(self, codec: Any, source: str, prompt_ids: Any) -> Any:
        language, glue = super().dialogue(codec, source, prompt_ids)
        read = language.actions

        def actions(text: str, *, is_whole: bool = True) -> list[Action]:
            found = read(text, is_whole=is_whole)
            if any(action.kind == ActionKind.MALFORMED for action in found):
                return [Action(kind=ActionKind.ANSWER, content=text)]
            return found

        language.actions = actions  # type: ignore[method-assign]
        return language, glue
