"""The parts of the run config that are ours: `mixed:`, `multi_turn.tool_config` and
`algorithm.state_masked_grpo`.

It checks the values of these parts and reports all mistakes together. verl's own keys are checked
by verl and by the launcher's preflight. It imports no torch, no Ray and no verl.
"""

import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import combinations
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from typing_extensions import Self

from config.environments import ENVIRONMENT_AGENT, EnvironmentEntry, as_environment
from config.removed import why_removed
from config.section import Section
from config.tool_entries import ToolEntry, as_entry, differing_limits

LOOPS_OWN = "loop"
"""The reward that a source's agent loop, or its environment, computes itself."""

NOT_SOURCES = (
    "balance",
    "drift",
    "lead",
    "limiter",
    "loop_lag_s",
    "ratio_error",
    "remax",
    "state_masking",
    "tools",
)
"""Names that no source may have, because `mixed/<name>` is a metric of the whole run."""

Ratio = float | dict[int, float]
"""A ratio, or a schedule `{trained steps: ratio}`, linear in between: `{0: 0.5, 1000: 0.2}`."""


class ExampleConfig(Section):
    """A worked example, shown as an earlier turn of the conversation."""

    user: str
    """The question."""

    assistant: str
    """The complete response, with tool results between their markers."""


class PromptConfig(Section):
    """How a row's question becomes the messages of a prompt.

    `{code_start_tag}`, and the other names of tags and markers in braces, are replaced by the
    values of `tool_config`."""

    system: str | None = None
    """A text in the system message, after the source's `system_prompt` and the row's own system
    message. None adds no text."""

    user: str = "{question}"
    """The last user message; `{question}` is replaced by the row's own text."""

    examples: list[ExampleConfig] = []
    """Worked examples before the row's own messages; they help a small model more than rules do."""

    @model_validator(mode="after")
    def _says_what_it_should(self) -> Self:
        if "{question}" not in self.user:
            raise ValueError(
                f"user={self.user!r} leaves the question out: write {{question}} where it belongs"
            )
        shown = [text for example in self.examples for text in (example.user, example.assistant)]
        _refuse_unknown_tags(" ".join([self.system or "", self.user, *shown]))
        return self


def _refuse_unknown_tags(text: str) -> None:
    named = re.findall(r"\{(\w+_(?:tag|marker))\}", text)
    if unknown := sorted({*named} - {*TAG_FIELDS}):
        raise ValueError(
            f"{', '.join(f'{{{name}}}' for name in unknown)}: no such tag; there are "
            f"{', '.join(f'{{{name}}}' for name in TAG_FIELDS)}"
        )


class FormatTermConfig(Section):
    """A reward term: 1 if an answer was given in the required format, else 0."""

    weight: float = Field(0.1, ge=-1e9, le=1e9)
    """Added to the score, multiplied by the term."""


class LengthTermConfig(Section):
    """A reward term for the length: 0 up to `free` tokens, falling to -1 at `limit` (DAPO, Yu et
    al. 2025, eq. 13). Tool results count, because they use the room of the response too."""

    weight: float = Field(1.0, ge=0, le=1e9)
    """Factor of the term before it is added to the score."""

    free: int | None = Field(default=None, ge=0)
    """Tokens without a penalty; None takes four fifths of `limit`."""

    limit: int | None = Field(default=None, ge=1)
    """Tokens at which the term is -1; None takes the source's `max_response_length`."""

    @model_validator(mode="after")
    def _falls_somewhere(self) -> Self:
        if self.free is not None and self.limit is not None and self.free >= self.limit:
            raise ValueError(f"free={self.free} must be below limit={self.limit}")
        return self


class RewardTerms(Section):
    """Terms that are added to a source's reward. They do not change `acc`, which says whether a
    prompt counts as solved."""

    format: FormatTermConfig | None = None
    """Term for an answer in the required format."""

    length: LengthTermConfig | None = None
    """Term against long responses."""


class DifficultyConfig(Section):
    """Which rows are drawn, by the pass rates of their profile (`verl-mixed profile`)."""

    min: float = Field(default=0.0, ge=0, le=1)
    """Rows with a lower pass rate are left out."""

    max: float = Field(default=1.0, ge=0, le=1)
    """Rows with a higher pass rate are left out."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min={self.min:g} is above max={self.max:g}")
        return self


class CurriculumConfig(Section):
    """A window over pass rates, from which rows are drawn, that moves during training."""

    start: float = Field(ge=0, le=1)
    """Centre of the window at the start, a pass rate."""

    end: float = Field(ge=0, le=1)
    """Centre from `steps` on."""

    width: float = Field(gt=0, le=1)
    """Rows within half of it on both sides of the centre are drawn."""

    steps: int = Field(ge=1)
    """Trained steps until the centre is at `end`. They are counted in the prompts that the source
    is due in them at the ratios of the start, so replaced prompts move the centre too."""


_BRANCHES = ("<name>", "<template>", "<number>", "<schedule>")
"""Pydantic has them in an error's place, where they are no part of the path."""

_NumberOrSchedule = Annotated[
    Annotated[float, Tag(_BRANCHES[2])] | Annotated[dict[int, float], Tag(_BRANCHES[3])],
    Discriminator(lambda given: _BRANCHES[2 + isinstance(given, Mapping)]),
]

_NameOrTemplate = Annotated[
    Annotated[str, Tag(_BRANCHES[0])] | Annotated[PromptConfig, Tag(_BRANCHES[1])],
    Discriminator(lambda given: _BRANCHES[not isinstance(given, str)]),
]


class SourceConfig(Section):
    """One source of the mixture."""

    ratio: _NumberOrSchedule
    """Share of every batch, relative to the other sources; finite and >= 0; or a schedule."""

    agent: str | None = None
    """Agent loop for every row of this source; None takes the row's own `agent_name`."""

    tools: list[ToolEntry] | None = None
    """Tools that the model may call, for agents that call tools by name (`native_agent`,
    `react_agent`): see config/tool_entries.py. None: those that the agent's own settings name."""

    environment: EnvironmentEntry | None = None
    """The environment in which the model acts, see config/environments.py. A source with one has
    the agent `environment`, unless `agent` names a class of yours that inherits it, and the reward
    `loop`, unless `reward` names another."""

    reward: str | None = None
    """Reward of this source: a name of `agent_loop.rewards`; a function as
    `path/to/file.py:function`; or `loop`, the score that an agent loop of your own computes. None
    takes the loop's score if there is one, else the reward with the source's name, else exact
    match."""

    reward_options: dict[str, Any] = {}
    """Settings of the reward, for example `{judge: all, max_tests: 8}` for `code`. A user's own
    function gets them as arguments."""

    reward_terms: RewardTerms = RewardTerms()
    """Terms that are added to the reward."""

    system_prompt: str | None = None
    """A text at the beginning of the system message. What the row, the template and the agent say
    there follows after a blank line."""

    prompt: _NameOrTemplate | None = None
    """Name of one of `mixed.prompts`, or a template with the keys of `mixed.prompts.<name>`. `{}`
    is the template that leaves rows unchanged. None takes `<agent>_<task>`, where `code` rewards
    have the task code, `math` rewards maths, and `qa` and `exact_match` search; else the template
    with the name of the agent; else `{}`."""

    files: list[str] = []
    """Training files with rows of this source only, in addition to `data.train_files`, where rows
    are found by their `data_source`."""

    val_files: list[str] = []
    """The same, for validation."""

    difficulty: DifficultyConfig | None = None
    """Draws only rows with these pass rates. Rows without a profile are left out."""

    curriculum: CurriculumConfig | None = None
    """Draws rows by a window over pass rates that moves. Rows without a profile are left out."""

    kind: str | None = None
    """Kind of the records in `files` and `val_files`, if they are not parquet rows: a kind of
    `verl-mixed prepare`, or a Python file with a `KIND`. They are converted once, when a run
    starts. `reasoning_gym` and `seeds` make their records and have no files."""

    kind_options: dict[str, Any] = {}
    """Options of the kind, for example `{question_field: query}` for `json`."""

    rollout_n: int | None = Field(default=None, ge=2)
    """Trajectories per prompt in training; None takes `rollout.n`."""

    temperature: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Sampling temperature; None takes `rollout.temperature`. Validation uses it too, unless
    `rollout.val_kwargs.temperature` differs from `rollout.temperature`."""

    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sampling top_p; None takes `rollout.top_p`. Validation as for `temperature`."""

    max_turns: int | None = Field(default=None, ge=1)
    """Generations per trajectory; None takes `rollout.multi_turn.max_assistant_turns`."""

    max_response_length: int | None = Field(default=None, ge=1)
    """Tokens of a response, including tool results; at most `data.max_response_length`, which None
    takes."""

    max_staleness: int | None = Field(default=None, ge=1)
    """Most versions of the weights between the start of a prompt and its training, both counted, in
    asynchronous modes; at most `trainer.v1.sampler.max_off_policy_threshold`, which None takes."""

    observation_style: Literal["inline", "chat"] | None = None
    """How tool results enter the response; None takes `mixed.turns.observation_style`."""

    on_truncated: Literal["train", "mask"] | None = None
    """As `mixed.on_truncated`; None takes that."""

    @field_validator("files", "val_files", mode="before")
    @classmethod
    def _one_file_is_a_list(cls, files: Any) -> Any:
        return [files] if isinstance(files, str) else files

    @field_validator("tools", mode="before")
    @classmethod
    def _texts_are_entries(cls, tools: Any) -> Any:
        return [as_entry(tool) for tool in tools] if isinstance(tools, list) else tools

    @field_validator("environment", mode="before")
    @classmethod
    def _text_is_environment(cls, environment: Any) -> Any:
        return as_environment(environment)

    @model_validator(mode="before")
    @classmethod
    def _environment_has_its_agent(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("environment") is not None:
            own = {"agent": values.get("agent") or ENVIRONMENT_AGENT}
            return {**values, **own, "reward": values.get("reward") or LOOPS_OWN}
        return values

    @field_validator("system_prompt")
    @classmethod
    def _names_tags_that_exist(cls, text: str | None) -> str | None:
        _refuse_unknown_tags(text or "")
        return text

    @model_validator(mode="after")
    def _ratio_is_a_share(self) -> Self:
        schedule = self.schedule
        for ratio in schedule.values():
            if not math.isfinite(ratio) or ratio < 0:
                raise ValueError(f"ratio={ratio} must be finite and >= 0; 0 leaves a source out")
        if not schedule or min(schedule) < 0:
            raise ValueError(
                f"ratio={self.ratio}: a schedule needs one entry or more, each at a number of "
                "trained steps >= 0"
            )
        return self

    @property
    def schedule(self) -> dict[int, float]:
        """Trained steps -> ratio from there on; one entry if the ratio is constant."""
        return self.ratio if isinstance(self.ratio, dict) else {0: self.ratio}

    @property
    def takes_part(self) -> bool:
        """Whether the ratio is above 0 at any step."""
        return any(self.schedule.values())

    def reward_name(self, name: str) -> str:
        """The reward of the source with this name."""
        return self.reward or default_reward(name, self.kind)


_REWARD_OF_SOURCE = {"taco": "code", "nq": "qa", "math": "math"}
_REWARD_OF_KIND = {"reasoning_gym": "reasoning_gym", "seeds": LOOPS_OWN}
_TASK_OF_REWARD = {"code": "code", "qa": "search", "exact": "search", "math": "maths"}
"""First word of a reward's name -> what is asked for: a program, a short answer, mathematics."""


def default_reward(source: str, kind: str | None = None) -> str:
    """The reward of a source that names none: that of the kind that makes its rows, else the one
    with the source's name, else exact match."""
    return _REWARD_OF_KIND.get(kind or "") or _REWARD_OF_SOURCE.get(source, "exact_match")


def template_names(name: str, source: SourceConfig, agent: str | None) -> list[str]:
    """The templates that the prompts of a source may take, the first that exists; none if the
    source has its own.

    Args:
        name: of the source.
        agent: name of the agent loop, for a source without a `prompt` of its own.
    """
    if source.prompt is not None:
        return [source.prompt] if isinstance(source.prompt, str) else []
    reward = source.reward_name(name)
    task = None if ":" in reward else _TASK_OF_REWARD.get(reward.partition("_")[0])
    return [*([f"{agent}_{task}"] if task else []), agent or ""]


def template_of(
    name: str, source: SourceConfig, agent: str | None, prompts: Mapping[str, PromptConfig]
) -> PromptConfig:
    """The template of a source's prompts; the empty one if there is none, see `template_names`."""
    if isinstance(source.prompt, PromptConfig):
        return source.prompt
    names = template_names(name, source, agent)
    return next((prompts[each] for each in names if each in prompts), PromptConfig())


class RateLimitConfig(Section):
    """How the limits of `tool_config` (rate_limit_per_minute, burst, request_interval) are
    enforced."""

    backend: Literal["auto", "file", "ray"] = "auto"
    """file: a file that the processes of a node lock. ray: a Ray actor that leases slots to all
    nodes. auto: the file on one node, the actor on several nodes. A file on several nodes needs a
    shared folder, whose locks are tested at the start (`verl-mixed doctor --locks FOLDER` tests
    them beforehand)."""

    shares: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None = None
    """Source -> weight of its share of the rate. No source can use another's share, and all sources
    may use what a source does not use. Sources that are not named together have the smallest
    weight. None: first come, first served."""

    adaptive: bool = False
    """Three overloads (429, 503) in a second halve the rate, which recovers in half a minute."""

    strict_window_s: float | None = Field(default=None, gt=0, le=366 * 86400)
    """Any window of this many seconds sees at most the calls of rate_limit_per_minute, bursts
    included; the sustained rate is reduced by the burst. At most a year. None: bursts are
    additional."""

    on_config_change: Literal["refuse", "adopt"] = "refuse"
    """If another run uses the same `rate_limit_file` with other limits: refuse, or adopt the new
    limits for both. The run's own file always gets the run's limits."""

    across_nodes: bool = False
    """Whether several nodes share the file; set at the start of a run, after the test of its
    folder."""


class StateMaskedGRPOConfig(Section):
    """`algorithm.state_masked_grpo`: how a group's rewards become advantages."""

    dr_grpo: bool = False
    """Dr.GRPO (Liu et al. 2025): no division by the std, even with
    `algorithm.norm_adv_by_std_in_grpo`, and a loss that is divided by a constant instead of a
    response's length. This needs `actor.loss_agg_mode=seq-mean-token-sum-norm` and an
    `actor.loss_scale_factor`; the preflight checks both."""

    scale: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None = None
    """Source -> factor of its advantages, after the group's statistics; other sources have 1. The
    factor changes a source's gradient; its share of the batch is its ratio. None: 1 for all."""


class TurnConfig(Section):
    """How the turns of our agent loops are built."""

    observation_style: Literal["inline", "chat"] = "inline"
    """inline: a tool's result is in the assistant's message, between
    `tool_config.start_state_marker` and `end_state_marker`. chat: a tool's result is a message with
    the role `tool`."""

    stop_at_tag: Literal["auto", "strings", "token_ids", "after"] = "auto"
    """How a turn ends at its closing tag. strings: the engine stops at the text. token_ids: the
    engine stops at the tag's token, if the tag is one token. after: the engine does not stop, and
    the turn is cut afterwards. auto: strings if the backend has them, else after. The trajectory is
    always the same; only the number of discarded tokens differs."""

    answer_reserve: int = Field(default=16, ge=0)
    """Tokens that tool results leave free, so that the model can still answer; at most a quarter of
    the response."""

    max_observation_length: int | None = Field(default=None, ge=8)
    """Tokens of one tool result; a longer one is cut in the middle. None: as many as fit."""


class DeadlineConfig(Section):
    """Time limits in seconds. The limit of one tool call is `tool_config.timeout`.

    A trajectory that passes a limit has waited too long for engine, limiter or tool. It is lost
    like one that a fault ended: it is not trained, and is in no baseline. In `mixed_colocate_async`
    the engine pauses while the policy is updated, so `trajectory_s` must include an update.
    """

    trajectory_s: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    """Seconds for one trajectory."""

    step_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds for all trajectories of a step, from the start of its prompts; None: only
    `trajectory_s` limits them."""

    reward_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds for one reward; after them the trajectory counts as `infra_error`."""

    stuck_after_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """A trajectory that waits longer than this for engine, limiter, tool or reward is named in the
    log."""


class DriftConfig(Section):
    """The alarm for tokens, text and probabilities that do not match."""

    warn_probs_diff: float | None = Field(default=None, gt=0)
    """If a step's `training/rollout_probs_diff_max` is larger, the trajectory and token are logged.
    `mixed.max_probs_diff` stops the run. None: no warning."""


class ControlConfig(Section):
    """How long decisions of `mixed.controller` hold, and their bound."""

    window: int = Field(default=4, ge=1)
    """Trained steps between two decisions. `mixed.unit=trained_tokens` decides as often."""

    floor: float = Field(default=0.05, ge=0.001, lt=1)
    """Smallest share of a source."""


class MixedConfig(Section):
    """The `mixed:` subtree."""

    sources: dict[str, SourceConfig] = {}
    """Source name (as in the rows' `data_source` column) -> its settings. On the command line,
    `mixed.sources.<name>=null` drops a source of the chosen mixture. Only a recipe of verl's own,
    in which verl's reward loop judges, has none."""

    prompts: dict[str, PromptConfig] = {}
    """Templates by name, a file of `config/prompts/`. `mixed.sources.<name>.prompt` names one; a
    source without it takes the one with the name of its agent."""

    agent_loops: dict[str, Any] = {}
    """Agent loops that a mixture registers: name -> `_target_` (a class, as `my_loops.MyAgentLoop`)
    and its settings. An entry with the name of an agent of `config/agent_loops.yaml` changes single
    settings of that agent. `agent_loops`, at the top of the run config, is the same and wins."""

    apportionment: Literal["carry", "fixed"] = "carry"
    """carry: remainders are carried to the next batch. fixed: every batch has the same counts."""

    unit: Literal["prompts", "trajectories", "trained_tokens"] = "prompts"
    """What the ratios count. trajectories: at the same ratio, a source with `rollout_n: 16` has
    half the prompts of one with 8. trained_tokens: tokens with mask 1; prompts are whole, and what
    a window of steps had too much or too little is made up for in the next ones."""

    controller: Literal["off", "progress", "worst"] = "off"
    """Who decides the shares. off: the ratios. progress: sources with larger advantages get more
    (SEC, arXiv 2505.14970). worst: sources with a low pass rate that grows slowly get more
    (MT-GRPO, arXiv 2602.05547). The ratios are then the shares of the first window."""

    control: ControlConfig = ControlConfig()
    """Settings of the controller."""

    seed: int = 0
    """Seed of the order of prompts. It does not seed the model."""

    experiment: str
    """Name of the run; its folder is `<run_root>/<experiment>`."""

    run_dir: str
    """Absolute folder of this run."""

    on_change: Literal["refuse", "continue"] = "refuse"
    """If data, ratios, batch size or seed differ from the checkpoint's: refuse to resume, or
    continue with each source's next row under the new mixture."""

    leakage: Literal["refuse", "allow"] = "refuse"
    """What the check before a run does if validation rows are also training rows."""

    lead: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """Groups that are started before their batch needs them, in asynchronous modes. auto: all
    sources together have `num_warmup_batches` batches, shared out by latency, so that a slow source
    does not slow the others. A number: each source has so many, whatever its latency, and
    `num_warmup_batches` is not used."""

    max_wait_s: float = Field(default=3600.0, gt=0)
    """Longest wait in seconds for the groups of a batch; then the step fails and names the sources
    that lack groups."""

    max_replacements: int = Field(default=100, ge=1)
    """Most replacements of failed and filtered prompts in one step, per prompt of a source's quota;
    with more, the step fails and names the source."""

    infra_error_limit: float = Field(default=0.5, gt=0, le=1)
    """The run stops if a source loses a larger share of its trajectories than this to faults of the
    infrastructure, deadlines or errors of its loop, over the last 5 steps. With 1 it never stops.
    Filtered groups count too. A source is judged from its third group on, or when the window is
    full, because one failed request can lose a whole group."""

    on_truncated: Literal["train", "mask"] = "train"
    """A trajectory that used up its turns or tokens (`max_turns`, `response_budget`). train: it is
    trained with the reward that it got. mask: it is not trained and is in no baseline, as with
    DAPO's overlong filtering (Yu et al. 2025, sec. 3.4); its reward still counts in the metrics."""

    fail_on_loop_error: bool = False
    """Whether one exception in an agent loop's own code stops the run. In any case it is logged
    with its traceback and counted as `mixed/<source>/loop_error_rate`."""

    turns: TurnConfig = TurnConfig()
    """Settings of turns."""

    deadlines: DeadlineConfig = DeadlineConfig()
    """Time limits."""

    drift: DriftConfig = DriftConfig()
    """The alarm for tokens and text that do not match."""

    tool_server: dict[str, Any] | None = None
    """Settings of the run's own tool server, by the names of `OwnServerSettings` in
    tool_server/settings.py: sandbox, sandbox_workers, sandbox_packages,
    search_upstream, corpus_path, restarts, ..."""

    trajectory_sample: int | None = Field(default=None, ge=1)
    """Prompts per source whose trajectories a step writes to `trajectories/`; None: all."""

    trajectory_sample_step: int | None = Field(default=None, ge=1)
    """Prompts of all sources together whose trajectories a step writes; sources take turns over the
    steps. `trajectory_sample` holds too. None: no limit."""

    trajectory_keep: int | None = Field(default=None, ge=1)
    """Steps whose trajectory files are kept: the newest ones. The viewer and the audit of masks see
    only these steps. None: all."""

    trajectory_token_values: bool = False
    """Whether trajectory files hold the old log-prob and the importance weight of every trained
    token, and not only their sum and hash for each row: some 20 bytes a value."""

    wandb_artifacts: bool = False
    """Whether each checkpoint and each step's trajectory file becomes an artifact at Weights &
    Biases. Files are sent while training goes on; offline they stay as hard links in folders
    `.wandb` beside the files, with the space of every checkpoint, until they are removed after
    `wandb sync`."""

    max_probs_diff: float | None = Field(default=None, gt=0)
    """The run stops if a step's `training/rollout_probs_diff_max` is larger; None: no check."""

    rate_limit: RateLimitConfig = RateLimitConfig()
    """How the limit of tool calls is enforced and shared."""

    @field_validator("controller", mode="before")
    @classmethod
    def _yaml_reads_off_as_false(cls, value: Any) -> Any:
        return "off" if value is False else value

    @field_validator("sources")
    @classmethod
    def _names_fit_into_metrics(cls, sources: dict[str, SourceConfig]) -> dict[str, SourceConfig]:
        if taken := [name for name in sources if not name or name in NOT_SOURCES]:
            raise ValueError(
                f"no names of sources: {', '.join(map(repr, taken))}; metrics are called "
                f"mixed/<source>/..., and mixed/ has {', '.join(NOT_SOURCES)} of its own: choose "
                "others, here and in the rows' data_source (`verl-mixed prepare KIND --source "
                "NAME` writes it)"
            )
        return sources

    @model_validator(mode="after")
    def _some_source_has_a_share(self) -> Self:
        if not self.sources:
            if "sources" in self.model_fields_set:
                raise ValueError("sources is empty; name at least one")
            return self
        if not any(source.takes_part for source in self.sources.values()):
            raise ValueError(
                "every ratio is 0; give at least one source a ratio above 0 "
                "(TACO_RATIO, NQ_RATIO, MATH_RATIO or mixed.sources.<name>.ratio)"
            )
        return self

    @model_validator(mode="after")
    def _limits_of_a_tool_agree(self) -> Self:
        """Two sources that name one tool share its limits."""
        entries = (
            (f"sources.{name}.tools", entry)
            for name, source in self.sources.items()
            for entry in source.tools or ()
        )
        acted_in = (
            (f"sources.{name}.environment", source.environment)
            for name, source in self.sources.items()
            if source.environment is not None
        )
        for problem in (*differing_limits(entries), *differing_limits(acted_in)):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _prompts_are_there(self) -> Self:
        problems = [
            f"sources.{name}.prompt={source.prompt!r}: no such template; mixed.prompts has "
            f"{', '.join(sorted(self.prompts)) or 'none'}"
            for name, source in self.sources.items()
            if isinstance(source.prompt, str) and source.prompt not in self.prompts
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def ratios(self) -> dict[str, Ratio]:
        """source -> ratio, for the sources with a ratio above 0."""
        return {name: source.ratio for name, source in self.sources.items() if source.takes_part}


class ToolCacheConfig(Section):
    """The cache of results of pure tools, for later equal calls."""

    store: Literal["sqlite", "memory", "none"] = "sqlite"
    """sqlite: a file in the run's folder, shared by the processes of a host and kept over a resume,
    at most 256 MB. memory: each process has its own cache of at most 32 MB. none: no cache, and
    equal calls at the same time are not joined. A result is kept for a day. After a change of the
    corpus, the packages or the limits of a tool server, its earlier results are not found any more:
    its fingerprint is in the key. A program in the sandbox sees only its text, its input, a clock
    and random numbers; where the last two matter, take none."""

    @field_validator("store", mode="before")
    @classmethod
    def _is_no_redis(cls, value: Any) -> Any:
        if isinstance(value, str) and value.startswith(("redis", "unix:")):
            raise ValueError(
                f"{value.partition(':')[0]}: release 2.0 has no store on a Redis server any more; "
                "leave this key out: the processes of a host share a file in the run's folder"
            )
        return value


class ToolConfig(Section):
    """`actor_rollout_ref.rollout.multi_turn.tool_config`: how agent loops reach their tools."""

    server_url: str
    """Base URL of the tool server, for example `http://127.0.0.1:8100`. With several URLs (with
    commas, or as a list), each call goes to the least loaded server that answers."""

    max_retries: int = Field(default=3, ge=0)
    """Attempts after the first one, where the tool answers that it failed (500, an answer that
    cannot be read). A server that does not answer (no connection, 429, 502, 503, 504) is asked
    until `timeout` instead, unless the call may have been executed and must not run twice."""

    timeout: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Seconds for one tool call, including waiting and all attempts."""

    max_workers: int = Field(default=16, ge=1)
    """Tool calls in flight at once, over all processes of a node."""

    request_interval: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Minimum seconds between two calls, over all processes of the run."""

    rate_limit_per_minute: float = Field(default=6000.0, gt=0, lt=6e10)
    """Sustained tool calls per minute, over all processes of all runs with the same
    `rate_limit_file`."""

    burst: int = Field(default=100, ge=1)
    """Calls that may pass at once after an idle time."""

    enable_global_rate_limit: bool = True
    """False: no rate limiter, only `max_workers`."""

    cache: ToolCacheConfig = ToolCacheConfig()
    """Cache of tool results."""

    rate_limit_file: str | None = None
    """State file of the limiter, or name of its actor; None: a file in the run's folder. A relative
    path is made absolute at the start, because workers run in another folder."""

    code_start_tag: str = "<code>"
    """Opens a program that the model wants to run."""

    code_end_tag: str = "</code>"
    """Closes it and ends the turn."""

    search_start_tag: str = "<search>"
    """Opens a search query."""

    search_end_tag: str = "</search>"
    """Closes it and ends the turn."""

    answer_start_tag: str = "<answer>"
    """Opens the answer, which the reward judges."""

    answer_end_tag: str = "</answer>"
    """Closes it and ends the trajectory."""

    state_masking: bool = True
    """Keep tool output out of the loss. False is for ablations: the loss then includes tokens that
    the policy did not write, and every report says so."""

    start_state_marker: str = "<information>"
    """Opens a tool's result in the response."""

    end_state_marker: str = "</information>"
    """Closes a tool's result in the response."""

    @property
    def server_urls(self) -> list[str]:
        """The base URLs, each without a slash at its end."""
        return [url.strip().rstrip("/") for url in self.server_url.split(",")]

    @field_validator("server_url", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        return ",".join(map(str, value)) if isinstance(value, list | tuple) else value

    @field_validator("server_url")
    @classmethod
    def _are_urls(cls, value: str) -> str:
        for url in value.split(","):
            if not url.strip().startswith(("http://", "https://")):
                raise ValueError(
                    f"{url.strip()!r} is no base URL: each begins with http:// or https://"
                )
        return value

    @model_validator(mode="after")
    def _tags_can_be_told_apart(self) -> Self:
        tags = {name: getattr(self, name) for name in TAG_FIELDS}
        problems = [f"{name} is empty" for name, tag in tags.items() if not tag.strip()]
        problems += [f"{name}={tag!r} holds ${{" for name, tag in tags.items() if "${" in tag]
        for (first, a), (second, b) in combinations(tags.items(), 2):
            if a and b and (a in b or b in a):
                problems.append(f"{first}={a!r} and {second}={b!r} contain one another")
        if problems:
            raise ValueError(
                "; ".join(problems) + "; give each tag its own text, none part of another, and "
                "none with ${, which config files read as a reference"
            )
        return self


TOOL_CONFIG = "actor_rollout_ref.rollout.multi_turn.tool_config"
"""Path of `ToolConfig` in the run config."""

TAG_FIELDS = (
    "code_start_tag",
    "code_end_tag",
    "search_start_tag",
    "search_end_tag",
    "answer_start_tag",
    "answer_end_tag",
    "start_state_marker",
    "end_state_marker",
)


S = TypeVar("S", bound=Section)


class ConfigError(ValueError):
    """The run config breaks rules; `problems` lists each as one line."""

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = problems


def load_section(section: type[S], values: Any, path: str) -> S:
    """Validate one subtree of the resolved config, in plain containers, no `DictConfig`.

    Raises:
        ConfigError: every broken rule, one line each, by its dotted path below `path`.
    """
    try:
        return section.model_validate(values)
    except ValidationError as error:
        problems = []
        for item in error.errors():
            parts = (str(part) for part in item["loc"] if part not in _BRANCHES)
            place = ".".join([path, *parts])
            message = item["msg"].removeprefix("Value error, ")
            if item["type"] == "extra_forbidden" and (why := why_removed(place)):
                message = why
            elif item["type"] == "extra_forbidden" and len(item["loc"]) == 1:
                near = get_close_matches(str(item["loc"][0]), section.model_fields, n=1)
                message += f"; did you mean {path}.{near[0]}?" if near else ""
            shown = item["input"]
            given = f" (got {shown!r})" if not isinstance(shown, dict) else ""
            problems.append(f"{place}: {message}{given}")
        raise ConfigError(problems) from error
