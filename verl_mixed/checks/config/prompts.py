"""Checks of prompts as the model reads them: their lengths, and the chat template.

The text of a prompt comes from `agent_loop.prompts`, and from what the agent loop says itself.
"""

import re
from collections.abc import Iterator, Mapping
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

from agent_loop.environments.episode import Start
from agent_loop.prompts import opening_of, prompt_of, with_system_text
from agent_loop.toolbox.spec import specs_of_tools
from agent_loop.turns.call_formats import FORMATS, VERLS_FORMATS
from agent_loop.turns.react import instructions
from agent_loop.turns.tags import fill_tags
from agent_loop.turns.tool_messages import CannotContinue
from config.lookup import at, files_at
from config.schema import TOOL_CONFIG, PromptConfig, ToolConfig, template_names, template_of
from verl_mixed.checks.config.data import (
    batches,
    media_columns,
    prompt_problem,
    sampled_rows,
    sound_files,
)
from verl_mixed.checks.config.environments import start_of_source
from verl_mixed.checks.config.modes import turn_agents
from verl_mixed.checks.config.tools import (
    MOST_CALLS_KEY,
    TEMPLATE_KEY,
    agents_of,
    call_problem,
    gateway_agents,
    native_agents,
    specs_of,
    template_formats,
    text_messages,
    uses_verls_calls,
)
from verl_mixed.run.compose import unset_keys
from verl_mixed.run.sections import (
    DEFAULT_FORMAT,
    FORMAT_KEY,
    MODEL_KEY,
    NAMED_TOOLS_LOOPS,
    REACT_LOOP,
    agent_loops,
    entry_of,
    loop_of,
    section_of,
    sound_sources,
)

_PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_COLUMNS = ("prompt", "data_source", "agent_name")


def model_problems(config: Mapping[str, Any]) -> list[str]:
    """A missing model folder, and prompts that do not fit.

    Of a hub's name only the format of native calls is checked: its chat template is not read.
    """
    path = _model(config)
    if path is None:
        unread = [] if MODEL_KEY in unset_keys(config) else _unread_format_problems(config)
        return [*_verls_format_problems(config), *unread]
    if not (path / "config.json").is_file():
        return [
            f"{MODEL_KEY}={str(path)!r}: no config.json there; set MODEL_PATH to a model folder"
        ]
    prompts, tokenizer = Prompts(config), _tokenizer(config, path)
    if tokenizer is None:
        return [
            f"{MODEL_KEY}={str(path)!r}: no tokenizer with a chat template there, and prompts are "
            f"messages; set MODEL_PATH to an instruction model's folder, or {TEMPLATE_KEY}"
        ]
    refused = [
        *_verls_format_problems(config),
        *_template_problems(config, tokenizer, prompts),
        *_call_problems(config, tokenizer, prompts),
        *_environment_problems(config, tokenizer, prompts),
    ]
    return refused or list(_length_problems(config, tokenizer, prompts))


def media_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Rows with images, videos or audio that the agent, the backend or the model would lose."""
    path, backend = _model(config), at(config, "actor_rollout_ref.rollout.name")
    common = None
    if backend in ("hf", "openai"):  # openai: an evaluation with --base-url
        common = f"actor_rollout_ref.rollout.name={backend!r} generates from text only"
    elif path is not None and not any(map(Path.is_file, (path / file for file in _PROCESSORS))):
        common = f"{MODEL_KEY}={str(path)!r} has no processor ({' or '.join(_PROCESSORS)})"
    sources = sound_sources(config)
    files = [*files_at(config, "data.train_files"), *files_at(config, "data.val_files")]
    for file in dict.fromkeys(sound_files(files)):
        if not (there := media_columns(config, file)):
            continue
        losing = {name: f"agent={name!r} gives the model text only" for name in turn_agents(config)}
        first: dict[str, str] = {}
        for start, rows in batches(file, ["data_source", "agent_name", *there]):
            for number, row in enumerate(rows, start):
                source = sources.get(row["data_source"])
                agent = (source and source.agent) or row["agent_name"]
                if (why := losing.get(agent) or common) and any(row[name] for name in there):
                    first.setdefault(row["data_source"], f"first row {number}: {why}")
        for source, why in first.items():
            yield (
                f"{file}: rows of source={source!r} have {', '.join(there)}, {why}; use an agent "
                "(tool_agent, single_turn_agent), a backend (vllm, sglang) and a model that take "
                "them, or remove the column"
            )


def first_prompts(config: Mapping[str, Any]) -> dict[str, str]:
    """source -> the first prompt of its training rows.

    It is in the chat template of the model, or message by message if the model is no local folder.
    """
    path = _model(config)
    tokenizer = _tokenizer(config, path) if path is not None else None
    found: dict[str, str] = {}
    prompts = Prompts(config)
    for source, (agent, messages) in first_messages(config).items():
        try:
            found[source] = _shown(messages, tokenizer, prompts.schemas_of(source, agent))
        except _Refused:  # `model_problems` reports it
            found[source] = _shown(messages, None)
    return found


def first_messages(config: Mapping[str, Any]) -> dict[str, tuple[str, list[dict[str, Any]]]]:
    """source -> agent and messages of the first prompt of its training rows."""
    prompts = Prompts(config)
    found: dict[str, tuple[str, list[dict[str, Any]]]] = {}
    for source, ((_, row), *_) in sampled_rows(config, 1).items():
        messages = prompts.of(row)
        if isinstance(start := start_of_source(config, source), Start):
            messages = opening_of(messages, start.messages)
        found[source] = prompts.agent_of(row), messages
    return found


def is_unused_template(key: str, config: Mapping[str, Any]) -> bool:
    """Whether a key is in a template that no source of a run takes."""
    named = re.fullmatch(r"(?:mixed|data)\.prompts\.([^.]+)\..+", key)
    sources = {n: source for n, source in sound_sources(config).items() if source.takes_part}
    if named is None or any(s.prompt is None and s.agent is None for s in sources.values()):
        return False  # rows name the agent, and the agent a template
    return all(named[1] not in template_names(n, s, s.agent) for n, s in sources.items())


def text_of(content: Any) -> str:
    """The text of a message's content, which may have parts."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content)


def _shown(
    messages: list[dict[str, Any]], tokenizer: Any, schemas: list[dict[str, Any]] | None = None
) -> str:
    if tokenizer is None:
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
    try:
        return tokenizer.apply_chat_template(
            messages, tools=schemas or None, add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # a template is a program and may raise anything
        raise _Refused(" ".join(str(error).split())) from error


def _model(config: Mapping[str, Any]) -> Path | None:
    """The model's folder; None for a hub's name or no value."""
    path = Path(str(at(config, MODEL_KEY))).expanduser()
    return path if path.is_absolute() and MODEL_KEY not in unset_keys(config) else None


def _tokenizer(config: Mapping[str, Any], model: Path) -> Any:
    """The tokenizer of a folder, as verl loads it; None if none can render messages."""
    if not model.is_dir():
        return None
    try:
        tokenizer = _loaded(model)
    except (OSError, ValueError):
        return None
    if template := at(config, TEMPLATE_KEY):
        tokenizer = copy(tokenizer)
        tokenizer.chat_template = template
    # transformers makes up a tokenizer if there are no files
    return tokenizer if tokenizer.chat_template else None


@lru_cache(maxsize=1)
def _loaded(model: Path) -> Any:
    from transformers import AutoTokenizer  # takes one or two seconds

    return AutoTokenizer.from_pretrained(str(model))


class _Refused(ValueError):
    """The chat template cannot render these messages; the text has the reason."""


class Prompts:
    """The messages that the run makes from a row's messages."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.tools, _ = section_of(ToolConfig, at(config, TOOL_CONFIG, {}), TOOL_CONFIG)
        self.sources = sound_sources(config)
        library: dict[str, PromptConfig] = {}
        given = at(config, "mixed.prompts")
        for name, values in given.items() if isinstance(given, Mapping) else ():
            template, _ = section_of(PromptConfig, values, f"mixed.prompts.{name}")
            if template is not None:
                library[name] = template
        self.library = library
        self._loops, problems = agent_loops(config)
        if self.tools is None or problems:
            self._loops = None  # their own checks report it
        self.agents = agents_of(config)
        self._specs = {
            (name, agent): [] if isinstance(specs, str) else [*specs.values()]
            for name, agents in self.agents.items()
            for agent in agents
            if loop_of(entry_of(config, agent)) in NAMED_TOOLS_LOOPS
            and (specs := specs_of(config, name, agent)) is not None
        }
        """(source, agent) -> the tools that the model calls; none if they cannot be listed."""
        self._native = native_agents(config)

    def system_text(self, source: str, agent: str) -> str:
        """What the loop of a source adds to the system message, as the loop itself makes it."""
        if self._loops is None or self.tools is None:
            return ""
        entry = self._loops.get(agent, {})
        text = fill_tags(entry.get("system_prompt") or "", self.tools)
        if loop_of(entry) == REACT_LOOP:
            text = instructions(text, [spec.line for spec in self._specs.get((source, agent), [])])
        return text

    def schemas_of(self, source: str, agent: str) -> list[dict[str, Any]]:
        """Schemas of tools that the chat template puts into the prompts of a source."""
        pair = source, agent
        return [spec.schema for spec in self._specs[pair]] if pair in self._native else []

    def has_tools(self, source: str, agent: str) -> bool:
        """Whether an agent can call a tool."""
        return agent != "single_turn_agent" and bool(self._specs.get((source, agent), [True]))

    def agent_of(self, row: Mapping[str, Any]) -> str:
        source = self.sources.get(row["data_source"])
        return (source and source.agent) or row["agent_name"]

    def of(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The messages of a row's prompt."""
        messages, agent = row["prompt"], self.agent_of(row)
        source = self.sources.get(row["data_source"])
        if source is not None and self.tools is not None:
            template = template_of(row["data_source"], source, agent, self.library)
            messages = prompt_of(messages, template, self.tools, source.system_prompt)
        return with_system_text(messages, after=self.system_text(row["data_source"], agent))

    def have_system(self, source: str) -> bool:
        """Whether the run adds a system message before this source's rows."""
        own = self.sources[source]
        template = template_of(source, own, own.agent, self.library)
        agents = self.agents.get(source) or [own.agent or ""]
        of_agents = any(self.system_text(source, agent) for agent in agents)
        return bool(own.system_prompt or template.system or of_agents)


def _length_problems(config: Mapping[str, Any], tokenizer: Any, prompts: Prompts) -> Iterator[str]:
    """Files with prompts that are too long, or that the model's chat template refuses.

    verl would drop long prompts, but the mixture plan needs every row.
    """
    limit = at(config, "data.max_prompt_length")
    files = [*files_at(config, "data.train_files"), *files_at(config, "data.val_files")]
    if not isinstance(limit, int):
        return  # the check of numbers reports it
    for path in dict.fromkeys(sound_files(files)):
        too_long: list[int] = []
        refused: list[tuple[int, str]] = []
        total = longest = 0
        for first, rows in batches(path, _COLUMNS):
            texts: dict[int, str] = {}
            for number, row in enumerate(rows, start=first):
                if prompt_problem(row["prompt"]) is None:
                    try:
                        schemas = prompts.schemas_of(row["data_source"], prompts.agent_of(row))
                        texts[number] = _shown(prompts.of(row), tokenizer, schemas)
                    except _Refused as error:
                        refused.append((number, str(error)))
            encoded = tokenizer(list(texts.values()), add_special_tokens=False) if texts else {}
            lengths = dict(zip(texts, map(len, encoded.get("input_ids", ())), strict=True))
            total, longest = total + len(rows), max(longest, *lengths.values(), 0)
            too_long += [number for number, length in lengths.items() if length > limit]
        if refused:
            yield (
                f"{path}: the chat template of {MODEL_KEY} refuses {len(refused)} of {total} "
                f"prompts, first row {refused[0][0]} ({refused[0][1]}); change their messages or "
                f"mixed.prompts, or set {TEMPLATE_KEY}"
            )
        if too_long:
            yield (
                f"{path}: {len(too_long)} of {total} prompts are longer than "
                f"data.max_prompt_length={limit} tokens, first row {too_long[0]}, longest "
                f"{longest}, with the system prompt of their source or agent; raise it, or leave "
                "those rows out (`verl-mixed prepare --max-prompt-tokens`)"
            )


def _template_problems(
    config: Mapping[str, Any], tokenizer: Any, prompts: Prompts
) -> Iterator[str]:
    """Messages of the loops that the model's chat template refuses."""
    common = at(config, "mixed.turns.observation_style")
    counts = (1,) if at(config, MOST_CALLS_KEY) == 1 else (1, 2)
    of_system = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    refuses = f"the chat template of {MODEL_KEY} refuses messages of the role"
    for name, source in prompts.sources.items():
        try:
            if prompts.have_system(name):
                _shown(of_system, tokenizer)
        except _Refused as error:
            yield (
                f"source={name}: {refuses} system ({error}); leave out its system_prompt and those "
                f"of its prompt and agent, or set {TEMPLATE_KEY}"
            )
        try:
            if (source.observation_style or common) == "chat":
                for count in counts:
                    text_messages(tokenizer, []).glue((), ("tool",) * count)
        except CannotContinue as error:
            yield (
                f"source={name}: {refuses} tool ({error}); set mixed.turns.observation_style=inline"
            )


def _call_problems(config: Mapping[str, Any], tokenizer: Any, prompts: Prompts) -> Iterator[str]:
    """Sources with native tool calls whose format or chat template does not allow them."""
    for name, agent in native_agents(config):
        schemas = prompts.schemas_of(name, agent)
        if problem := call_problem(tokenizer, at(config, FORMAT_KEY), schemas):
            yield f"source={name!r} with agent={agent!r} makes native tool calls: {problem}"


def _environment_problems(
    config: Mapping[str, Any], tokenizer: Any, prompts: Prompts
) -> Iterator[str]:
    """Environments whose first messages do not fit, or whose conversations the template cannot
    continue."""
    limit = at(config, "data.max_prompt_length")
    first = first_messages(config)
    for name in prompts.sources:
        if not isinstance(start := start_of_source(config, name), Start) or name not in first:
            continue
        place = f"mixed.sources.{name}.environment"
        schemas = [spec.schema for spec in specs_of_tools(start.tools)]
        if schemas and (problem := call_problem(tokenizer, at(config, FORMAT_KEY), schemas)):
            yield f"{place} has tools: {problem}"
            continue
        try:
            length = len(tokenizer(_shown(first[name][1], tokenizer, schemas))["input_ids"])
            text_messages(tokenizer, schemas).glue((), ("user",))
        except (_Refused, CannotContinue) as error:
            yield (
                f"{place}: the chat template of {MODEL_KEY} cannot write its messages ({error}); "
                f"set {TEMPLATE_KEY}"
            )
            continue
        if isinstance(limit, int) and length > limit:
            yield (
                f"{place}: its first messages are {length} tokens, more than "
                f"data.max_prompt_length={limit}; raise it"
            )


def _verls_format_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """A format that verl's own loop does not know."""
    if (call_format := at(config, FORMAT_KEY)) not in VERLS_FORMATS and uses_verls_calls(config):
        yield (
            f"{FORMAT_KEY}={call_format!r}: verl's tool_agent reads {', '.join(VERLS_FORMATS)}; "
            "set one of them, or the agent to native_agent"
        )


def _unread_format_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Sources with native tool calls whose format is not set, and cannot be read off a template."""
    call_format = at(config, FORMAT_KEY)
    if call_format in FORMATS:
        return
    for name, agent in native_agents(config):
        yield (
            f"source={name!r} with agent={agent!r} makes native tool calls: {FORMAT_KEY}="
            f"{call_format!r}, and the chat template of {MODEL_KEY}={at(config, MODEL_KEY)!r} is "
            f"not read, because it is no local folder; set the format to one of "
            f"{', '.join(FORMATS)}, or the path to a folder"
        )


def chosen_format(config: Mapping[str, Any]) -> str | None:
    """Name of the format of tool calls of a run that names none: that of the model's chat
    template; None if it is not clear and a source needs it.

    A demo's model that is not made yet writes Hermes' calls, which is also verl's own default.
    """
    needs_it = bool(native_agents(config)) or bool(gateway_agents(config))
    may_need_it = uses_verls_calls(config) or any(
        source.environment for source in sound_sources(config).values()
    )
    if not needs_it and not may_need_it:
        return DEFAULT_FORMAT  # without the tokenizer, which takes seconds to load
    path = _model(config)
    tokenizer = _tokenizer(config, path) if path is not None else None
    if tokenizer is None:
        return None if needs_it and path is None else DEFAULT_FORMAT
    found = template_formats(tokenizer)
    if len(found) == 1 and (needs_it or found[0] in VERLS_FORMATS):
        return found[0]
    return None if needs_it else DEFAULT_FORMAT
