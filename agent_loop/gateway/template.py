"""Renders an agent's messages as tokens with the policy's chat template. No verl."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from agent_loop.gateway.chains import Messages
from agent_loop.gateway.wire import WireError
from agent_loop.turns.native import plain_word
from agent_loop.turns.observation_style import TokenCodec, as_plain_text
from agent_loop.turns.tool_messages import Called, CannotContinue, Render, ToolMessages, written

MAX_TOOL_LISTS = 64
"""Tool lists whose glue is kept; an agent may send another list with each request."""

Tools = list[dict[str, Any]]


class ChatTemplate:
    """The template of one policy.

    Args:
        tokens: messages and tools -> the tokens of a prompt; it may raise anything, because a
            template is a program.
        render: tools -> the same as text, for any messages.
        codec: of the tokenizer.
        end_ids: tokens at which the engine stops.
        control: texts of the control tokens, which an agent's messages cannot bring in.
    """

    def __init__(
        self,
        tokens: Callable[[list[dict[str, Any]], Tools | None], list[int]],
        render: Callable[[Tools | None], Render],
        codec: TokenCodec,
        end_ids: frozenset[int],
        control: Sequence[str],
    ) -> None:
        self._tokens, self._render, self._codec = tokens, render, codec
        self._end_ids, self._control = end_ids, control
        self._glue: dict[bytes, ToolMessages] = {}

    def prompt_ids(self, messages: Messages, tools: Tools) -> list[int]:
        """See `chains.PromptTemplate`."""
        try:
            return self._tokens([self._plain(each, tools) for each in messages], tools or None)
        except Exception as error:  # a template may raise anything
            reason = " ".join(str(error).split())
            raise WireError(
                f"the chat template of the policy refuses these messages: {reason}",
                param="messages",
            ) from error

    def glue_ids(
        self, said: Mapping[str, Any], new: Messages, tools: Tools, last_id: int
    ) -> list[int]:
        """See `chains.PromptTemplate`."""
        asked = said.get("tool_calls") or []
        results, others = new[: len(asked)], new[len(asked) :]
        roles = [message["role"] for message in (*results, *others)]
        if roles[: len(asked)] != ["tool"] * len(asked) or "tool" in roles[len(asked) :]:
            raise CannotContinue("the results are not those of the calls")
        by_id = {call["id"]: call for call in asked}
        answered = [by_id.get(message.get("tool_call_id")) for message in results]
        if None in answered or len({call["id"] for call in answered if call}) < len(asked):
            answered = asked  # a client that renames ids: by their order
        calls = [
            Called(plain_word(call["function"]["name"], "unknown"), plain_word(call["id"], "call"))
            for call in answered
            if call
        ]
        glue = self._glue_of(tools).glue(calls, roles[len(asked) :])
        ids = [] if last_id == glue.end_id else [glue.end_id]
        ids += glue.pieces[0]
        for message, writing, piece in zip(new, glue.writings, glue.pieces[1:], strict=True):
            ids += self._codec.encode_plain(written(message["content"], writing))
            ids += piece
        return ids

    def _glue_of(self, tools: Tools) -> ToolMessages:
        key = msgspec.json.encode(tools)
        if key not in self._glue:
            if len(self._glue) >= MAX_TOOL_LISTS:
                self._glue.clear()
            render = self._render(tools or None)
            self._glue[key] = ToolMessages(render, self._codec.encode, self._end_ids)
        return self._glue[key]

    def _plain(self, message: Mapping[str, Any], tools: Tools) -> dict[str, Any]:
        """A message without control tokens, whose calls have their arguments in the template's
        form."""
        own = {**message, "content": as_plain_text(message["content"], self._control)}
        if not message.get("tool_calls"):
            return own
        as_text = self._glue_of(tools).takes_text_arguments
        calls = [call["function"] for call in message["tool_calls"]]
        arguments = [
            json.dumps(call["arguments"], ensure_ascii=False)
            if as_text and not isinstance(call["arguments"], str)
            else call["arguments"]
            for call in calls
        ]
        own["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": given}}
            for call, given in zip(message["tool_calls"], arguments, strict=True)
        ]
        return own
