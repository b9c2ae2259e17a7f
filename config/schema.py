"""The parts of the run config that are ours: `mixed:`, `multi_turn.tool_config` and
`algorithm.state_masked_grpo`.

Decides which values are legal and says every mistake at once; leaves verl's own keys to verl
and to the launcher's preflight. Imports no torch, no Ray, no verl.
"""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from typing_extensions import Self


class Section(BaseModel):
    """A config section: unknown keys are errors, values never change after loading."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)


NOT_SOURCES = ("balance", "drift", "limiter", "ratio_error", "remax", "state_masking", "tools")
"""No names of sources: `mixed/<name>` is a metric of the whole run."""

Ratio = float | dict[int, float]
"""A share, or by how many steps were trained before: `{0: 0.5, 1000: 0.2}`, linear in between."""


class ExampleConfig(Section):
    """A worked example, shown as an earlier turn of the conversation."""

    user: str
    """The question."""

    assistant: str
    """All of the response, results of tools between their markers included."""


class PromptConfig(Section):
    """How a row's question becomes the messages of a prompt. `{code_start_tag}` and the other names
    of `tool_config`'s tags and markers in braces stand for what is configured there."""

    system: str | None = None
    """A message before the row's own; rows that bring a system message keep theirs. None: none."""

    user: str = "{question}"
    """The last user message; `{question}` stands for the row's own text."""

    examples: list[ExampleConfig] = []
    """Turns before the row's own: a small model follows them better than rules."""

    @model_validator(mode="after")
    def _says_what_it_should(self) -> Self:
        if "{question}" not in self.user:
            raise ValueError(
                f"user={self.user!r} leaves the question out: write {{question}} where it belongs"
            )
        shown = [text for example in self.examples for text in (example.user, example.assistant)]
        texts = " ".join([self.system or "", self.user, *shown])
        named = re.findall(r"\{(\w+_(?:tag|marker))\}", texts)
        if unknown := sorted({*named} - {*TAG_FIELDS}):
            raise ValueError(
                f"{', '.join(f'{{{name}}}' for name in unknown)}: no such tag; there are "
                f"{', '.join(f'{{{name}}}' for name in TAG_FIELDS)}"
            )
        return self


class FormatTermConfig(Section):
    """1 where an answer was given in the asked form, else 0."""

    weight: float = Field(0.1, allow_inf_nan=False)
    """What it adds to the score."""


class LengthTermConfig(Section):
    """0 for a response of up to `free` tokens, falling to -1 at `limit` (DAPO, Yu et al. 2025, eq.
    13). Tool results count: it is the room of the response that runs out."""

    weight: float = Field(1.0, ge=0, allow_inf_nan=False)
    """What the term is multiplied by before it is added to the score."""

    free: int | None = Field(default=None, ge=0)
    """Tokens; None: four fifths of `limit`."""

    limit: int | None = Field(default=None, ge=1)
    """Tokens; None: the source's `max_response_length`."""

    @model_validator(mode="after")
    def _falls_somewhere(self) -> Self:
        if self.free is not None and self.limit is not None and self.free >= self.limit:
            raise ValueError(f"free={self.free} must be below limit={self.limit}")
        return self


class RewardTerms(Section):
    """What is added to a source's reward; `acc`, whether it counts as solved, stays as it was."""

    format: FormatTermConfig | None = None
    """For answering in the asked form."""

    length: LengthTermConfig | None = None
    """Against running on."""


_BRANCHES = ("<name>", "<template>")
"""Pydantic has them in an error's place, where they are no part of the path."""

_NameOrTemplate = Annotated[
    Annotated[str, Tag(_BRANCHES[0])] | Annotated[PromptConfig, Tag(_BRANCHES[1])],
    Discriminator(lambda given: _BRANCHES[not isinstance(given, str)]),
]


class SourceConfig(Section):
    """One source of the mixture."""

    ratio: Ratio
    """Share of every batch, relative to the other sources; finite and >= 0. Or a schedule."""

    agent: str | None = None
    """Agent loop for every row of this source; None takes the row's own `agent_name`."""

    reward: str | None = None
    """How answers of this source are judged: a name of `agent_loop.rewards`, or a function as
    `path/to/file.py:function`; None takes the one named after the source, and exact match where
    there is none."""

    reward_options: dict[str, Any] = {}
    """Settings of the reward, as `{judge: all, max_tests: 8}` of `code`; a function of one's own is
    called with them."""

    reward_terms: RewardTerms = RewardTerms()
    """What is added to it."""

    prompt: _NameOrTemplate | None = None
    """Name of one of `mixed.prompts`, or a template of its own; None: rows as they are."""

    files: list[str] = []
    """Training files that hold this source's rows and no other's; they join `data.train_files`,
    where rows are also found by their `data_source`."""

    val_files: list[str] = []
    """The same, for validation."""

    kind: str | None = None
    """What `files` and `val_files` are where they are not parquet rows yet: a kind of `verl-mixed
    prepare`, or a Python file that holds one. They are prepared when a run starts, once."""

    kind_options: dict[str, Any] = {}
    """Options of the kind, as `{question_field: query}` of `json`."""

    rollout_n: int | None = Field(default=None, ge=2)
    """Trajectories per prompt in training; None takes `rollout.n`."""

    temperature: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Of sampling; None takes `rollout.temperature`. Validation follows, unless
    `rollout.val_kwargs.temperature` is another than the common one."""

    top_p: float | None = Field(default=None, gt=0, le=1)
    """As `temperature`, of `rollout.top_p`."""

    max_turns: int | None = Field(default=None, ge=1)
    """Generations per trajectory; None takes `rollout.multi_turn.max_assistant_turns`."""

    max_response_length: int | None = Field(default=None, ge=1)
    """Tokens of a response, tool results included; None takes `data.max_response_length`, which
    bounds it."""

    observation_style: Literal["inline", "chat"] | None = None
    """How tool results enter the response; None takes `mixed.turns.observation_style`."""

    @field_validator("files", "val_files", mode="before")
    @classmethod
    def _one_file_is_a_list(cls, files: Any) -> Any:
        return [files] if isinstance(files, str) else files

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
        """Trained steps -> ratio from there on; one entry where the ratio is constant."""
        return self.ratio if isinstance(self.ratio, dict) else {0: self.ratio}

    @property
    def takes_part(self) -> bool:
        """Whether the ratio is above 0 at some time."""
        return any(self.schedule.values())


def templates_of(
    sources: Mapping[str, SourceConfig], prompts: Mapping[str, PromptConfig]
) -> dict[str, PromptConfig]:
    """source -> the template of its prompts; a name that is not in `prompts` counts as none."""
    templates: dict[str, PromptConfig] = {}
    for name, source in sources.items():
        given = prompts.get(source.prompt) if isinstance(source.prompt, str) else source.prompt
        templates[name] = given or PromptConfig()
    return templates


class RateLimitConfig(Section):
    """How the limit of `tool_config` (rate_limit_per_minute, burst, request_interval) is kept."""

    backend: Literal["auto", "file", "ray"] = "auto"
    """Who keeps it: a file that the processes of a node lock, or a Ray actor that hands out leases.
    auto: a file on one node, the actor on several. A file on several nodes needs a shared folder,
    which is tried at the start (`verl-mixed doctor --locks FOLDER` tries it beforehand)."""

    shares: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None = None
    """Source -> weight of its share of the rate. A chatty source then cannot starve another, and
    what a source does not use is for all. Sources not named share the least of the weights. None:
    first come, first served."""

    adaptive: bool = False
    """Three overloads (429, 503) within a second halve the rate; it recovers in half a minute."""

    strict_window_s: float | None = Field(default=None, gt=0, le=366 * 86400)
    """Any window of so many seconds sees no more than rate_limit_per_minute allows in it, bursts
    included: what the burst may use is taken off the sustained rate. At most a year. None: bursts
    come on top."""

    on_config_change: Literal["refuse", "adopt"] = "refuse"
    """Where another run uses the same `rate_limit_file` with other limits: refuse, or change them
    for all. A file of the run's own is always adopted."""

    across_nodes: bool = False
    """Whether nodes share the file; set at the start of a run, when its folder has been tried."""


class StateMaskedGRPOConfig(Section):
    """`algorithm.state_masked_grpo`: how a group's rewards become advantages."""

    norm_by_std: bool = True
    """Divide by the group's standard deviation, as GRPO does. In the run config it follows verl's
    `algorithm.norm_adv_by_std_in_grpo`."""

    dr_grpo: bool = False
    """Dr.GRPO (Liu et al. 2025): no division by the std, whatever `norm_by_std` says, and a loss
    that divides by a constant and not by a response's length: `actor.loss_agg_mode=
    seq-mean-token-sum-norm` with an `actor.loss_scale_factor`, which the preflight asks for."""

    scale: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None = None
    """Source -> factor of its advantages, after the statistics; sources not named have 1. It weighs
    a source's gradient, not its share of the batch: that is its ratio. None: 1 for all."""


class TurnConfig(Section):
    """How the turns of our agent loops are built."""

    observation_style: Literal["inline", "chat"] = "inline"
    """inline: a tool's result between `tool_config.start_state_marker` and `end_state_marker` in
    the assistant's own message. chat: a message of the role `tool`, as the chat template has it."""

    stop_at_tag: Literal["auto", "strings", "token_ids", "after"] = "auto"
    """Who ends a turn at its closing tag. strings: the engine, by text. token_ids: the engine,
    where a tag is one token. after: nobody, the turn is cut afterwards. auto: strings where the
    backend has them. The trajectory is the same; what differs is how much is sampled in vain."""

    answer_reserve: int = Field(default=16, ge=0)
    """Tokens that a tool result never takes, so that the model can still answer."""

    max_observation_length: int | None = Field(default=None, ge=8)
    """Tokens of one tool result, cut in the middle beyond; None: as many as there is room for."""


class DeadlineConfig(Section):
    """What may take how long. One tool call has `tool_config.timeout`.

    The clocks do not stop for the engine: in `mixed_colocate_async` it pauses while the policy is
    updated, so `trajectory_s` must cover an update too. verl's own loops know `trajectory_s`,
    `step_s` and `reward_s`, not `turn_s`.
    """

    turn_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds for one generation and the calls it asks for; None leaves the trajectory's."""

    trajectory_s: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    """Seconds for one trajectory; past them it ends with what it has."""

    step_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds, from when a step asks for prompts, after which their trajectories end with what they
    have; None leaves the trajectory's."""

    reward_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds for one verdict; past them the trajectory counts as `infra_error`."""

    stuck_after_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """A trajectory that waits longer for engine, limiter, tool or reward is named in the log."""


class DriftConfig(Section):
    """The alarm for tokens, text and probabilities that no longer belong together."""

    every: int = Field(default=16, ge=1)
    """Every so many trajectories of a step one is decoded and compared."""

    warn_probs_diff: float | None = Field(default=None, gt=0)
    """A step whose `training/rollout_probs_diff_max` is larger logs the trajectory and token where
    it is; `mixed.max_probs_diff` stops the run. None: no warning."""


class MixedConfig(Section):
    """The `mixed:` subtree."""

    sources: dict[str, SourceConfig]
    """Source name (as in the rows' `data_source` column) -> its settings."""

    prompts: dict[str, PromptConfig] = {}
    """Templates by name, for `mixed.sources.<name>.prompt`: a file of `config/prompts/`."""

    apportionment: Literal["carry", "fixed"] = "carry"
    """carry: remainders go on to the next batch; fixed: the same whole numbers in every batch."""

    seed: int = 0
    """Seed of the order of prompts; not of the model."""

    experiment: str
    """Name of the run; its folder is `<run_root>/<experiment>`."""

    run_dir: str
    """Absolute folder of this run."""

    on_change: Literal["refuse", "continue"] = "refuse"
    """What a resumed run does where data, ratios, batch size or seed are not its checkpoint's:
    refuse, or go on with each source's next row under the new mixture."""

    leakage: Literal["refuse", "allow"] = "refuse"
    """What the check before a run does about rows of validation that are trained too."""

    max_wait_s: float = Field(default=3600.0, gt=0)
    """Longest wait for the groups of a batch; then the step fails and names who is missing."""

    max_replacements: int = Field(default=100, ge=1)
    """A step in which a source needs more new prompts than this for each prompt of its quota, in
    place of failed and filtered ones, fails and names it."""

    infra_error_limit: float = Field(default=0.5, gt=0, le=1)
    """A source that loses a larger share of its trajectories to faults of infrastructure or of its
    loop, over the last `infra_error_window` steps, stops the run. 1 never does. Groups that the
    filter dropped count too. A source is judged from its third group on, or once the window is
    full: one failed request can lose a whole group."""

    infra_error_window: int = Field(default=5, ge=1)
    """Trained steps; at the start of a run those there are."""

    fail_on_loop_error: bool = False
    """Whether one exception in an agent loop's own code stops the run. It is logged with its trace
    and counted as `mixed/<source>/loop_error_rate` in any case."""

    turns: TurnConfig = TurnConfig()
    """How turns are built."""

    deadlines: DeadlineConfig = DeadlineConfig()
    """What may take how long."""

    drift: DriftConfig = DriftConfig()
    """The alarm for tokens and text that differ."""

    tool_server: dict[str, Any] | None = None
    """Settings of the run's own tool server, as `ServerSettings` of
    agent_loop/tools/server/settings.py names them: sandbox, sandbox_workers, sandbox_packages,
    search_upstream, corpus_path, ..."""

    trajectory_sample: int | None = Field(default=None, ge=1)
    """Prompts of each source whose trajectories a step writes to `trajectories/`; None: all."""

    max_probs_diff: float | None = Field(default=None, gt=0)
    """A step whose `training/rollout_probs_diff_max` is larger stops the run; None: no check."""

    rate_limit: RateLimitConfig = RateLimitConfig()
    """Who keeps the limit of tool calls, and how it is shared."""

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
            raise ValueError("sources is empty; name at least one")
        if not any(source.takes_part for source in self.sources.values()):
            raise ValueError(
                "every ratio is 0; give at least one source a ratio above 0 "
                "(TACO_RATIO, NQ_RATIO, MATH_RATIO or mixed.sources.<name>.ratio)"
            )
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
        """source -> ratio, of the sources that take part (ratio above 0)."""
        return {name: source.ratio for name, source in self.sources.items() if source.takes_part}


class ToolCacheConfig(Section):
    """Where results of pure tools are kept for later equal calls."""

    store: str = Field(default="sqlite", pattern=r"^(sqlite|memory|none|(rediss?|unix)://.+)$")
    """sqlite: a file in the run's folder, shared by the processes of a host and kept over a resume.
    memory: each process keeps its own. none: nothing is kept, and equal calls at once are not
    joined. redis://host:port/db: a Redis server, shared by all hosts (`pip install redis`); how
    much it keeps is its own setting (`maxmemory`)."""

    max_mb: float = Field(default=256.0, gt=0, allow_inf_nan=False)
    """Most megabytes of the sqlite file; the oldest results make room. Each process keeps 32 MB of
    them in memory, or less where this is less."""

    ttl_s: float = Field(default=86_400.0, gt=0, allow_inf_nan=False)
    """Seconds that a result is kept. After a change of the corpus or of the sandbox's limits delete
    the file, or results of before are served until then."""


class ToolConfig(Section):
    """`actor_rollout_ref.rollout.multi_turn.tool_config`: how agent loops reach their tools."""

    server_url: str
    """Base URL of the tool server, as in `http://127.0.0.1:8100`; several with commas between them,
    or as a list: each call goes to the least loaded one that answers."""

    max_retries: int = Field(default=3, ge=0)
    """Further attempts after the first, on 429, 5xx and broken connections."""

    timeout: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Seconds for one tool call, waiting and all attempts together."""

    max_workers: int = Field(default=16, ge=1)
    """Tool calls in flight at once, over all processes of a node."""

    request_interval: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Least seconds between two calls, over all processes of the run."""

    rate_limit_per_minute: float = Field(default=6000.0, gt=0, lt=6e10)
    """Sustained tool calls a minute, over all processes of all runs with one `rate_limit_file`."""

    burst: int = Field(default=100, ge=1)
    """Calls that may pass back to back after an idle spell."""

    enable_global_rate_limit: bool = True
    """False: no limiter at all, only `max_workers`."""

    cache: ToolCacheConfig = ToolCacheConfig()
    """Results of tools that are kept for later equal calls."""

    deterministic_code: bool = True
    """Whether results of the model's own programs are kept, as those of verdicts always are: in the
    sandbox a program sees its text and its input, a clock and random numbers. False for sources
    whose programs are about the latter two: equal ones then run anew each time."""

    rate_limit_file: str | None = None
    """State file of the limiter, or name of its actor; None puts it into the run's folder. A
    relative one is made absolute at the start: workers run elsewhere."""

    code_start_tag: str = "<code>"
    """Opens a program that the model wants to be run."""

    code_end_tag: str = "</code>"
    """Closes it, and ends the turn."""

    search_start_tag: str = "<search>"
    """Opens a query that the model wants to be searched for."""

    search_end_tag: str = "</search>"
    """Closes it, and ends the turn."""

    answer_start_tag: str = "<answer>"
    """Opens the answer, which the reward judges."""

    answer_end_tag: str = "</answer>"
    """Closes it, and ends the trajectory."""

    state_masking: bool = True
    """Tool output is kept out of the loss. False is for ablations: the loss then covers tokens that
    the policy never wrote, and every report says so."""

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
        names = list(tags)
        for i, first in enumerate(names):
            for second in names[i + 1 :]:
                a, b = tags[first], tags[second]
                if a and b and (a in b or b in a):
                    problems.append(f"{first}={a!r} and {second}={b!r} contain one another")
        if problems:
            raise ValueError(
                "; ".join(problems) + "; give each tag its own text, none part of another"
            )
        return self


TOOL_CONFIG = "actor_rollout_ref.rollout.multi_turn.tool_config"
"""Where `ToolConfig` stands in the run config."""

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
    """Validate one subtree of the resolved config.

    Args:
        section: the model to build.
        values: the subtree as plain containers, no `DictConfig`.
        path: dotted path of the subtree in the run config, for messages.

    Raises:
        ConfigError: every broken rule, one line each, by dotted path.
    """
    try:
        return section.model_validate(values)
    except ValidationError as error:
        problems = []
        for item in error.errors():
            parts = (str(part) for part in item["loc"] if part not in _BRANCHES)
            place = ".".join([path, *parts])
            message = item["msg"].removeprefix("Value error, ")
            shown = item["input"]
            given = f" (got {shown!r})" if not isinstance(shown, dict) else ""
            problems.append(f"{place}: {message}{given}")
        raise ConfigError(problems) from error
