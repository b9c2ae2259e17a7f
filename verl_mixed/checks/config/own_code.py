"""Names of the user's own code in agent loops and in keys of verl's, imported before Ray starts.

Rewards, tools, environments, kinds of data and agents behind the gateway are files, which the
checks of their settings import.
"""

import inspect
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from config.lookup import at
from verl_mixed.checks.config.algorithm import has_critic
from verl_mixed.checks.config.tools import agents_of, tried_agents
from verl_mixed.run.sections import agent_loops, loaded, place_of, shipped_loops

_MADE_WITH = (
    *("trainer_config", "server_manager", "tokenizer", "processor", "hf_model_type"),
    *("dataset_cls", "data_config", "tools"),
)
"""What a worker gives to the class of an agent loop, besides the settings of its entry."""


def own_code_problems(
    config: Mapping[str, Any], *, data: bool = True, machine: bool = True
) -> Iterator[str]:
    """Names that cannot be imported here, or that are something else than what is needed.

    Args:
        data: whether the rows may be read, for the agents of sources that name none.
        machine: whether the run is on this machine; another may have more packages.
    """
    loops, _ = agent_loops(config)
    used = {agent for agents in agents_of(config, data=data).values() for agent in agents}
    shipped = {entry["_target_"] for entry in shipped_loops()}  # an import would take seconds
    for agent in sorted(tried_agents(config, data=data) & (loops or {}).keys(), key=str):
        entry = (loops or {})[agent]
        target = entry.get("_target_")
        if isinstance(target, str) and "." in target and target not in shipped:
            found, error = loaded(target)
            problem = _not_imported(target, error) if error else _no_loop(found, entry)
            if problem and (agent in used or not callable(found)):  # else no worker makes it
                yield f"{place_of(config, agent)}: _target_={target!r}: {problem}; correct it"
    rollout, roles = "actor_rollout_ref.rollout", ["actor_rollout_ref"]
    roles += ["critic"] if has_critic(config) else []
    for key in (*(f"{role}.model.external_lib" for role in roles), f"{rollout}.{_BACKEND}"):
        given = at(config, key)
        for name in map(str, filter(None, given if isinstance(given, list) else [given])):
            found, error = loaded(name)
            if error:
                yield f"{key}={name!r}: {_not_imported(name, error)}; correct it"
            elif not isinstance(found, ModuleType):
                yield f"{key}={name!r}: it is of type {type(found).__name__}; name a module"
    if name := at(config, _CALLBACK):
        found, error = loaded(str(name))
        why = "it is no class" if not callable(found) else _not_taken(found, ["config"])
        if error or why:
            problem = _not_imported(str(name), error) if error else why
            yield f"{_CALLBACK}={name!r}: {problem}; name a class like verl's CheckpointCallback"
    for key in ("actor_rollout_ref.actor.optim", "critic.optim")[: len(roles)]:
        place, name = (at(config, f"{key}.{part}") for part in ("optimizer_impl", "optimizer"))
        if not place or (place, name) == ("torch.optim", "AdamW"):
            continue  # another engine, or verl's own choice
        found, error = loaded(f"{place}.{name}")
        package = str(place).partition(".")[0]
        if error and not machine and f"No module named {package!r}" in error:
            continue
        if error or not callable(found):
            why = _not_imported(place, error) if error else f"it is of type {type(found).__name__}"
            yield f"{key}: {place}.{name} is no optimizer: {why}; correct it"


_BACKEND = "checkpoint_engine.custom_backend_module"
_CALLBACK = "trainer.checkpoint_callback_class"


def _not_imported(name: str, error: str) -> str:
    package = name.partition(".")[0]
    why = "it cannot be imported"
    if error == f"ModuleNotFoundError: No module named {package!r}":
        why = f"no module {package!r} on PYTHONPATH or here"
    return f"{why} ({error})"


def _no_loop(found: Any, entry: Mapping[str, Any]) -> str | None:
    """Why a worker could not make or run an agent loop; a function may make one."""
    if not callable(found):
        return f"it is of type {type(found).__name__}, and no class of an agent loop"
    if inspect.isclass(found) and not callable(getattr(found, "run", None)):
        return "the class has no run, as verl's AgentLoopBase has"
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        return f"the class lacks {', '.join(missing)}"
    settings = [str(key) for key in entry if key != "_target_"]
    if any(key.startswith("_") for key in settings):
        return None  # Hydra's own, which change the call
    return _not_taken(found, [*settings, *_MADE_WITH])


def _not_taken(found: Any, names: list[str]) -> str | None:
    try:
        inspect.signature(found).bind(**dict.fromkeys(names))
    except TypeError as error:
        return f"it does not take what it is made with ({error})"
    except ValueError:
        pass  # it has no signature
    return None
