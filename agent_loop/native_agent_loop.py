"""Agent loop with native tool calls: the model asks for tools in the format of its chat template.

The format is `rollout.multi_turn.format`, one of verl's names; the launcher sets it by the model's
template if it is null. The schemas of the tools are in the prompt, where the template puts them.
"""

from collections.abc import Sequence
from typing import Any

from agent_loop.named_tools_loop import NamedToolsLoop
from agent_loop.turns.call_formats import FORMATS, CallFormat
from agent_loop.turns.codec import HFCodec
from agent_loop.turns.native import NativeDialogue, prompt_opens_thought
from agent_loop.turns.observation_style import GlueOf
from agent_loop.turns.tags import ActionKind, Language, Tags


class NativeAgentLoop(NamedToolsLoop):
    """Actions are tool calls of the model's own format; a message without calls is the answer."""

    def tool_schemas(self) -> list[dict[str, Any]]:
        return [spec.schema for spec in self.specs.values()]

    def language(self) -> Language:
        raise NotImplementedError("dialogue() makes it, together with the glue of results")

    def dialogue(
        self, codec: HFCodec, source: str, prompt_ids: Sequence[int]
    ) -> tuple[Language, GlueOf]:
        answer = Tags.from_config(self.settings.tools, [ActionKind.ANSWER])
        dialogue = self.in_template(codec, prompt_ids, format_of(self.settings.call_format), answer)
        return dialogue, dialogue.glue

    def in_template(
        self,
        codec: HFCodec,
        prompt_ids: Sequence[int],
        call_format: CallFormat,
        answer_tags: Tags | None,
    ) -> NativeDialogue:
        """Reads the calls of a conversation, and writes their results."""
        return NativeDialogue(
            call_format,
            {name: spec.parameters for name, spec in self.specs.items()},
            self.tool_messages(codec),
            codec,
            answer_tags,
            max_calls=self.settings.max_actions,
            in_reasoning=prompt_opens_thought(codec, prompt_ids),
        )


def format_of(name: str | None) -> CallFormat:
    """The format with verl's name.

    Raises:
        ValueError: there is no such format.
    """
    if name is None or name not in FORMATS:
        raise ValueError(
            f"no format {name!r} of tool calls: set rollout.multi_turn.format to one of "
            f"{', '.join(FORMATS)}"
        )
    return FORMATS[name]
