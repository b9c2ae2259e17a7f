"""What `--help` says: a description, examples that are commands, and exit codes."""

import re
import shlex

import pytest

from verl_mixed.cli import _parser, main
from verl_mixed.commands.words import WORDS

EXAMPLES = [line for words in WORDS.values() for line in words.examples.splitlines()]


@pytest.mark.parametrize("command", WORDS)
def test_help_says_what_a_command_does_how_it_is_called_and_its_exit_codes(
    command: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert WORDS[command].description in said
    assert f"examples:\n  {WORDS[command].examples.splitlines()[0]}" in said
    assert f"exit codes: {WORDS[command].exit_codes}" in said


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_a_command(example: str):
    words = shlex.split(example)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):  # of the environment
        words.pop(0)
    program, *words = words
    assert program == "verl-mixed"
    assert callable(_parser(words).parse_args(words).run)
