"""What `--help` prints: a description, examples that are commands, and exit codes."""

import re
import shlex
from pathlib import Path

import pytest

from tool_server.settings import ServerSettings
from verl_mixed.cli import COMMANDS, command_module, main, parser_for
from verl_mixed.commands import prepare

HELPS = {
    **{name: command_module(name).HELP for name in COMMANDS},
    "prepare demo": prepare.DEMO,
    "prepare smollm": prepare.SMOLLM,
    "prepare corpus": prepare.CORPUS,
}
EXAMPLES = [
    line
    for name, help in HELPS.items()
    if name != "prepare"  # its examples read files that are not there
    for line in help.examples.splitlines()
]


@pytest.mark.parametrize("command", HELPS)
def test_help_says_what_a_command_does_how_it_is_called_and_its_exit_codes(
    command: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    screen = capsys.readouterr().out
    assert HELPS[command].description in screen
    assert f"examples:\n  {HELPS[command].examples.splitlines()[0]}" in screen
    assert f"exit codes: {HELPS[command].exit_codes}" in screen


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_a_command(example: str):
    words = shlex.split(example)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):  # of the environment
        words.pop(0)
    program, *words = words
    assert program == "verl-mixed"
    assert callable(parser_for(words).parse_args(words).run)


def test_the_options_of_serve_tools_are_the_settings_of_the_server():
    words = "serve-tools --corpus c --sandbox-packages numpy sympy --max-sessions 2"
    arguments = vars(parser_for(words.split()).parse_args(words.split()))
    set_here = {name: arguments[name] for name in ServerSettings.model_fields if name in arguments}
    settings = ServerSettings.model_validate(set_here)

    assert settings.model_dump(exclude_unset=True) == {
        "corpus_path": Path("c"),
        "sandbox_packages": ("numpy", "sympy"),
        "max_sessions": 2,
    }
    assert all(field.description for field in ServerSettings.model_fields.values())
