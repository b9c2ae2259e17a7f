"""Makes the messages of a prompt from a row: the template of the source, with the tags filled in.

Pure. `agent_loop.dataset` applies it when rows are read, so that verl's own loops get it too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.turns.tags import fill_tags
from config.schema import PromptConfig, ToolConfig


def prompt_of(
    rows_own: Sequence[Mapping[str, Any]], template: PromptConfig, tools: ToolConfig
) -> list[dict[str, Any]]:
    """The messages of a prompt, as new objects.

    The last message of the role user is the question; it may have parts, as with images. If there
    is none, only the system message of the template is added.
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
    has_system = any(message["role"] == "system" for message in messages)
    if template.system and not has_system:
        messages.insert(0, {"role": "system", "content": fill_tags(template.system, tools)})
    return messages


def _joined(question: Any, around: Sequence[str]) -> Any:
    """The question between the texts around it, as text or, if it has parts, as parts."""
    if isinstance(question, str):
        return question.join(around)
    parts: list[Any] = []
    for at, text in enumerate(around):
        parts += [*(question if at else ()), *([{"type": "text", "text": text}] if text else ())]
    return parts
