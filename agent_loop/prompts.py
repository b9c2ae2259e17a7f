"""Makes the messages of a prompt from a row: texts around the row's own words, with tags filled in.

The system message of a prompt has these parts, joined by blank lines; a part may be missing:

1. `mixed.sources.<name>.system_prompt`
2. the row's own system message
3. `system` of the template of the source (`mixed.prompts`)
4. what the agent loop says itself: `system_prompt` in agent_loops.yaml, ReAct's instructions

Pure. `agent_loop.training.verl_adapters.dataset` adds the first three when rows are read, so that
verl's own loops get them too; our agent loops add the fourth.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.turns.tags import fill_tags
from config.schema import PromptConfig, ToolConfig


def prompt_of(
    rows_own: Sequence[Mapping[str, Any]],
    template: PromptConfig,
    tools: ToolConfig,
    system_prompt: str | None = None,
) -> list[dict[str, Any]]:
    """The messages of a prompt, as new objects.

    The last message of the role user is the question; it may have parts, as with images. If there
    is none, only the system message is changed.

    Args:
        system_prompt: of the source.
    """
    messages = [dict(message) for message in rows_own]
    users = [message for message in messages if message["role"] == "user"]
    if users:
        # Tags are filled in before the question, because names in braces in a question stay.
        around = fill_tags(template.user, tools).split("{question}")
        users[-1]["content"] = _joined(users[-1]["content"], around)
        examples = [
            {"role": role, "content": fill_tags(text, tools)}
            for example in template.examples
            for role, text in (("user", example.user), ("assistant", example.assistant))
        ]
        first = sum(message["role"] == "system" for message in messages)
        messages[first:first] = examples
    before, after = (fill_tags(text or "", tools) for text in (system_prompt, template.system))
    return with_system_text(messages, before=before, after=after)


def with_system_text(
    messages: Sequence[Mapping[str, Any]], *, before: str = "", after: str = ""
) -> list[dict[str, Any]]:
    """The messages, as new objects, with texts before and after those of their system message.

    Without a system message in front, the texts become one; if both are empty, there is none.
    """
    messages = [dict(message) for message in messages]
    if messages and messages[0]["role"] == "system":
        around = [f"{before}\n\n" if before else "", f"\n\n{after}" if after else ""]
        messages[0]["content"] = _joined(messages[0]["content"], around)
    elif text := "\n\n".join(filter(None, (before, after))):
        messages.insert(0, {"role": "system", "content": text})
    return messages


def opening_of(
    of_row: Sequence[Mapping[str, Any]], of_environment: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The first messages of an episode: the system message of the row, then those of the
    environment, whose own system message is joined to the row's."""
    system = next((each["content"] for each in of_row if each["role"] == "system"), "")
    return with_system_text(of_environment, before=system)


def _joined(own: Any, around: Sequence[str]) -> Any:
    """A message's content between the texts around it, as text or, if it has parts, as parts."""
    if isinstance(own, str):
        return own.join(around)
    parts: list[Any] = []
    for at, text in enumerate(around):
        parts += [*(own if at else ()), *([{"type": "text", "text": text}] if text else ())]
    return parts
