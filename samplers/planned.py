"""The mixture plan of a run config."""

from collections.abc import Mapping
from fractions import Fraction
from typing import cast

from config.schema import MixedConfig
from samplers.adaptive.controller import MILLION, Policy
from samplers.adaptive.curriculum import ChosenRows
from samplers.mixture_plan import MixturePlan, Ratio


def plan_for(
    mixed: MixedConfig,
    sizes: Mapping[str, int],
    batch_size: int,
    rollout_n: int,
    choices: Mapping[str, ChosenRows],
) -> MixturePlan:
    """The plan that a run follows.

    Args:
        sizes: source -> rows; sources without a ratio above 0 are left out.
        batch_size: prompts per batch.
        rollout_n: trajectories per prompt of sources that name none of their own.
        choices: `samplers.adaptive.profiles.choices_for` of the training files.

    Raises:
        ValueError: the mixture is impossible.
    """
    trajectories = {name: mixed.sources[name].rollout_n or rollout_n for name in mixed.ratios}
    policy, ratios = policy_of(mixed, trajectories, batch_size), mixed.ratios
    if policy is None and mixed.unit == "trajectories":
        ratios = cast(
            dict[str, Ratio],
            {
                name: {
                    step: Fraction(str(ratio)) / trajectories[name]
                    for step, ratio in mixed.sources[name].schedule.items()
                }
                for name in ratios
            },
        )
    chosen = {name: len(choice.rows) for name, choice in choices.items()}
    return MixturePlan(
        sizes={name: rows for name, rows in {**sizes, **chosen}.items() if name in ratios},
        ratios=ratios,
        batch_size=batch_size,
        seed=mixed.seed,
        apportionment=mixed.apportionment,
        policy=policy,
        choices=choices,
    )


def policy_of(
    mixed: MixedConfig, trajectories: Mapping[str, int], batch_size: int
) -> Policy | None:
    """By which decisions are made; None if the ratios hold for the whole run.

    Args:
        trajectories: source -> trajectories of a prompt.
    """
    if mixed.controller == "off" and mixed.unit != "trained_tokens":
        return None
    return Policy(
        rule="fixed" if mixed.controller == "off" else mixed.controller,
        unit=mixed.unit,
        window=mixed.control.window,
        batch_size=batch_size,
        floors=dict.fromkeys(trajectories, round(mixed.control.floor * MILLION)),
        ceilings=dict.fromkeys(trajectories, 900_000),
        max_change=100_000,
        trajectories=dict(trajectories),
        smoothing=0.5,
        temperature=0.5,
        speed=4.0,
        emphasis=0.2,
    )
