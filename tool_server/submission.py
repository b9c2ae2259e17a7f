"""Tests of `POST /submit`: reads them from the request and compares outputs.

The rules are those of SandboxFusion's CommonOJDataset (sandbox/datasets/common_oj.py,
sandbox/utils/testing.py): lines are compared without case and outer white space, numbers with a
relative tolerance of 1e-5. This module runs no program.
"""

import json
from typing import Any

from pydantic import BaseModel, Field, field_validator

FLOAT_TOLERANCE = 1e-5


class StdioTest(BaseModel):
    """One test: stream name -> content. Only stdin and stdout are supported."""

    input: dict[str, str]
    output: dict[str, str]


class SubmitConfig(BaseModel):
    """The fields of SandboxFusion's TestConfig that matter for stdin/stdout tests."""

    dataset_type: str | None = None
    language: str = Field(min_length=1)
    compile_timeout: float | None = Field(default=None, gt=0)
    run_timeout: float | None = Field(default=None, gt=0, le=120)
    provided_data: list[StdioTest] = Field(default=[], validate_default=True)
    """Given as `{"test": tests}`; the tests may be a text of JSON."""

    extra: dict[str, Any] = Field(default_factory=dict)

    @field_validator("dataset_type")
    @classmethod
    def _is_known(cls, value: str | None) -> str | None:
        if value not in (None, "CommonOJDataset"):
            raise ValueError(f"{value!r} is not supported: use CommonOJDataset")
        return value

    @field_validator("provided_data", mode="before")
    @classmethod
    def _tests(cls, value: Any) -> Any:
        given = value.get("test") if isinstance(value, dict) else None
        return json.loads(given) if isinstance(given, str) else given or []

    @field_validator("provided_data")
    @classmethod
    def _are_supported(cls, tests: list[StdioTest]) -> list[StdioTest]:
        if not tests:
            raise ValueError(
                "config.provided_data.test: the server has no datasets; send at least one "
                "{input: {stdin}, output: {stdout}}"
            )
        for number, test in enumerate(tests):
            if set(test.input) != {"stdin"} or set(test.output) != {"stdout"}:
                raise ValueError(
                    f"config.provided_data.test[{number}]: only stdin and stdout are supported, not"
                    f" {', '.join(sorted({*test.input, *test.output} - {'stdin', 'stdout'}))}"
                )
        return tests


class SubmitRequest(BaseModel):
    """SandboxFusion's request, with the tests in `config.provided_data.test`."""

    dataset: str = ""
    id: int | str = 0
    completion: str
    config: SubmitConfig


def same_lines(got: str, expected: str) -> bool:
    """Whether an output has the expected lines."""
    lines = [text.strip().split("\n") for text in (got, expected)]
    return len(lines[0]) == len(lines[1]) and all(
        _same_text(a.strip(), b.strip()) or _same_number(a, b) for a, b in zip(*lines, strict=True)
    )


def _same_text(got: str, expected: str) -> bool:
    """Whether two texts are equal without case.

    `lower` never makes a text shorter, and no other thread runs meanwhile: a megabyte that is no
    ASCII takes 0.2 s. So it is not called for an output that is too long to be equal.
    """
    if got == expected:
        return True
    expected = expected.lower()
    return len(got) <= len(expected) and got.lower() == expected


def _same_number(got: str, expected: str) -> bool:
    try:
        a, b = float(got), float(expected)
    except ValueError:
        return False
    return abs(a - b) / max(abs(b), 1e-10) < FLOAT_TOLERANCE
