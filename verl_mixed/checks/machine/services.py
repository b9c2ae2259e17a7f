"""Servers that a run talks to: tools with their sandbox, judges, and Weights & Biases."""

import json
import netrc
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from config.lookup import at
from config.schema import TOOL_CONFIG, ToolConfig
from tool_server.wire.tokens import token_for
from verl_mixed.checks.finding import Finding, bad, ok, warning
from verl_mixed.checks.machine.machine import existing
from verl_mixed.run.opener import opener
from verl_mixed.run.sections import section_of, sound_sources

HEALTH_S = 5.0
MOST_HEALTH_BYTES = 1 << 20

_START = "start it with `verl-mixed serve-tools`, or unset TOOL_SERVER_URL to have one started"

_JUDGE = "start the judge's server, or correct base_url in reward_options or JUDGE_BASE_URL"

_NO_ISOLATION = "install bubblewrap and allow user namespaces, or use a kernel with Landlock (5.13)"


_DIRECT = opener(use_proxy=False)


def runs_code(config: Mapping[str, Any]) -> bool:
    """Whether a source that takes part has programs of the model run."""
    return any(
        source.takes_part and str(name).startswith("code")
        for source in sound_sources(config).values()
        for name in (source.agent, source.reward)
    )


def tools(config: Mapping[str, Any], *, own_server: bool) -> list[Finding]:
    """The tool servers that are given, or the sandbox of the one that the run would start."""
    needed = runs_code(config)
    if own_server:
        given = at(config, "mixed.tool_server") or {}
        return _sandbox(str(given.get("sandbox", "auto")), needed=needed)
    section, _ = section_of(ToolConfig, at(config, TOOL_CONFIG, {}), TOOL_CONFIG)
    if section is None:
        return []  # the check of config reports it
    return [finding for url in section.server_urls for finding in _server(url, needed)]


def read_health(url: str, environ: Mapping[str, str], *, timeout_s: float) -> bytes:
    """What the `/health` of a tool server answers; sends the token that `environ` has.

    As the tool client does, it follows no redirect and asks no proxy, because these would get the
    token. `url` has no slash at its end. The server may be silent for `timeout_s`; the whole answer
    may take longer.

    Raises:
        urllib.error.HTTPError, OSError, ValueError, http.client.HTTPException: no good answer.
    """
    token = token_for(url, environ)
    request = urllib.request.Request(
        f"{url}/health", headers={"Authorization": f"Bearer {token}"} if token else {}
    )
    with _DIRECT.open(request, timeout=timeout_s) as answer:
        health = answer.read(MOST_HEALTH_BYTES + 1)
    if len(health) > MOST_HEALTH_BYTES:
        raise ValueError(f"an answer of more than {MOST_HEALTH_BYTES >> 20} MB")
    return health


def ask_health(url: str) -> bytes | Finding:
    """What the `/health` of a tool server answers; a bad finding if it does not answer."""
    url = url.rstrip("/")
    try:
        return read_health(url, os.environ, timeout_s=HEALTH_S)
    except urllib.error.HTTPError as error:
        draining = " (it is about to end)" if error.code == 503 else ""
        words = f"{url}/health (TOOL_SERVER_URL) answers {error.code}{draining}"
    except (OSError, ValueError, HTTPException) as error:
        words = f"no answer from {url}/health (TOOL_SERVER_URL): {error}"
    return bad("tools", words, _START)


def ask_servers(config: Mapping[str, Any]) -> dict[str, bytes | Finding]:
    """URL -> answer of each tool server that the config names; empty if its section is wrong."""
    section, _ = section_of(ToolConfig, at(config, TOOL_CONFIG, {}), TOOL_CONFIG)
    return {url: ask_health(url) for url in (section.server_urls if section else ())}


def judges(config: Mapping[str, Any]) -> list[Finding]:
    """Whether the judges of sources with the reward `judge` answer, and know their models.

    A source whose options are wrong is left out, because the check of config reports it.
    """
    options = (
        source.reward_options
        for source in sound_sources(config).values()
        if source.takes_part and source.reward == "judge"
    )
    models: dict[str, set[str]] = {}
    for given in options:
        from agent_loop.rewards.judge import judge_reward  # rarely needed

        with suppress(ValueError):
            judge = judge_reward("judge", given).options
            models.setdefault(judge.url, set()).add(judge.model)
    return [_judge(url, names) for url, names in models.items()]


def _judge(url: str, models: set[str]) -> Finding:
    from agent_loop.rewards.judge_options import KEY_VARIABLE, judge_key

    key = judge_key()
    request = urllib.request.Request(
        f"{url}/models", headers={"Authorization": f"Bearer {key}"} if key else {}
    )
    try:
        with _DIRECT.open(request, timeout=HEALTH_S) as answer:
            said = answer.read(MOST_HEALTH_BYTES)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            words = f"the judge at {url} answers {error.code}"
            return bad("judge", words, f"set {KEY_VARIABLE} to the key of this server")
        if error.code in (404, 405):  # a server without this list
            return ok("judge", f"{url} answers")
        return bad("judge", f"{url}/models answers {error.code}", _JUDGE)
    except (OSError, ValueError, HTTPException) as error:
        return bad("judge", f"no answer from {url}/models: {error}", _JUDGE)
    try:
        known = {model["id"] for model in json.loads(said)["data"]}
    except (ValueError, RecursionError, LookupError, TypeError):
        known = models  # not a list of models
    if unknown := sorted(models - known):
        words = f"{url} does not list model={', '.join(unknown)}"
        return warning("judge", words, f"it lists {', '.join(sorted(known)[:8])}; correct model")
    return ok("judge", f"{url} answers and has {', '.join(sorted(models))}")


def _server(url: str, needed: bool) -> list[Finding]:
    answer = ask_health(url)
    if isinstance(answer, Finding):
        return [answer]
    try:
        health = json.loads(answer)
    except ValueError as error:
        return [bad("tools", f"no answer from {url}/health (TOOL_SERVER_URL): {error}", _START)]
    if not isinstance(health, Mapping) or "tools" not in health:
        remedy = "set TOOL_SERVER_TOKEN to the server's token"
        return [warning("tools", f"{url} answers, and says no more without its token", remedy)]
    level = health.get("sandbox")
    words = f"{url} answers: sandbox {level}, {health.get('passages', 0)} passages"
    if level is None and needed:
        words = f"{url} runs no programs: {health.get('sandbox_why')}"
        return [bad("tools", words, _NO_ISOLATION)]
    return [ok("tools", words)]


def _sandbox(kind: str, *, needed: bool) -> list[Finding]:
    """The sandbox that a tool server on this machine would choose, proven by a program."""
    from tool_server.sandbox import SandboxUnavailable, choose_sandbox

    try:
        chosen = choose_sandbox(kind)  # pyright: ignore[reportArgumentType]: it names a wrong one
    except (SandboxUnavailable, ValueError) as error:
        judge = bad if needed else warning
        return [judge("sandbox", str(error), _NO_ISOLATION)]
    chosen.close()
    words = f"{chosen.name} ({chosen.why}); runs {', '.join(chosen.languages)}"
    return [ok("sandbox", words)]


def wandb(config: Mapping[str, Any]) -> list[Finding]:
    """Whether curves go to Weights & Biases, or stay in a folder."""
    loggers = at(config, "trainer.logger") or []
    if "wandb" not in (loggers if isinstance(loggers, list) else [loggers]):
        return [ok("wandb", "not used (trainer.logger)")]
    given = os.environ.get("WANDB_DIR") or at(config, "mixed.run_dir") or "."
    folder = existing(Path(str(given)))
    if not os.access(folder, os.W_OK):
        return [bad("wandb", f"WANDB_DIR={given}: cannot write to {folder}", "name another")]
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"):
        with suppress(ImportError):  # the check of packages reports it
            return [_login(str(given))]
    words = f"no WANDB_API_KEY: offline, below {given}; `wandb sync` sends it later"
    if _in_netrc():
        remedy = "export WANDB_API_KEY: the key of `wandb login` is not read"
        return [warning("wandb", words, remedy)]
    return [ok("wandb", words)]


def _login(folder: str) -> Finding:
    """Whether `wandb.init` would log in, or need not; decided by wandb's own functions.

    wandb adapter: 0.31, `_WandbInit.maybe_login`. Nothing is sent, so a key of the right form may
    still be refused by the server.
    """
    from wandb import Settings
    from wandb.errors import Error
    from wandb.sdk.lib.wbauth import authenticate_session

    home = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    given = {name: value for name, value in os.environ.items() if value}
    correct = "correct it, or set WANDB_MODE=offline"
    try:
        settings = Settings(silent=True, settings_system=str(home / "settings"))
        settings.update_from_system_settings()
        settings.update_from_env_vars(given)
        if settings.mode in ("offline", "disabled", "dryrun"):
            return ok("wandb", f"WANDB_MODE={settings.mode}, below {folder}")
        host = settings.base_url
        login = authenticate_session(host=host, source="", prompt=False, update_session=False)
    except ValidationError as error:
        names = [f"WANDB_{each['loc'][0]!s}".upper() for each in error.errors()]
        words = ", ".join(f"{name}={given.get(name)!r}" for name in names)
        return bad("wandb", f"{words}: {error.errors()[0]['msg']}", correct)
    except (Error, ValueError) as error:
        place = "WANDB_API_KEY" if "WANDB_API_KEY" in given else "the key of `wandb login`"
        why = str(error).removeprefix("WANDB_API_KEY invalid: ").rstrip(".")
        return bad("wandb", f"{place}: {why}", correct)
    if login is None:
        words = f"WANDB_MODE={settings.mode}: there is no key for {host}"
        return bad("wandb", words, "export WANDB_API_KEY, or set WANDB_MODE=offline")
    return ok("wandb", f"with a key, below {folder}")


def _in_netrc() -> bool:
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False
