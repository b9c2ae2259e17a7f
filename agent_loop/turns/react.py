"""ReAct: actions as lines of text, `Action:` and `Action Input:` with JSON arguments.

ReAct: Yao et al. 2023. One difference: an action ends with its JSON object, not with the word
`Observation:`, which only the environment writes. Pure text: no verl, no I/O.

    Thought: I need the author.
    Action: search
    Action Input: {"query": "who wrote it"}
    Observation: ...
    Final Answer: ...
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agent_loop.turns.call_formats.json_values import read_json
from agent_loop.turns.tags import Action, ActionKind

OBSERVATION = "Observation:"

_WITH_TOOLS = """\
Answer the question. You may use these tools:
{tools}
Write lines of this form:
Thought: what you think
Action: the name of a tool
Action Input: its arguments as one JSON object
After that you are shown a line that begins with Observation. Repeat this as often as needed, then:
Thought: what you found
Final Answer: the answer"""

_WITHOUT_TOOLS = """\
Answer the question. Write lines of this form:
Thought: what you think
Final Answer: the answer"""

# No two repetitions beside each other match the same space: so the time is linear in any text.
_CALL = re.compile(r"^[ \t]*Action:([^\n]*)\n[ \t]*Action Input:[ \t]*", re.MULTILINE)
_FINAL = re.compile(r"^[ \t]*Final Answer:", re.MULTILINE)
_ATTEMPT = re.compile(r"^[ \t]*Action(?: Input)?:", re.MULTILINE)
_OBSERVED = re.compile(r"^[ \t]*Observation:", re.MULTILINE)


def instructions(system_prompt: str | None, tools: Sequence[str]) -> str:
    """What the model is told about its tools and the form of its lines, after the `system_prompt`.

    A `system_prompt` with `{tools}` in it is the whole text, because it brings its own
    instructions.

    Args:
        system_prompt: of the agent.
        tools: a line for each tool; `{tools}` is replaced by them.
    """
    text = system_prompt or ""
    if "{tools}" not in text:
        text = "\n\n".join(filter(None, (text, _WITH_TOOLS if tools else _WITHOUT_TOOLS)))
    return text.replace("{tools}", "\n".join(tools) or "none")


@dataclass(frozen=True, kw_only=True)
class ReAct:
    """Reads ReAct's lines. The answer is the rest of the text after `Final Answer:`."""

    max_actions: int = 1
    """Actions that one turn may ask for."""

    @property
    def stop_texts(self) -> list[str]:
        """`Observation:`, because all that a model writes after it is made up.

        The text begins with a line break, which no JSON string has: an argument may contain
        `Observation:`.
        """
        return [f"\n{OBSERVATION}"]

    def find_end(self, text: str) -> int:
        """Index after the JSON of the last action; if no JSON can be read, after `Observation:`."""
        if (calls := self._calls(text)) and calls[-1].end > 0:
            return calls[-1].end
        observed = _OBSERVED.search(text)
        return observed.end() if observed else -1

    def actions(self, text: str, *, is_whole: bool = True) -> list[Action]:
        if calls := self._calls(text):
            return [call.action for call in calls]
        final = _FINAL.search(text)
        attempt = _ATTEMPT.search(text)
        if attempt and (final is None or attempt.start() < final.start()):
            problem = "after 'Action: TOOL' there must be 'Action Input: {JSON}' on the next line"
            return [Action(kind=ActionKind.MALFORMED, content=problem)]
        if final is None:
            return []
        observed = _OBSERVED.search(text, final.end())
        answer = text[final.end() : observed.start() if observed else len(text)].strip()
        is_open = observed is None
        return [Action(kind=ActionKind.ANSWER, content=answer, is_open=is_open, is_message=True)]

    def _calls(self, text: str) -> list["_Call"]:
        """The actions before a final answer, up to the first malformed one."""
        calls: list[_Call] = []
        final = _FINAL.search(text)
        matches = list(_CALL.finditer(text, 0, final.start() if final else len(text)))
        for match in matches[: self.max_actions]:
            if calls and match.start() < calls[-1].end:
                continue  # the match is inside the JSON of the action before
            if _OBSERVED.search(text, calls[-1].end if calls else 0, match.start()):
                break  # the model made up an observation: the actions after it do not count
            calls.append(_read_call(match.group(1).strip(), text, match.end()))
            if calls[-1].action.kind == ActionKind.MALFORMED:
                break
        return calls


@dataclass(frozen=True, slots=True)
class _Call:
    action: Action
    end: int
    """Index after its JSON; 0 if the JSON cannot be read."""


def _read_call(name: str, text: str, at: int) -> _Call:
    """The action whose JSON begins at `at`."""
    if name in (ActionKind.ANSWER, ActionKind.MALFORMED):
        return _Call(Action(kind=ActionKind.MALFORMED, content=f"no tool {name!r}"), 0)
    try:
        arguments, end = read_json(text, at)
    except ValueError as error:
        problem = f"the arguments of {name!r} are no JSON: {error}"
        return _Call(Action(kind=ActionKind.MALFORMED, content=problem), 0)
    if not isinstance(arguments, dict):
        problem = f"the arguments of {name!r} are no JSON object"
        return _Call(Action(kind=ActionKind.MALFORMED, content=problem), end)
    return _Call(Action(kind=name, content=text[at:end], arguments=arguments), end)
