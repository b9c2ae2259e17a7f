"""The config's own rules: all mistakes at once, each by its dotted path."""

import re
from pathlib import Path
from typing import Any

import pytest

import agent_loop
import samplers.door
from config.schema import (
    NOT_SOURCES,
    TAG_FIELDS,
    ConfigError,
    MixedConfig,
    ToolConfig,
    load_section,
)
from verl_mixed.run.compose import compose_config

TOOLS: dict[str, Any] = {"server_url": "http://127.0.0.1:8100"}


def mixed(**ratios: float) -> dict:
    sources = {name: {"ratio": ratio} for name, ratio in ratios.items()}
    return {"sources": sources, "experiment": "x", "run_dir": "runs/x"}


def test_sources_without_a_share_take_no_part():
    config = load_section(MixedConfig, mixed(nq=0.5, math=0.0), "mixed")
    assert config.ratios == {"nq": 0.5}


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (mixed(nq=-0.1), "mixed.sources.nq: ratio=-0.1"),
        (mixed(nq=float("nan")), "mixed.sources.nq: ratio=nan"),
        (mixed(nq=0.0, math=0.0), "every ratio is 0"),
        (mixed(), "sources is empty"),
    ],
)
def test_ratios_that_are_no_shares_are_refused_by_name(sources, said):
    with pytest.raises(ConfigError, match=said):
        load_section(MixedConfig, sources, "mixed")


@pytest.mark.parametrize("name", [*NOT_SOURCES, ""])
def test_a_source_is_not_called_as_a_metric_of_the_whole_run(name):
    with pytest.raises(ConfigError, match=f"mixed.sources: no names of sources: '{name}'"):
        load_section(MixedConfig, mixed(**{name: 1.0, "nq": 1.0}), "mixed")


def test_a_source_may_be_called_as_verl_s_own_datasets_are():
    sources = mixed(**{"openai/gsm8k": 1.0, "nq": 1.0})
    assert "openai/gsm8k" in load_section(MixedConfig, sources, "mixed").sources


def test_all_metrics_of_the_whole_run_are_known():
    packages = [Path(str(package.__file__)).parent for package in (agent_loop, samplers.door)]
    code = "".join(path.read_text() for package in packages for path in package.rglob("*.py"))
    assert set(re.findall(r'"mixed/(\w+)[/"]', code)) == set(NOT_SOURCES)


def test_every_mistake_is_named_in_one_go():
    values = TOOLS | {"timeout": 0, "burst": 0, "max_worker": 4}
    with pytest.raises(ConfigError) as caught:
        load_section(ToolConfig, values, "tool_config")
    places = sorted(problem.split(":")[0] for problem in caught.value.problems)
    assert places == ["tool_config.burst", "tool_config.max_worker", "tool_config.timeout"]


@pytest.mark.parametrize("field", TAG_FIELDS)
def test_a_tag_that_is_empty_or_part_of_another_is_refused(field):
    other = next(name for name in TAG_FIELDS if name != field)
    taken = getattr(ToolConfig(**TOOLS), other)
    for wrong in ("", " ", taken, taken[:-1], f"{taken}!"):
        with pytest.raises(ConfigError, match=field):
            load_section(ToolConfig, TOOLS | {field: wrong}, "tool_config")


def test_training_on_tool_output_is_possible_for_an_ablation():
    assert not load_section(ToolConfig, TOOLS | {"state_masking": False}, "t").state_masking


def test_every_key_of_the_schema_is_one_that_a_user_can_set():
    """A key that the composed config lacks is refused as unknown."""
    mixed = compose_config([]).mixed
    assert MixedConfig.model_fields.keys() - mixed.keys() == {"agent_loops"}  # users name its keys
