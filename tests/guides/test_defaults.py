"""Defaults that the training guide names: the same here, or in a table of docs/coming_from.md."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from config.lookup import at
from tests.guides.table import DEFAULTS
from verl_mixed.run.compose import compose_config

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"


@cache
def composed(profile: str) -> DictConfig:
    return compose_config([f"profile={profile}"])


def shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def table() -> dict[str, list[str]]:
    """Key -> its default there, on the laptop and with GPUs, and why, as the page says them."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("| key | default there |")
    lines = re.findall(r"^\| `(.+?)` \|(.+)\|$", rest.partition("\n\n")[0], re.MULTILINE)
    return {key: [cell.strip(" `") for cell in cells.split("|")] for key, cells in lines}


@pytest.mark.parametrize(("key", "there"), DEFAULTS.items())
def test_a_default_is_the_guides_or_in_the_table_of_differences(key: str, there: Any) -> None:
    here = [at(composed(profile), key) for profile in ("laptop", "gpu")]

    if here == [there, there]:
        assert key not in table()
    else:
        *values, why = table()[key]
        assert values == [shown(value) for value in (there, *here)] and why


def test_the_table_of_differences_has_defaults_of_the_guide_only() -> None:
    assert table().keys() <= DEFAULTS.keys()
