"""What has limits of its own in a run: the entries of `tools`, environments, and judges."""

from agent_loop.calls.own_limits import OwnLimits
from config.schema import MixedConfig, load_section


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
