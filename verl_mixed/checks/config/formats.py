"""Prompts that never say in which form the agent reads actions and answers.

A model that is not told the form earns no reward, however long it is trained. Only our own agents
are judged, and only the first prompt of each source, as the model reads it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from config.lookup import at
from config.schema import TOOL_CONFIG, PromptConfig, ToolConfig
from verl_mixed.checks.config.prompts import first_messages
from verl_mixed.run.sections import REACT_LOOP, SEARCH_LOOP, agent_loops, section_of, sound_sources

ACTIONS = {
    "agent_loop.code_execution_agent_loop.CodeExecutionAgentLoop": ("code", "answer"),
    SEARCH_LOOP: ("search", "answer"),
    "agent_loop.math_agent_loop.MathAgentLoop": ("code", "answer"),
}
"""Class of an agent loop -> its `actions`; importing the classes would import verl."""

FORMS = {
    "agent_loop.math_agent_loop.MathAgentLoop": (r"\boxed",),
    REACT_LOOP: ("Action:", "Final Answer:"),
}
"""Class of an agent loop -> texts of the forms that it reads besides tags."""


def format_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Sources whose first prompt has none of the tags and forms of its agent.

    The demo model has learnt them from examples. Of another such model the user says it by
    `prompt={}`: rows as they are.
    """
    tools, _ = section_of(ToolConfig, at(config, TOOL_CONFIG, {}), TOOL_CONFIG)
    loops, _ = agent_loops(config)
    if tools is None or _is_demo_model(config):
        return
    sources = sound_sources(config)
    for name, (agent, messages) in first_messages(config).items():
        target = str((loops or {}).get(agent, {}).get("_target_"))
        forms = [getattr(tools, f"{kind}_start_tag") for kind in ACTIONS.get(target, ())]
        forms += FORMS.get(target, ())
        text = "\n".join(_text(message["content"]) for message in messages)
        if not forms or sources[name].prompt == PromptConfig() or any(f in text for f in forms):
            continue
        key = f"mixed.sources.{name}"
        if target not in ACTIONS:  # only a system_prompt with {tools} leaves ReAct's lines out
            remedy = f"describe these lines in the system_prompt of {agent}, or leave {{tools}} out"
        elif isinstance(sources[name].prompt, PromptConfig):
            remedy = f"name them in {key}.prompt, as {{answer_start_tag}}, or leave it out and set "
            remedy += f"prompts=instructed (a text of your own can be {key}.system_prompt)"
        else:
            remedy = f"set prompts=instructed, or {key}.prompt to a template that names them "
            remedy += f"('{key}.prompt={{}}' if the model has learnt the form from examples)"
        yield (
            f"source={name!r} with agent={agent!r}: its first prompt has none of "
            f"{', '.join(forms)}: the model never hears in which form to act and answer, and earns "
            f"no reward; {remedy}"
        )


def _is_demo_model(config: Mapping[str, Any]) -> bool:
    """Whether the model is in the folder of a demo, which has this note."""
    path = Path(str(at(config, "actor_rollout_ref.model.path"))).expanduser()
    return path.is_absolute() and (path.parent / "demo.json").is_file()


def _text(content: Any) -> str:
    """The text of a message's content, which may have parts."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content)
