"""`verl-mixed serve-tools`: run the tool server. Its options are the fields of `ServerSettings`."""

import argparse
import json
import os
import sys
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge
from pydantic.fields import FieldInfo

from tool_server.settings import ServerSettings
from tool_server.wire.tokens import TOKEN_VARIABLE, user_token, user_token_file
from verl_mixed.commands.arguments import Help, add_option, at_least_one
from verl_mixed.exit_codes import GOOD, NOT_GOOD, USAGE
from verl_mixed.run.text import print_error

HELP = Help(
    """\
Serves the sandbox (/run_code, /submit), search (/retrieve, /search) and exact maths (/calculate)
over HTTP, in the protocols of SandboxFusion, Search-R1 and Serper. /health and /metrics report its
state. A run starts a tool server of its own unless TOOL_SERVER_URL names another.

Model-written code runs in isolation; if this machine offers none, no code runs. `verl-mixed doctor`
shows the isolation. After SIGTERM the server finishes the requests that it has begun.""",
    """\
verl-mixed serve-tools --corpus data/corpus.jsonl --sandbox-packages numpy sympy
verl-mixed serve-tools --host 0.0.0.0 --token-file token --sandbox-workers 32
verl-mixed serve-tools --search-upstream http://10.0.0.4:8000/retrieve""",
    "0 it was stopped, 1 it cannot listen, 2 usage or config error",
)

_NOT_OPTIONS = ("token",)
"""Fields without an option: a token on the command line would be visible to all users in `ps`."""

_OPTIONS = {
    "corpus_path": "corpus",
    "limiter_path": "limiter",
}
"""Field -> its option, where the option is not the field's name."""

_METAVARS = {"host": "ADDRESS", "search_upstream": "URL", "limiter_path": "FILE"}
"""Field -> its value in the help text, where the field's type and unit do not say it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ready_file = "file to which the server writes its url and pid once it listens"
    add_option(parser, "--ready-file", "FILE", ready_file, Path)
    add_option(
        parser,
        "--token-file",
        "FILE",
        "file with the token that callers must send (default: $TOOL_SERVER_TOKEN if it is set, "
        "else a token of yours in ~/.config/verl-mixed, which your runs on this machine find)",
        Path,
    )
    parser.add_argument(
        "--no-token",
        action="store_true",
        help="serve everybody who reaches the address, as SandboxFusion does",
    )
    settings = "settings by their names in tool_server/settings.py"
    add_option(parser, "--settings", "JSON", settings, _mapping)
    for name, field in ServerSettings.model_fields.items():
        if name not in _NOT_OPTIONS:
            option = _OPTIONS.get(name, name.replace("_", "-"))
            parser.add_argument(
                f"--{option}", dest=name, default=argparse.SUPPRESS, **_argument_of(name, field)
            )


def _mapping(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f'{text[:80]!r}: want an object, {{"name": value}}')
    return given


def _argument_of(name: str, field: FieldInfo) -> dict[str, Any]:
    """Type, metavar and help of a field's option.

    A field that is not given keeps its default in `ServerSettings`, which checks all values.
    """
    kinds = get_args(field.annotation) or (field.annotation,)
    kind = next(kind for kind in kinds if kind is not NoneType)
    default = "" if field.default in (None, "auto") else f" (default {_shown(field.default)})"
    text = {"help": f"{field.description}{default}".replace("%", "%%")}
    if get_origin(field.annotation) is Literal:
        return text | {"choices": get_args(field.annotation)}
    if get_origin(field.annotation) is tuple:
        return text | {"nargs": "+", "metavar": "NAME"}
    if kind is int and Ge(1) in field.metadata:
        kind = at_least_one
    metavar = "PATH" if kind is Path else "N"
    return text | {"type": kind, "metavar": _METAVARS.get(name, metavar)}


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return " ".join(default) or "none"
    return str(default)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    from tool_server.app import serve
    from tool_server.sandbox import PackageUnusable

    given = {
        name: value
        for name, value in vars(arguments).items()
        if name in ServerSettings.model_fields
    }
    token = None if arguments.no_token else _token(arguments.token_file)
    settings = ServerSettings.model_validate((arguments.settings or {}) | given | {"token": token})
    settings = _with_engine(settings)
    try:
        serve(settings, ready_file=arguments.ready_file)
    except PackageUnusable as error:
        print_error(str(error))
        return USAGE
    except OSError as error:
        print_error(f"cannot serve on {settings.host}:{settings.port}: {error}")
        return NOT_GOOD
    return GOOD


def _with_engine(settings: ServerSettings) -> ServerSettings:
    """The settings, with Serper as search engine if they name none and its key is set."""
    from tool_server.search.upstream import KEY_VARIABLE, SERPER_URL, serper_key

    if settings.corpus_path or settings.search_upstream or serper_key(os.environ) is None:
        return settings
    why = f"{KEY_VARIABLE} is set, and there is no --corpus and no --search-upstream"
    print(f"search by {SERPER_URL}: {why}", file=sys.stderr, flush=True)
    return settings.model_copy(update={"search_upstream": SERPER_URL})


def _token(token_file: Path | None) -> str:
    """The tool server's token: from a file, the environment, or of this user."""
    if token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or _users_token()
    try:
        return token_file.read_text().strip()
    except OSError as error:
        raise ValueError(f"cannot read --token-file {token_file}: {error.strerror}") from error


def _users_token() -> str:
    path = user_token_file(os.environ)
    try:
        token = user_token(os.environ)
    except OSError as error:
        raise ValueError(
            f"cannot make a token in {path}: {error.strerror}; set {TOKEN_VARIABLE}, or serve "
            "everybody with --no-token"
        ) from error
    print(
        f'the token is in {path}: curl -H "Authorization: Bearer $(cat {path})" ...',
        file=sys.stderr,
        flush=True,
    )
    return token
