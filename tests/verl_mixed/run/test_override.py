"""Values on the command line that Hydra's grammar cannot read."""

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote
from hydra.errors import HydraException
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from config.schema import TAG_FIELDS, TOOL_CONFIG, ConfigError, ToolConfig, load_section
from verl_mixed.run.compose import compose_config
from verl_mixed.run.override import quoted, readable

TAG = f"{TOOL_CONFIG}.code_start_tag"
SHIPPED = {"a.text": "x", "a.null": None, "a.number": 1, "a.list": [], "data.train_files": "???"}
PARSER = OverridesParser.create()
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
ODD = st.text(st.sampled_from("\\'\"${}[](),:=<> \nab1"), max_size=12)


def value_of(override: str) -> object:
    """What the composed config has."""
    config = OmegaConf.create({"value": None})
    config.value = PARSER.parse_override(override).value()
    return config.value


@given(text=TEXTS | ODD, quote=st.sampled_from(Quote))
@example(text="\\${a}\\", quote=Quote.single)
def test_any_text_comes_back_from_its_quotes(text: str, quote: Quote) -> None:
    assert value_of(f"k={quoted(text, quote)}") == text


@given(text=TEXTS | ODD)
@example(text="<custom_code>")
@example(text="[code]")
@example(text="1")
@example(text="a,b")
def test_a_tag_is_the_text_that_was_typed_unless_hydra_reads_another_text(text: str) -> None:
    try:
        given = PARSER.parse_override(f"{TAG}={text}")
        of_hydra = None if given.is_sweep_override() else given.value()
        is_taken = not given.is_sweep_override() and isinstance(of_hydra, str | None)
    except HydraException:
        is_taken = False
    (found,) = readable([f"{TAG}={text}"], dict)
    if is_taken:  # it is quoted, trimmed, null, or names another key
        assert found == f"{TAG}={text}"
    else:
        assert value_of(found) == text


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("a.text=<a> (b)", "<a> (b)"),
        ("++a.null=it's", "it's"),
        ("a.text=Hello, world", "Hello, world"),
        ("++mixed.sources.x.system_prompt=Say <a>, (b)", "Say <a>, (b)"),
        ("agent_loops.x.system_prompt=<a>", "<a>"),
        ("data.train_files=/data/a(1).parquet", "/data/a(1).parquet"),
    ],
)
def test_a_text_that_hydra_cannot_read_is_quoted_for_it(override: str, value: str) -> None:
    (found,) = readable([override], lambda: SHIPPED)
    assert value_of(found) == value
    assert found.startswith(override.partition("=")[0] + "=")


@pytest.mark.parametrize(
    "override",
    [
        *("a.number=1", "a.text=b", "a.list=[a,b]", "~a.text", "a.text='<b>'", "profile=laptop"),
        *("data.train_files=a.parquet,b.parquet", "<k>=1", "k"),
    ],
)
def test_what_hydra_reads_or_says_better_itself_stays(override: str) -> None:
    assert readable([override], lambda: SHIPPED) == [override]


@pytest.mark.parametrize(
    ("override", "form"),
    [
        ("a.number=<5>", 'a.number="<5>"'),
        ("a.list=[a,<b>]", 'a.list=["a text"]'),
        ("a.null={a: <b>}", 'a.null={name: "a text"}'),
        ("+no.such=<5>", '+no.such="<5>"'),
    ],
)
def test_otherwise_the_message_has_the_quoted_form(override: str, form: str) -> None:
    with pytest.raises(ConfigError) as refused:
        readable([override], lambda: SHIPPED)
    (problem,) = refused.value.problems
    typed = problem.rpartition(", as ")[2]
    assert problem.startswith(f"{override}: Hydra cannot read this value (")
    assert shlex.split(typed) == [form]
    PARSER.parse_override(form)


def test_tags_as_the_guide_types_them_reach_the_composed_config() -> None:
    tags = ["<custom_code>", "</custom_code>", "[s]", "7", "```", "a, b", "<|i|>", "\\it's\\"]
    given = dict(zip(TAG_FIELDS, tags, strict=True))
    overrides = [f"{TOOL_CONFIG}.{name}={tag}" for name, tag in given.items()]
    config = OmegaConf.select(compose_config(overrides), TOOL_CONFIG)
    assert {name: config[name] for name in given} == given


def test_a_tag_that_a_config_file_would_read_as_a_reference_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"code_start_tag='<\$\{a\}>' holds \$\{"):
        load_section(ToolConfig, {"server_url": "http://a", "code_start_tag": "<${a}>"}, "x")
