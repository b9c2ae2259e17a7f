"""The rules of `+data.mixture` in a recipe of verl's. Imports no verl.

```
+data.mixture={openai/gsm8k: 0.5, search: 0.3, code: null}
```

A number is the share of a source, and null means "as large as the data": the sources with null
have what the numbers leave, in proportion to their rows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, cast

from config.lookup import at
from samplers.mixture_plan import MixturePlan

DOORS = ("verl_mixed.recipe", "samplers.recipe")
"""Modules that have the classes. A folder `samplers/` of a user can hide the second one."""

DATASET, SAMPLER = "MixedDataset", "ExactMixture"

BASE = "data.mixture_base"
LIMITS = "trainer.v1.sampler.sampler_kwargs"
MODE, MODES = "trainer.v1.trainer_mode", ("sync", "colocate_async", "separate_async")
BATCH, UPDATE = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
NEAR_ONE = Fraction(1, 10**6)
"""Shares such as 0.3333333 are written with few digits; their sum may miss 1 by this."""

MAX_WAIT_S, MAX_REPLACEMENTS = 3600.0, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`trainer.v1.sampler.sampler_kwargs`: when to end a step that cannot fill its batch."""

    max_wait_s: float = MAX_WAIT_S
    """Seconds to wait for the groups of a batch."""

    max_replacements: int = MAX_REPLACEMENTS
    """Most replaced prompts of a source in one step, per prompt of its quota."""


def asks(config: Mapping[str, Any]) -> bool:
    """Whether a config uses any part of the door."""
    return (
        "mixture" in (at(config, "data") or {})
        or _is_ours(at(config, "data.custom_cls"), DATASET)
        or _is_ours(at(config, "trainer.v1.sampler.custom_sampler"), SAMPLER)
    )


def config_problems(config: Mapping[str, Any], *, shares: bool = True) -> list[str]:
    """What is wrong with the settings of a recipe, one sentence each.

    Args:
        config: the resolved config of verl's trainer.
        shares: look at the shares too. The dataset does, and tells what is wrong with the rows in
            the same error.
    """
    if at(config, "mixed") is not None:
        return [
            "data.mixture in a config with the `mixed:` tree: shares are "
            "mixed.sources.<name>.ratio there; remove data.mixture"
        ]
    problems = _hook_problems(config)
    if shares or at(config, "data.mixture") is None:
        problems += share_problems(at(config, "data.mixture"))
    if at(config, "trainer.use_v1", True) is False:
        problems.append(
            "trainer.use_v1=false: verl's old trainer has no sampler and would ignore the mixture; "
            "set trainer.use_v1=true"
        )
    if at(config, "skip.rollout_tq.enable", False):
        problems.append(
            "skip.rollout_tq.enable=true: verl would replay old batches in place of the mixture; "
            "set it to false"
        )
    if (at(config, "data.train_max_samples") or -1) > 0 and at(config, "data.seed") is None:
        problems.append(
            "data.train_max_samples without data.seed: verl may choose other rows at each start, "
            "so no resume would find its rows; set data.seed"
        )
    problems += [
        f"data.{key} is no key of the mixture: it knows data.mixture and {BASE}"
        for key in cast(dict[str, Any], at(config, "data") or {})
        if key.startswith("mix") and key not in ("mixture", "mixture_base")
    ]
    problems += _update_problems(config)
    try:
        limits_of(at(config, LIMITS) or {})
    except ValueError as error:
        problems.append(str(error))
    return problems


def limits_of(given: Mapping[str, Any]) -> Limits:
    """The limits that a recipe sets.

    Raises:
        ValueError: a name or a value is wrong.
    """
    known = tuple(Limits.__dataclass_fields__)
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"{LIMITS} has {unknown}: it knows {list(known)}")
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{LIMITS}.{name}={value!r}: want a number above 0")
    return Limits(**given)


def shares_of(mixture: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Fraction]:
    """Source -> share. They sum to 1 (up to `NEAR_ONE`) if `row_problems` finds nothing."""
    given = {name: Fraction(str(own)) for name, own in mixture.items() if own is not None}
    open_rows = {name: sizes.get(name, 0) for name in mixture if name not in given}
    left, total = max(Fraction(0), 1 - sum(given.values(), Fraction(0))), sum(open_rows.values())
    for name, rows in open_rows.items():
        given[name] = left * rows / total if total else Fraction(0)
    return {name: given[name] for name in mixture}


def plan_of(
    mixture: Mapping[str, Any], sizes: Mapping[str, int], batch_size: int, seed: int | None
) -> MixturePlan:
    """The plan of a recipe; arguments as of `row_problems`, which finds nothing."""
    shares = shares_of(mixture, sizes)
    rows = {name: sizes.get(name, 0) for name in mixture}
    return MixturePlan(rows, shares, batch_size, seed or 0)  # type: ignore[arg-type]


def row_problems(mixture: Any, sizes: Mapping[str, int], batch_size: int) -> list[str]:
    """What is wrong with the rows for this mixture, one sentence each.

    Args:
        mixture: it may have `share_problems`.
        sizes: source -> rows of the training files.
        batch_size: prompts of a batch.
    """
    if not isinstance(mixture, Mapping):
        return []
    problems = [
        f"data_source={name!r} has {rows} rows and no share: add it to data.mixture (0 leaves it "
        "out), or take its rows out of data.train_files"
        for name, rows in sizes.items()
        if name not in mixture
    ]
    problems += [
        f"data.mixture has {name}={_shown(own)}, and data.train_files has no row with "
        f"data_source={name!r}: they have {sorted(sizes)}"
        for name, own in cast(Mapping[str, Any], mixture).items()
        if not sizes.get(name) and (own is None or (isinstance(own, int | float) and own > 0))
    ]
    if (rows := sum(sizes.values())) < batch_size:
        problems.append(
            f"data.train_files has {rows} rows, fewer than data.train_batch_size={batch_size}: an "
            "epoch would have no step; use a smaller batch or more rows"
        )
    return problems


def update_note(config: Mapping[str, Any]) -> str | None:
    """What to set so that each optimizer update has the quotas too; None if it has them."""
    mode, batch_size, of_update = str(at(config, MODE)), at(config, BATCH), at(config, UPDATE)
    if mode not in ("sync", "colocate_async") or of_update >= batch_size:
        return None  # separate_async trains one sampled batch an update
    return (
        f"ppo_mini_batch_size={of_update} is below train_batch_size={batch_size}: the batch has "
        "its quotas, its updates need not; for quotas in each update set "
        f"{MODE}=mixed_{mode}, and nothing else"
    )


def _update_problems(config: Mapping[str, Any]) -> list[str]:
    """The trainer must be one that we know, and `mixed_*` must keep the quotas of each update."""
    mode, batch_size, of_update = str(at(config, MODE)), at(config, BATCH), at(config, UPDATE)
    problems = [
        f"{key}={value!r}: want a whole number, 1 at least"
        for key, value in ((BATCH, batch_size), (UPDATE, of_update))
        if type(value) is not int or value < 1
    ]
    if mode.removeprefix("mixed_") not in MODES:
        problems.append(
            f"{MODE}={mode}: the mixture works with {', '.join(MODES)}, and with these names after "
            "mixed_"
        )
    syncs = at(config, "trainer.v1.separate_async.parameter_sync_step", 1)
    if not problems and mode.endswith("separate_async") and batch_size != syncs * of_update:
        problems.append(
            f"{BATCH}={batch_size} is not parameter_sync_step={syncs} times {UPDATE}={of_update}, "
            "which separate_async needs"
        )
    if problems or not mode.startswith("mixed_"):
        return problems
    if at(config, "critic.enable") or at(config, "algorithm.adv_estimator") == "gae":
        problems.append(
            f"a critic with {MODE}={mode}: its updates would not have their own sizes; use "
            f"{mode.removeprefix('mixed_')}"
        )
    if batch_size % of_update:
        problems.append(
            f"{BATCH}={batch_size} is no multiple of {UPDATE}={of_update}: {MODE}={mode} deals the "
            "groups to whole updates"
        )
    if at(config, "actor_rollout_ref.actor.shuffle", False):
        problems.append(
            f"actor_rollout_ref.actor.shuffle=true: it mixes the updates, and {MODE}={mode} could "
            "not keep their quotas; set it to false"
        )
    return problems


def _hook_problems(config: Mapping[str, Any]) -> list[str]:
    """Both classes must be there, by a name under which verl loads one module once."""
    problems: list[str] = []
    for key, name, remedy in (
        (
            "data.custom_cls",
            DATASET,
            f"to keep this class, name it as '+{BASE}={{path: ..., name: ...}}'",
        ),
        (
            "trainer.v1.sampler.custom_sampler",
            SAMPLER,
            "no other sampler can choose the groups at the same time",
        ),
    ):
        if _is_ours(at(config, key), name):
            continue
        path = at(config, f"{key}.path")
        words = f"{key}.path={path!r}" if path else f"{key} is not set"
        problems.append(
            f"{words}: data.mixture needs {key}.path=pkg://{DOORS[0]} {key}.name={name}"
            + (f"; {remedy}" if path else "")
        )
    base: Any = at(config, BASE)
    if base is not None and not (at(config, f"{BASE}.path") and at(config, f"{BASE}.name")):
        problems.append(f"{BASE}={base!r}: want {{path: ..., name: ...}} of a dataset class")
    return problems


def _is_ours(section: Any, name: str) -> bool:
    path = str(at(section or {}, "path") or "")
    module = path.removeprefix("pkg://").replace("/", ".")
    return path.startswith("pkg://") and module in DOORS and at(section, "name") == name


def share_problems(mixture: Any) -> list[str]:
    """What is wrong with `data.mixture`, one sentence each."""
    if mixture is None:
        return [
            "data.mixture is not set: the two classes need the shares; add "
            "'+data.mixture={<data_source>: <share>, ...}'"
        ]
    if not isinstance(mixture, Mapping) or not mixture:
        return [f"data.mixture={mixture!r}: want {{<data_source>: <share>, ...}}"]
    shares = cast(Mapping[str, Any], mixture)
    wrong = [
        f"data.mixture has the name {name!r}: want text, as data_source in the rows"
        for name in cast(Mapping[Any, Any], shares)
        if not isinstance(name, str)
    ]
    wrong += [
        f"data.mixture has {name}={own!r}: want a number from 0 to 1, or null for as large as "
        "the data"
        for name, own in shares.items()
        if own is not None
        and (isinstance(own, bool) or not isinstance(own, int | float) or not 0 <= own <= 1)
    ]
    if wrong:
        return wrong
    total = sum((Fraction(str(own)) for own in shares.values() if own is not None), Fraction(0))
    if None in shares.values():
        if total >= 1:
            wrong.append(
                f"the shares of data.mixture sum to {float(total):g}: nothing is left for the "
                "sources with null"
            )
    elif abs(total - 1) > NEAR_ONE:
        wrong.append(f"the shares of data.mixture sum to {float(total):g}: they must sum to 1")
    return wrong


def _shown(share: Any) -> str:
    return "null" if share is None else f"{share:g}" if math.isfinite(share) else str(share)
