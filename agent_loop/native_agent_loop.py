"""Agent loop with native tool calls: the model asks for tools in the format of its chat template.

The format is `rollout.multi_turn.format`, one of verl's names; the launcher sets it by the model's
template if it is null. The schemas of the tools are in the prompt, where the template puts them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from agent_loop.named_tools_loop import NamedToolsLoop
from agent_loop.turns.call_formats import FORMATS, CallFormat
from agent_loop.turns.codec import HFCodec
from agent_loop.turns.native import NativeDialogue, prompt_opens_thought
from agent_loop.turns.observation_style import ObservationStyle
from agent_loop.turns.tags import ActionKind, Language, Tags, stop_token_ids
from agent_loop.turns.tool_messages import ToolMessages


class NativeAgentLoop(NamedToolsLoop):
    """Actions are tool calls of the model's own format; a message without calls is the answer."""

    def tool_schemas(self) -> list[dict[str, Any]]:
        return [spec.schema for spec in self.specs.values()]

    def language(self) -> Language:
        raise NotImplementedError("dialogue() makes it, together with the style of results")

    def dialogue(
        self,
        codec: HFCodec,
        source: str,
        messages: list[dict[str, Any]],
        prompt_ids: Sequence[int],
    ) -> tuple[Language, ObservationStyle]:
        dialogue = self.calls(codec, prompt_ids)
        return dialogue, dialogue

    def calls(self, codec: HFCodec, prompt_ids: Sequence[int]) -> NativeDialogue:
        """Reads the calls of a conversation, and writes their results."""
        settings = self.settings
        call_format = format_of(settings.call_format)
        return NativeDialogue(
            call_format,
            {name: spec.parameters for name, spec in self.specs.items()},
            self._tool_messages(codec, call_format),
            codec,
            Tags.from_config(settings.tools, [ActionKind.ANSWER]),
            max_calls=settings.max_actions,
            max_length=settings.mixed.turns.max_observation_length,
            in_reasoning=prompt_opens_thought(codec, prompt_ids),
        )

    def _tool_messages(self, codec: HFCodec, call_format: CallFormat) -> ToolMessages:
        """The template's glue, shared by the trajectories that have the same tools."""
        stops = stop_token_ids(call_format.stop_texts, codec.encode)
        render, ends = self.rendering(self.tool_schemas()), codec.end_ids | frozenset(stops)
        make = partial(ToolMessages, render, codec.encode, ends)
        return self.client.resource(f"glue {sorted(self.specs)}", make)


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
