"""Settings of sources that contradict one another, or that verl's engines could not keep."""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from agent_loop.calls.limiter import rate_of
from agent_loop.rewards.registry import reward_for
from agent_loop.rewards.terms import free_length
from config.lookup import at
from config.schema import TOOL_CONFIG, MixedConfig, SourceConfig, ToolConfig, default_reward
from samplers.adaptive.controller import MILLION, Policy
from samplers.adaptive.profiles import draws_by_profile
from samplers.apportionment import exact_shares
from samplers.mixture_plan import MAX_STEP
from samplers.planned import policy_of
from samplers.shares import steps_without_ratio
from verl_mixed.checks.config.algorithm import is_count
from verl_mixed.checks.finding import Finding, warning
from verl_mixed.run.sections import named_sources, section_of, sound_sources, where_agents_are

_ROLLOUT = "actor_rollout_ref.rollout"
_FUSED = "actor_rollout_ref.model.use_fused_kernels"


def source_problems(config: Mapping[str, Any], agents: set[str] | None) -> list[str]:
    """Every fault in the settings of sources; `agents` is None if their file cannot be read."""
    return [
        *_limit_problems(config),
        *_choice_problems(config, agents),
        *_schedule_problems(config),
        *_controller_problems(config),
        *_engine_problems(config),
        *_staleness_problems(config),
    ]


def _limit_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Shares of unknown sources, and limits that cannot be kept together."""
    shares, sources = at(config, "mixed.rate_limit.shares"), named_sources(config)
    unknown = {*shares} - {"", *sources} if isinstance(shares, Mapping) else set()
    for name in sorted(unknown, key=str):
        known = sorted(sources, key=str)
        yield f"mixed.rate_limit.shares.{name}: no such source; name one of {known}"
    mixed, _ = section_of(MixedConfig, at(config, "mixed", {}), "mixed")
    tools, _ = section_of(ToolConfig, at(config, TOOL_CONFIG, {}), TOOL_CONFIG)
    if mixed is None or tools is None:
        return
    try:
        rate_of(tools, mixed)
    except ValueError as error:
        yield f"{TOOL_CONFIG} and mixed.rate_limit: {error}"


def _choice_problems(config: Mapping[str, Any], agents: set[str] | None) -> Iterator[str]:
    """Agents and rewards that sources name and that do not exist."""
    for name, source in named_sources(config).items():
        given = source if isinstance(source, Mapping) else {}
        agent, kind = given.get("agent"), given.get("kind")
        reward = given.get("reward") or default_reward(
            name, kind if isinstance(kind, str) else None
        )
        options = given.get("reward_options") or {}
        if agent is not None and agents is not None and agent not in agents:
            yield (
                f"mixed.sources.{name}.agent={agent!r}: no such agent, there are "
                f"{', '.join(sorted(agents))}; {where_agents_are(config)}"
            )
        if not isinstance(reward, str) or not isinstance(options, Mapping):
            continue  # the check of section reports it
        try:
            reward_for(reward, options)
        except ValueError as error:
            for line in str(error).splitlines():
                place = "" if line.startswith("reward_options") else "reward: "
                yield f"mixed.sources.{name}.{place}{line}"


def _staleness_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Bounds of staleness that no trainer would keep."""
    is_sync = at(config, "trainer.v1.trainer_mode") == "mixed_sync"
    key = "trainer.v1.sampler.max_off_policy_threshold"
    common = at(config, key)
    for name, source in sound_sources(config).items():
        if (bound := source.max_staleness) is None:
            continue
        if is_sync:
            yield (
                f"mixed.sources.{name}.max_staleness={bound}: mixed_sync trains each prompt in its "
                "own step; set it to null"
            )
        elif isinstance(common, int) and bound > common:
            yield (
                f"mixed.sources.{name}.max_staleness={bound} is above {key}={common}, which holds "
                "for all sources; lower it, or raise that"
            )


def _schedule_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Schedules that leave no source with a ratio at some step, or that cannot be followed."""
    sources = sound_sources(config)
    schedules = {name: source.schedule for name, source in sources.items()}
    moving = [name for name, schedule in schedules.items() if len(schedule) > 1]
    if moving and at(config, "mixed.apportionment") == "fixed":
        yield (
            f"mixed.apportionment='fixed' with a schedule for source={', '.join(moving)}: every "
            "batch would hold the same counts; set it to carry, or give one ratio each"
        )
    for name, schedule in schedules.items():
        if max(schedule) > MAX_STEP:
            yield (
                f"mixed.sources.{name}.ratio has an entry at step={max(schedule)}: steps go up to "
                f"{MAX_STEP}; leave the entry out or give it an earlier step"
            )
    takes_part = [source.takes_part for source in sources.values()]
    if len(sources) < len(named_sources(config)) or not any(takes_part):
        return  # the check of section reports it
    for step in steps_without_ratio(schedules):
        yield (
            f"every ratio is 0 after {step} steps ({', '.join(schedules)}): a batch needs a "
            "source; give at least one a ratio above 0 there (mixed.sources.<name>.ratio)"
        )


def _controller_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Bounds of decided shares that cannot be kept, and settings that contradict decisions."""
    mixed, _ = section_of(MixedConfig, at(config, "mixed", {}), "mixed")
    batch_size = at(config, "data.train_batch_size")
    if mixed is None or not is_count(batch_size):
        return  # the checks of section and of numbers report it
    if mixed.on_change == "continue":
        for name, source in mixed.sources.items():
            if draws_by_profile(source):
                yield (
                    f"mixed.on_change=continue with mixed.sources.{name}.difficulty or curriculum: "
                    "the order of its rows holds for one mixture; start a new run for another one"
                )
    common_n = at(config, f"{_ROLLOUT}.n", 1)
    if not is_count(common_n):
        return
    trajectories = {name: mixed.sources[name].rollout_n or common_n for name in mixed.ratios}
    policy = policy_of(mixed, trajectories, batch_size)
    if policy is None:
        return
    who = (
        f"mixed.unit={mixed.unit}" if policy.rule == "fixed" else f"mixed.controller={policy.rule}"
    )
    if mixed.apportionment == "fixed":
        yield (
            f"mixed.apportionment=fixed with {who}: the shares change from window to window; set "
            "it to carry"
        )
    if mixed.on_change == "continue":
        yield (
            f"mixed.on_change=continue with {who}: decisions hold for one mixture; start a new run "
            "for another one"
        )
    prompts = policy.window * policy.batch_size
    if prompts < 2 * len(mixed.ratios):
        yield (
            f"mixed.control.window={policy.window} with {who}: a window has {prompts} prompts, and "
            f"{len(mixed.ratios)} sources need {2 * len(mixed.ratios)}, so that none is left out; "
            "raise it"
        )
    if policy.rule == "fixed":
        return
    if len(mixed.ratios) < 2:
        yield f"{who}: with one source there is nothing to decide; set mixed.controller=off"
        return
    for name in mixed.ratios:
        if len(mixed.sources[name].schedule) > 1:
            yield (
                f"mixed.sources.{name}.ratio is a schedule, and {who} decides the shares; give one "
                "ratio, that of the start, or set mixed.controller=off"
            )
            return
    if (total := sum(policy.floors.values())) > MILLION:
        yield (
            f"the floors of {', '.join(policy.floors)} sum to {total / MILLION:g}, so no shares "
            "keep them (mixed.control.floor)"
        )
    starts = exact_shares(
        {name: own.schedule[0] for name, own in mixed.sources.items() if own.takes_part}
    )
    for name, start in starts.items():
        low, high = (Fraction(own[name], MILLION) for own in (policy.floors, policy.ceilings))
        if not low <= start <= high:
            yield (
                f"mixed.sources.{name} starts with a share of {float(start):.3g}, and its floor is "
                f"{float(low):g}, its ceiling {float(high):g}; change its ratio or "
                "mixed.control.floor"
            )
        least = prompts * _share_of_prompts(policy, name, low)
        if least < 1:
            yield (
                f"mixed.sources.{name}: its floor of {float(low):g} is {float(least):.2g} prompts "
                f"of a window of {policy.window} steps with {batch_size} prompts; raise "
                "mixed.control.floor or mixed.control.window until it is 1"
            )


def controller_warnings(config: Mapping[str, Any]) -> Iterator[Finding]:
    """A run that ends before it decides anything."""
    mixed, _ = section_of(MixedConfig, at(config, "mixed", {}), "mixed")
    steps = at(config, "trainer.total_training_steps")
    if mixed is None or mixed.controller == "off" or not is_count(steps):
        return
    if steps <= mixed.control.window:
        yield warning(
            "controller",
            f"mixed.controller={mixed.controller} decides after each {mixed.control.window} steps, "
            f"and the run has {steps}: its shares stay the ratios",
            "lower mixed.control.window",
        )


def _share_of_prompts(policy: Policy, name: str, share: Fraction) -> Fraction:
    """The smallest share of prompts that a source with a share of trajectories may have."""
    if policy.unit != "trajectories":
        return share
    own, least = policy.trajectories[name], min(policy.trajectories.values())
    return share / own / (share / own + (1 - share) / least)


def _engine_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Settings of sources that verl's engines could not keep."""
    longest = at(config, "data.max_response_length")
    common = at(config, f"{_ROLLOUT}.temperature")
    fused = at(config, _FUSED)
    for name, source in sound_sources(config).items():
        length, temperature = source.max_response_length, source.temperature
        if length is not None and isinstance(longest, int) and length > longest:
            yield (
                f"mixed.sources.{name}.max_response_length={length}: every response is padded to "
                f"data.max_response_length={longest}, so no source may have more; lower it, or "
                "raise that"
            )
        if isinstance(longest, int):
            yield from _length_term_problems(name, source, longest)
        if fused and temperature is not None and temperature != common:
            yield (
                f"mixed.sources.{name}.temperature={temperature} with {_FUSED}=true: verl's fused "
                f"kernels take one temperature for all rows ({_ROLLOUT}.temperature={common}); set "
                f"{_FUSED}=false, or leave out the source's own"
            )


def _length_term_problems(name: str, source: SourceConfig, longest: int) -> Iterator[str]:
    """A length term that no response is long enough to reach."""
    term, room = source.reward_terms.length, source.max_response_length or longest
    if term is not None and (free := free_length(term, room)) >= room:
        yield (
            f"mixed.sources.{name}.reward_terms.length: its first {free} tokens are free, and its "
            f"responses have at most {room}: it would never count; lower free or limit"
        )
