"""The limiters of a run, and what has limits of its own: the entries of `tools`, environments, and
judges."""

from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from agent_loop.calls.limiter import Limiter, make_limiter, resolve_backend
from agent_loop.calls.own_limits import OwnLimits, open_own_limiters
from config.schema import TOOL_CONFIG, MixedConfig, ToolConfig, load_section


def settle_limiters(
    config: DictConfig,
) -> tuple[MixedConfig, ToolConfig, Limiter | None, dict[str, Limiter]]:
    """Decide for all processes which limiter keeps the rate, write it into the config, and open the
    limiters of the run and of its tools: their errors are raised before anything else starts."""
    mixed_values: Any = OmegaConf.to_container(config.mixed, resolve=True)
    tool_values: Any = OmegaConf.to_container(OmegaConf.select(config, TOOL_CONFIG), resolve=True)
    mixed = load_section(MixedConfig, mixed_values, "mixed")
    tools = load_section(ToolConfig, tool_values, TOOL_CONFIG)
    settings = resolve_backend(tools, mixed)
    with open_dict(config):
        config.mixed.rate_limit = settings.model_dump()
    mixed = mixed.model_copy(update={"rate_limit": settings})
    own = open_own_limiters(own_limits_of(mixed), tools, mixed)
    limiter = make_limiter(tools, mixed) if tools.enable_global_rate_limit else None
    return mixed, tools, limiter, own


def own_limits_of(mixed: MixedConfig) -> list[OwnLimits]:
    """Those of all sources.

    Raises:
        ConfigError: the options of a judge have a mistake.
    """
    found: list[OwnLimits] = []
    for source in mixed.sources.values():
        found += source.tools or ()
        if source.environment is not None:
            found.append(source.environment)
        if source.reward == "judge":
            from agent_loop.rewards.judge_options import JudgeOptions  # imports jsonschema

            found.append(load_section(JudgeOptions, source.reward_options, "reward_options"))
    return found
