"""The tokens that a chat template puts around messages after the model's, found by difference.

The template renders a conversation that ends with tool calls, and the same conversation with their
results. The texts differ by the results and by the glue around them: the end of the assistant's
message, headers, and the beginning of the next message. The glue depends only on the names and ids
of the calls and on the roles of the messages after the results, so it is found once for each. In a
rollout only the messages are tokenised, as plain text: a control token that a tool prints stays
text.

A template can be continued if it renders a conversation as before when messages are added to it.
What counts is a loop of tools: Qwen3's template drops thoughts at the next message of a user, and
writes an empty thought only into the last message. In a loop it keeps each thought, and the text
after a message is the same with and without one. Pure: the template is given as a function.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from agent_loop.turns.call_formats.message import new_call_id

Message = Mapping[str, Any]
Render = Callable[[list[Message], bool], str]
"""(messages, add_generation_prompt) -> text; the template is a program and may raise anything."""

_ARGUMENT = "qzargumentqz"
_THOUGHT = "qzthoughtqz"
_TEXT = "qztextqz"
_RESULT = 'qz{}q"z\nqé'
"""Probes: texts that no template has. The result has characters that JSON escapes."""

_THOUGHT_FIELDS = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHT)
_THOUGHT_TEXT = f"<think>\n{_THOUGHT}\n</think>\n\n"
"""The two ways to give a template a thought: in a field of its own, and in the content."""

MAX_KEPT = 512
"""Glue that is kept, of so many combinations of names and ids."""

LOOP_TURNS = 8
"""Of the loops that `check` plays, because a template may shorten all but the last few turns."""

Writing = Literal["plain", "json", "ascii json"]


class CannotContinue(ValueError):
    """The template does not let a conversation go on after tool calls; the text has the reason."""


@dataclass(frozen=True, slots=True)
class CallId:
    """One tool call, as the template needs it for its result."""

    name: str
    call_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Glue:
    """What the template puts around the results of one message's calls, and around the messages
    after them."""

    end_id: int | None
    """The token that ends the assistant's message; None: the message goes on."""

    pieces: tuple[tuple[int, ...], ...]  # n + 1, before, between and after n messages
    writings: tuple[Writing, ...]  # (n,)
    """How the template writes each message."""

    def length(self, last_id: int) -> int:
        """Tokens of the glue after this last token of the assistant's message."""
        return sum(map(len, self.pieces)) + (self.end_id not in (None, last_id))

    def around(self, messages: Sequence[Sequence[int]], last_id: int) -> list[int]:
        """The glue with the tokens of the messages in their places.

        Args:
            messages: n lists of tokens.
            last_id: the last token of the assistant's message, which may be its end.
        """
        ids = [] if self.end_id in (None, last_id) else [self.end_id]
        ids += self.pieces[0]
        for own, piece in zip(messages, self.pieces[1:], strict=True):
            ids += own
            ids += piece
        return ids


class ToolMessages:
    """The glue of one template.

    Args:
        render: the template, with the schemas of the tools.
        encode: text -> token ids, control tokens included.
        end_ids: tokens at which the engine stops.
    """

    def __init__(
        self,
        render: Render,
        encode: Callable[[str], list[int]],
        end_ids: frozenset[int],
    ) -> None:
        self._render, self._encode, self._end_ids = render, encode, end_ids
        self._kept: dict[tuple[tuple[CallId, ...], tuple[str, ...], bool], Glue] = {}

    def glue(self, calls: Sequence[CallId], then: Sequence[str] = (), thinks: bool = False) -> Glue:
        """The glue around the results of these calls, and around the messages after them.

        Args:
            calls: of the assistant's message; it may have none.
            then: roles of the messages that follow the results.
            thinks: whether the assistant's message has a thought, which the template must keep.

        Raises:
            CannotContinue: the template refuses the messages, or drops or rewrites them.
        """
        key = (tuple(calls), tuple(then), thinks)
        if key not in self._kept:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            self._kept[key] = self._found(*key)
        return self._kept[key]

    def check(self, *, several: bool = True) -> None:
        """Check that a loop of tools can go on, with and without thoughts, and with and without
        text beside the calls.

        Args:
            several: whether a message may have several calls.

        Raises:
            CannotContinue: see `glue`; or the template renders earlier messages otherwise when
                later ones follow, so that the tokens that the model sampled are not what it would
                read.
        """
        for count in (1, 2) if several else (1,):
            turns = [
                [CallId("probe", new_call_id(2 * turn + at)) for at in range(count)]
                for turn in range(LOOP_TURNS)
            ]
            for thinks in (False, True):
                self.glue(turns[0], thinks=thinks)
                self._check_loop(turns, thinks, "")
                self._check_loop(turns, thinks, _TEXT)

    def _check_loop(self, turns: Sequence[Sequence[CallId]], thinks: bool, content: str) -> None:
        messages, before = [_USER], ""
        for number, calls in enumerate(turns):
            text = content and f"{content}{number}"
            said = self._thinks(calls, text) if thinks else self._asks(calls, text)
            if said is None:
                return
            messages += [said, *(_result(call, f"{_TEXT}{number}") for call in calls)]
            after = self._rendered(messages, True)
            if before:
                _check_kept(before, after, _ARGUMENT, _THOUGHT, _TEXT)
            before = after

    def _found(self, calls: tuple[CallId, ...], then: tuple[str, ...], thinks: bool) -> Glue:
        content = "" if calls else _ARGUMENT
        plain, thinking = self._asks(calls, content), self._thinks(calls, content)
        try:
            return self._after(thinking if thinks and thinking else plain, calls, then)
        except CannotContinue:
            if thinks or not thinking:
                raise
            return self._after(thinking, calls, then)  # the glue is the same

    def _after(self, said: Message, calls: Sequence[CallId], then: Sequence[str]) -> Glue:
        asked = [_USER, said]
        probes = [_RESULT.format(at) for at in range(len(calls) + len(then))]
        new = [_result(call, probe) for call, probe in zip(calls, probes, strict=False)]
        new += [
            {"role": role, "content": probe}
            for role, probe in zip(then, probes[len(calls) :], strict=True)
        ]
        before = self._rendered(asked, False)
        whole = self._rendered([*asked, *new], True)
        rest = whole[_check_kept(before, whole, _ARGUMENT) :]
        writings, parts = _split(rest, probes)
        ids = self._encode(parts[0])
        ends = [place for place, token in enumerate(ids) if token in self._end_ids]
        if not ends:
            raise CannotContinue(
                f"nothing at which the engine stops is before the results, only {parts[0]!r}"
            )
        head = ids[ends[0] + 1 :]
        pieces = [tuple(head), *(tuple(self._encode(part)) for part in parts[1:])]
        return Glue(end_id=ids[ends[0]], pieces=tuple(pieces), writings=writings)

    def _thinks(self, calls: Sequence[CallId], content: str) -> Message | None:
        """The assistant's message with a thought; None if the template shows none."""
        in_field = self._asks(calls, content) | _THOUGHT_FIELDS
        for said in (in_field, self._asks(calls, _THOUGHT_TEXT + content)):
            try:
                if _THOUGHT in self._rendered([_USER, said], False):
                    return said
            except CannotContinue:  # gpt-oss's takes no text beside a field
                continue
        return None

    def _asks(self, calls: Sequence[CallId], content: str) -> dict[str, Any]:
        """An assistant's message with these calls, if any, each with the probe as argument.

        Llama 3's templates take one call in a message, and any number of results after it.
        """
        shown = calls if len(calls) < 2 or self._takes_several else calls[:1]
        return _message(shown, content, self._arguments if shown else None)

    @cached_property
    def _takes_several(self) -> bool:
        calls = [CallId("probe", new_call_id(number)) for number in (0, 1)]
        try:
            self._render([_USER, _message(calls, "", self._arguments)], False)
        except Exception:  # a template is a program and may raise anything
            return False
        return True

    @property
    def takes_text_arguments(self) -> bool:
        """Whether the template takes a call's arguments as JSON text, and not as an object."""
        return isinstance(self._arguments, str)

    @cached_property
    def _arguments(self) -> Any:
        """A call's arguments in the form that the template takes: an object, or a JSON text."""
        given = {"probe": _ARGUMENT}
        for arguments in (given, json.dumps(given)):
            asked = _message([CallId("probe", new_call_id(0))], "", arguments)
            try:
                text = self._render([_USER, asked], False)
            except Exception:  # the other form may be the right one
                continue
            if _ARGUMENT in text:
                return arguments
        raise CannotContinue("it does not render the tool calls of an assistant's message")

    def _rendered(self, messages: list[Message], add_generation_prompt: bool) -> str:
        try:
            return self._render(messages, add_generation_prompt)
        except Exception as error:  # a template is a program and may raise anything
            raise CannotContinue(" ".join(str(error).split())) from error


def shared_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Elements at the beginning that two sequences share."""
    pairs = zip(first, second, strict=False)
    differ = (at for at, (a, b) in enumerate(pairs) if a != b)
    return next(differ, min(len(first), len(second)))


_USER: Message = {"role": "user", "content": "u"}


def _message(calls: Sequence[CallId], content: str, arguments: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        said["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments},
            }
            for call in calls
        ]
    return said


def _result(call: CallId, text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": call.call_id, "name": call.name}


def _check_kept(before: str, after: str, *probes: str) -> int:
    """Where the last probe in `before` ends. `after` must be the same until there."""
    end = max((before.rfind(probe) + len(probe) for probe in probes if probe in before), default=0)
    if end == 0:
        raise CannotContinue("it leaves out the messages of the assistant")
    if not after.startswith(before[:end]):
        at = shared_length(before, after)
        raise CannotContinue(
            "it renders earlier messages otherwise when later ones follow: "
            f"{before[at : at + 60]!r} becomes {after[at : at + 60]!r}"
        )
    return end


def _split(text: str, probes: Sequence[str]) -> tuple[tuple[Writing, ...], list[str]]:
    """How each probe is written in a text, and the parts before, between and after them."""
    writings, parts, rest = list[Writing](), list[str](), text
    for probe in probes:
        for writing in get_args(Writing):
            before, found, after = rest.partition(written(probe, writing))
            if found:
                break
        else:
            raise CannotContinue("it drops or rewrites the messages after a call")
        writings.append(writing)
        parts.append(before)
        rest = after
    return tuple(writings), [*parts, rest]


def written(text: str, writing: Writing) -> str:
    """A result as the template writes it."""
    if writing == "plain":
        return text
    return json.dumps(text, ensure_ascii=writing == "ascii json")[1:-1]
