"""Settings that a release had and this one has not: a config that sets one is told why."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from config.lookup import at

_CONTROL = "the controller has one value of it; leave it out"
_BOUND = "all sources have the bounds of the controller; set mixed.control.floor for all"
_CACHE = "a cache holds 256 MB, and a result for a day; leave it out"
_PROGRAMS = "the cache decides for all programs; set tool_config.cache.store=none to run each anew"
_TOOLS = "actor_rollout_ref.rollout.multi_turn.tool_config"

REMOVED: dict[str, str] = {
    "mixed.tool_server.search_upstream_kind": (
        "a URL that ends in /search is Serper's, and others are Search-R1's; leave it out"
    ),
    "mixed.tool_server.search_timeout_s": "a request to a search engine has 30 s; leave it out",
    "mixed.tool_server.search_connections": "32 requests to an engine run at once; leave it out",
    "mixed.tool_server.search_workers": "two threads search the corpus; leave it out",
    "mixed.tool_server.session_idle_s": "an interpreter ends after 15 idle minutes; leave it out",
    "mixed.tool_server.queue_length": "20,000 requests of a tool may wait; leave it out",
    "mixed.tool_server.drain_s": "after SIGTERM requests have 10 s to end; leave it out",
    "mixed.tool_server.max_body_mb": "a body has at most 32 MB; leave it out",
    "mixed.tool_server.algebra_workers": (
        "expressions and programs share their places; set mixed.tool_server.sandbox_workers"
    ),
    "mixed.tool_server.algebra_s": "an expression has 5 s; leave it out",
    "mixed.tool_server.algebra_memory_mb": "an expression has 1024 MB; leave it out",
    "algorithm.state_masked_grpo.norm_by_std": (
        "it followed verl's key; set algorithm.norm_adv_by_std_in_grpo"
    ),
    "mixed.control.ceiling": "no source gets more than .9; leave it out",
    "mixed.control.max_change": _CONTROL,
    "mixed.control.smoothing": _CONTROL,
    "mixed.control.temperature": _CONTROL,
    "mixed.control.speed": _CONTROL,
    "mixed.control.emphasis": _CONTROL,
    "mixed.sources.*.floor": _BOUND,
    "mixed.sources.*.ceiling": _BOUND,
    "data.sources.*.floor": _BOUND,
    "data.sources.*.ceiling": _BOUND,
    "mixed.deadlines.turn_s": "a trajectory's limit is for all its turns; leave it out",
    "mixed.drift.every": "one in 16 trajectories is compared; leave it out",
    "mixed.infra_error_window": "faults count over 5 steps; leave it out",
    f"{_TOOLS}.cache.max_mb": _CACHE,
    f"{_TOOLS}.cache.ttl_s": _CACHE,
    f"{_TOOLS}.deterministic_code": _PROGRAMS,
    "data.tool_config.cache.max_mb": _CACHE,
    "data.tool_config.cache.ttl_s": _CACHE,
    "data.tool_config.deterministic_code": _PROGRAMS,
    "reward_options.aggregate": "the score is the mean of the votes; for another one write a "
    "reward of your own, which has the tool client (docs/judges.md)",
    "reward_options.price": "nothing but a metric read it; multiply the metrics "
    "judge_prompt_tokens and judge_completion_tokens by the price",
    "reward_options.score.pattern": "a verdict that the policy wrote could match it; leave it out, "
    "or give score.schema",
}
"""Why each key is gone; and after a semicolon, what to do. A key is a dotted path with `*` for a
name that the user chose; `agent_loops.*.` begins the settings of an agent loop's entry, and
`reward_options.` those of a reward of ours."""


VERIFIERS = (
    "verifiers drives its agent itself, so its tasks are played by an agent of the gateway; leave "
    "`environment` out, and run docs/examples/verifiers_agent.py as the source's agent "
    "(docs/environments.md has the config)"
)
"""Why no environment is `use: verifiers` any more."""

REMAINS: dict[str, Any] = {
    "algorithm.state_masked_grpo.norm_by_std": "${algorithm.norm_adv_by_std_in_grpo}",
    "mixed.control.ceiling": 0.9,
    "mixed.control.max_change": 0.1,
    "mixed.control.smoothing": 0.5,
    "mixed.control.temperature": 0.5,
    "mixed.control.speed": 4.0,
    "mixed.control.emphasis": 0.2,
    "mixed.sources.*.floor": None,
    "mixed.sources.*.ceiling": None,
    "data.sources.*.floor": None,
    "data.sources.*.ceiling": None,
    "mixed.deadlines.turn_s": None,
    f"{_TOOLS}.deterministic_code": True,
    "data.tool_config.deterministic_code": True,
    "reward_options.aggregate": "mean",
    "reward_options.score.pattern": None,
}
"""What every run has now in place of a key, or the key that it follows. A run that was begun with
another value would learn otherwise."""


def why_removed(key: str) -> str | None:
    """The reason why a key is gone; None if no release had it."""
    why = REMOVED.get(_entry_of(key, REMOVED) or "")
    return why and f"this release has no such key: {why}"


def without_removed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a run that an earlier release began, without the keys that are gone since."""
    return _split(config, "")[0]


def other_rules(config: Mapping[str, Any]) -> list[str]:
    """What keeps this release from going on as the run of an earlier one began, a sentence each."""
    rules = list[str]()
    for place, key, value in _split(config, "")[1]:
        if _is_of_verifiers(key, value):
            rules.append(f"{place}.use='verifiers': {VERIFIERS}")
        elif (entry := _entry_of(key, REMAINS)) and value != _remaining(REMAINS[entry], config):
            rules.append(f"{place}={value!r}: {why_removed(key)}")
    return rules


def _is_of_verifiers(key: str, value: Any) -> bool:
    use = value.get("use") if isinstance(value, Mapping) else value
    return use == "verifiers" and fnmatchcase(key, "mixed.sources.*.environment")


def _entry_of(key: str, table: Mapping[str, Any]) -> str | None:
    depth = key.count(".")  # below a name, `*` is no text with dots
    entries = (entry for entry in table if entry.count(".") == depth and fnmatchcase(key, entry))
    return next(entries, None)


def _remaining(value: Any, config: Mapping[str, Any]) -> Any:
    is_followed = isinstance(value, str) and value.startswith("${")
    return at(config, value[2:-1], True) if is_followed else value


def _split(
    config: Mapping[str, Any], place: str, path: str = ""
) -> tuple[dict[str, Any], list[tuple[str, str, Any]]]:
    """What stays, and what is gone: place in the config, key in the table, and value of each."""
    kept, gone = dict[str, Any](), list[tuple[str, str, Any]]()
    for name, value in config.items():
        key, below = (f"{start}.{name}".lstrip(".") for start in (path, place))
        if name == "reward_options" and config.get("reward") == "judge":
            key = name  # of a reward of ours
        if why_removed(key) is not None or _is_of_verifiers(key, value):
            gone.append((below, key, value))
        elif isinstance(value, Mapping):
            kept[name], further = _split(value, below, key)
            gone += further
        else:
            kept[name] = value
    return kept, gone
