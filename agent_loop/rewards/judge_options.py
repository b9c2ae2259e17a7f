"""Options of the reward `judge`, and the address and the key of the judge."""

import os
import re
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from agent_loop.json_schemas import check_schema
from agent_loop.rewards.judge_prompt import FIELDS, fields_of
from config.section import Section
from config.tool_entries import RateText, is_url, without_secrets

URL_VARIABLE = "JUDGE_BASE_URL"
"""Environment variable with the judge's address, for sources without a `base_url`."""

KEY_VARIABLE = "JUDGE_API_KEY"
"""Environment variable with the judge's bearer token. It is only sent in the request header."""

TOOL = "judge"
"""Name of the judge in calls, faults and metrics."""

_OWN_FIELDS = {
    *("model", "messages", "n", "response_format", "stream"),
    *("temperature", "max_tokens", "seed"),
}
"""Fields of the request that `body` can only leave out."""


class ScoreConfig(Section):
    """How the score is found in the judge's answer: by a schema, or, without one, on the line
    `Score[<code>]: N` that the judge is asked for."""

    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    """JSON schema of the whole answer, sent as `response_format`."""

    field: str = "score"
    """Field of that answer with the number."""

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
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
    """Verdicts for each attempt, asked for at the same time; the score is their mean."""

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
    max_completion_tokens: 4096}`. Other values of a field that the judge sets are refused."""

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
        text = rubric
        if is_rubric_file(rubric):
            try:
                text = Path(rubric).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                path = Path(rubric).absolute()
                raise ValueError(f"cannot read the file {path}: {error}") from error
        named = fields_of(text)
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
        if self.votes > 1 and self.temperature == 0:
            raise ValueError(
                f"votes={self.votes} at temperature=0 are the same vote; leave one out"
            )
        for name in sorted(_OWN_FIELDS & self.body.keys()):
            if self.body[name] is not None or name in ("model", "messages"):
                raise ValueError(
                    f"body.{name}: the judge sets this field itself; set the option for it, or "
                    "write null to send none"
                )
        _ = self.url, judge_key()  # they raise
        return self

    @property
    def url(self) -> str:
        """The judge's address without a slash at its end, of `base_url` or the environment.

        Raises:
            ValueError: there is none, or it may hold a secret, which messages and logs would show.
        """
        url = (self.base_url or os.environ.get(URL_VARIABLE, "")).strip().rstrip("/")
        if not url:
            raise ValueError(f"no judge: give base_url, or export {URL_VARIABLE}")
        if not is_url(url) or without_secrets(url) != url:
            raise ValueError(
                f"base_url or {URL_VARIABLE} is no http(s) address as https://api.openai.com/v1, "
                f"without user and query; a key belongs into {KEY_VARIABLE}"
            )
        return url

    @property
    def target(self) -> str:
        """What shares the rate and the slots: all sources with this judge."""
        return f"judge {self.model} {self.url}"


def judge_key() -> str:
    """The judge's key; "" without one.

    Raises:
        ValueError: the variable holds no key; an HTTP client would show it in its error.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not re.fullmatch("[!-~]*", key):
        raise ValueError(f"{KEY_VARIABLE} holds no key: it has a space or an unusual character")
    return key


def is_rubric_file(rubric: str) -> bool:
    """Whether `JudgeOptions.rubric` is the path of a file."""
    return "\n" not in rubric and rubric.endswith((".txt", ".md"))
