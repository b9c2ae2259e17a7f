"""Options of the reward `judge`, and the address and the key of the judge."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from agent_loop.json_schemas import check_schema
from agent_loop.rewards.judge_prompt import FIELDS
from config.section import Section
from config.tool_entries import RateText

URL_VARIABLE = "JUDGE_BASE_URL"
"""Environment variable with the judge's address, for sources without a `base_url`."""

KEY_VARIABLE = "JUDGE_API_KEY"
"""Environment variable with the judge's bearer token. It is only sent in the request header."""

TOOL = "judge"
"""Name of the judge in calls, faults and metrics."""

_OWN_FIELDS = {
    "model": "set the option model",
    "messages": "set the option rubric",
    "n": "set the option votes",
    "response_format": "set the option score.schema",
    "stream": "leave it out, because an answer is read as a whole",
    "temperature": "set the option temperature, or write null to send none",
    "max_tokens": "set the option max_tokens, or write null to send none",
    "seed": "leave it out, because each vote has another seed, or write null to send none",
}
"""Field of the request that `body` cannot set -> what to do instead."""

_MAY_BE_NULL = ("temperature", "max_tokens", "seed")
"""Those that `body` may leave out."""


class ScoreConfig(Section):
    """How the score is found in the judge's answer: by a pattern, by a schema, or, without both, on
    the line `Score[<code>]: N` that the judge is asked for."""

    pattern: str | None = None
    """Regular expression with one group, the number. The last match counts. The rubric must say the
    form of the verdict. `{code}` in it stands for the code of the quotes."""

    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    """JSON schema of the whole answer, sent as `response_format`."""

    field: str = "score"
    """Field of that answer with the number."""

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        if self.pattern is not None and self.json_schema is not None:
            raise ValueError("pattern and schema: give one of them")
        if self.pattern is not None:
            try:
                groups = re.compile(self.pattern.replace("{code}", "0")).groups
            except re.error as error:
                raise ValueError(
                    f"pattern={self.pattern!r} is no regular expression: {error}"
                ) from error
            if groups != 1:
                raise ValueError(
                    f"pattern={self.pattern!r} has {groups} groups: give the number one"
                )
        if self.json_schema is not None:
            check_schema(self.json_schema, "schema")
            known = self.json_schema.get("properties", {})
            if self.field not in known:
                raise ValueError(f"field={self.field!r} is none of the schema's {sorted(known)}")
        elif "field" in self.model_fields_set:
            raise ValueError(
                f"field={self.field!r} is read with a schema only; give one, or leave it out"
            )
        return self


class PriceConfig(Section):
    """What the judge costs."""

    input: float = Field(ge=0, allow_inf_nan=False)
    """USD for a million prompt tokens."""

    output: float = Field(ge=0, allow_inf_nan=False)
    """USD for a million tokens that the judge writes."""


class JudgeOptions(Section):
    """`mixed.sources.<source>.reward_options` of `judge`."""

    rubric: str
    """What the judge is asked: a text, or the path of a `.txt` or `.md` file. `{question}`,
    `{answer}`, `{reference}` and `{response}` are replaced by quoted texts; one of `{answer}` and
    `{response}` must be there."""

    model: str = Field(min_length=1)
    """The judge's name at its server."""

    base_url: str | None = None
    """Address of the server, as `https://api.openai.com/v1`. None takes JUDGE_BASE_URL."""

    votes: int = Field(default=1, ge=1, le=64)
    """Verdicts for each attempt; they are asked for at the same time."""

    aggregate: Literal["mean", "median", "majority"] = "mean"
    """How the votes become the score. majority: the most frequent score; of several such scores the
    lowest."""

    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """None: 0 for one vote, 0.7 for several. Several votes at 0 would be the same."""

    max_tokens: int = Field(default=1024, ge=1)
    """Most tokens that the judge writes, its reasoning included. A cut answer is unreadable."""

    score: ScoreConfig = ScoreConfig()
    """How the score is found in the answer."""

    scale: tuple[float, float] = (0.0, 10.0)
    """The lowest and the highest score; they become 0 and 1. Another score is unreadable."""

    pass_at: float = Field(default=1.0, ge=0, le=1)
    """Solved (`acc`) at this score or more, after the scale."""

    max_chars: int = Field(default=40_000, ge=100)
    """Characters of each quoted text; the middle of a longer one is left out."""

    body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request, as `{chat_template_kwargs: {enable_thinking: false}}`. null
    leaves out a field, for servers that refuse it: `{temperature: null, max_tokens: null,
    max_completion_tokens: 4096}`. Other values of `temperature`, `max_tokens` and `seed` are
    refused."""

    price: PriceConfig | None = None
    """For the metric `judge_cost`; None: there is none."""

    rate: RateText | None = None
    """Most requests of the run to this model, as `2/s`, `30/min` or `100/h`, in addition to the
    run's own limit. None: no limit of its own."""

    slots: int | None = Field(default=None, ge=1)
    """Most requests at once, over all processes of a node; None: no limit of its own."""

    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds for one request, with waits and attempts; None takes `tool_config.timeout`. All
    votes together have `mixed.deadlines.reward_s`."""

    retry: int | None = Field(default=None, ge=0)
    """Attempts after the first one; as many times an unreadable verdict is asked for again. None
    takes `tool_config.max_retries`."""

    cache: bool = True
    """Whether equal prompts get the verdicts of an earlier one, by `tool_config.cache`."""

    @field_validator("rubric")
    @classmethod
    def _is_a_template(cls, rubric: str) -> str:
        text = _text_of(rubric)
        named = {*re.findall(r"\{(\w+)\}", text)}
        known = ", ".join(f"{{{name}}}" for name in FIELDS)
        if unknown := sorted(named - {*FIELDS}):
            raise ValueError(
                f"no text for {', '.join(f'{{{n}}}' for n in unknown)}: there are {known}"
            )
        if not named & {"answer", "response"}:
            raise ValueError(
                "the judge would see no work: write {answer} or {response} in the rubric"
            )
        return text

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        low, high = self.scale
        if not -1e9 <= low < high <= 1e9:
            raise ValueError(
                f"scale={[low, high]}: the first number must be below the second, and both from "
                "-1e9 to 1e9; correct them"
            )
        field, schema = self.score.field, self.score.json_schema
        if schema is not None and not _takes_a_number(schema["properties"][field], low, high):
            raise ValueError(
                f"score.schema: its {field} takes no number from {low:g} to {high:g}; correct the "
                "schema, or scale"
            )
        if self.votes > 1 and self.temperature == 0:
            raise ValueError(
                f"votes={self.votes} at temperature=0 are the same vote; leave one out"
            )
        for name, remedy in _OWN_FIELDS.items():
            if name in self.body and not (self.body[name] is None and name in _MAY_BE_NULL):
                raise ValueError(f"body.{name}: the judge sets this field itself; {remedy}")
        judge_url(self.base_url, os.environ)
        judge_key(os.environ)
        return self

    @property
    def url(self) -> str:
        """The judge's address, of `base_url` or the environment."""
        return judge_url(self.base_url, os.environ)

    @property
    def target(self) -> str:
        """What shares the rate and the slots: all sources with this judge."""
        return f"judge {self.model} {self.url}"


def _takes_a_number(schema: Any, low: float, high: float) -> bool:
    """Whether a schema may take a number from `low` to `high`. Only its plain keys are looked at:
    what is behind `$ref`, `anyOf` and the like may take one."""
    if isinstance(schema, bool):
        return schema
    kinds, values = schema.get("type", "number"), schema.get("enum", [schema.get("const", low)])
    return (
        not {"number", "integer"}.isdisjoint([kinds] if isinstance(kinds, str) else kinds)
        and schema.get("minimum", low) <= high
        and schema.get("maximum", high) >= low
        and any(type(v) in (int, float) and low <= v <= high for v in values)
    )


def judge_url(base_url: str | None, environ: Mapping[str, str]) -> str:
    """The judge's address without a slash at its end.

    Raises:
        ValueError: there is none, or it may hold a secret, which messages and logs would show.
    """
    given = (base_url or environ.get(URL_VARIABLE, "")).strip().rstrip("/")
    if not given:
        raise ValueError(f"no judge: give base_url, or export {URL_VARIABLE}")
    try:
        parts = urlsplit(given)
        is_plain = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_plain &= not any((parts.username, parts.password, parts.query, parts.fragment))
    except ValueError:  # a port that is no number
        is_plain = False
    if not is_plain:
        raise ValueError(
            f"base_url or {URL_VARIABLE} is no http(s) address as https://api.openai.com/v1, "
            f"without user and query; a key belongs into {KEY_VARIABLE}"
        )
    return given


def judge_key(environ: Mapping[str, str]) -> str:
    """The judge's key; "" without one.

    Raises:
        ValueError: the variable holds no key.
    """
    key = environ.get(KEY_VARIABLE, "").strip()
    if not key.isascii() or (key and not key.isprintable()) or " " in key:
        raise ValueError(f"{KEY_VARIABLE} holds no key: it has a space or an unusual character")
    return key


def is_rubric_file(rubric: str) -> bool:
    """Whether `JudgeOptions.rubric` is the path of a file."""
    return "\n" not in rubric and rubric.endswith((".txt", ".md"))


def _text_of(rubric: str) -> str:
    """The text of a rubric that is a path."""
    if not is_rubric_file(rubric):
        return rubric
    try:
        return Path(rubric).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the file {Path(rubric).absolute()}: {error}") from error
