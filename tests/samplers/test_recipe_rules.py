"""The rules of `+data.mixture` in a recipe of verl's."""

import copy
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from config.lookup import at
from samplers.faults import RecipeError
from samplers.recipe_rules import (
    NEAR_ONE,
    Limits,
    asks,
    config_problems,
    limits_of,
    plan_of,
    row_problems,
    shares_of,
    update_note,
)

RECIPE: dict[str, Any] = {
    "data": {
        "custom_cls": {"path": "pkg://verl_mixed.recipe", "name": "MixedDataset"},
        "mixture": {"math": 0.5, "search": 0.3, "code": None},
        "train_batch_size": 8,
    },
    "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 8}},
    "trainer": {
        "use_v1": True,
        "v1": {
            "trainer_mode": "sync",
            "sampler": {
                "custom_sampler": {"path": "pkg://samplers.recipe", "name": "ExactMixture"},
                "sampler_kwargs": {},
            },
        },
    },
}


def recipe(**changes: Any) -> dict[str, Any]:
    """The recipe with other values; a key's dots are written as two underscores."""
    config = OmegaConf.create(copy.deepcopy(RECIPE))
    for key, value in changes.items():
        path = key.replace("__", ".")
        if value is ...:
            *_, last = path.split(".")
            del OmegaConf.select(config, path.removesuffix(f".{last}"))[last]
        else:
            OmegaConf.update(config, path, value, merge=False)
    plain: Any = OmegaConf.to_container(config)
    return plain


def test_a_sound_recipe_has_no_problem_and_asks_for_the_mixture() -> None:
    assert config_problems(RECIPE) == []
    assert asks(RECIPE)
    assert not asks({"data": {"train_files": "x"}, "trainer": {}})


@pytest.mark.parametrize("left", ["data__mixture", "data__custom_cls"])
def test_a_part_of_the_door_asks_for_it(left: str) -> None:
    assert asks(recipe(**{left: ...}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mixed": {"seed": 1}}, "shares are mixed.sources.<name>.ratio there"),
        ({"data__mixture": ...}, "data.mixture is not set"),
        ({"data__mixture": 0.5}, "data.mixture=0.5: want {<data_source>: <share>, ...}"),
        ({"data__mixture": {}}, "data.mixture={}: want"),
        ({"data__mixture": {"a": -0.1}}, "data.mixture has a=-0.1: want a number from 0 to 1"),
        ({"data__mixture": {"a": "half"}}, "data.mixture has a='half'"),
        ({"data__mixture": {"a": True}}, "data.mixture has a=True"),
        ({"data__mixture": {"a": float("nan")}}, "data.mixture has a=nan"),
        ({"data__mixture": {"a": 0.5, "b": 0.6}}, "sum to 1.1: they must sum to 1"),
        ({"data__mixture": {"a": 0.5, "b": 0.5, "c": None}}, "sum to 1: nothing is left"),
        ({"data__custom_cls": ...}, "data.custom_cls is not set: data.mixture needs"),
        (
            {"data__custom_cls": {"path": "mine.py", "name": "Mine"}},
            "data.custom_cls.path='mine.py': data.mixture needs "
            "data.custom_cls.path=pkg://verl_mixed.recipe data.custom_cls.name=MixedDataset; to "
            "keep this class, name it as '+data.mixture_base={path: ..., name: ...}'",
        ),
        (
            {"trainer__v1__sampler__custom_sampler": {"path": "mine.py", "name": "Mine"}},
            "no other sampler can choose the groups at the same time",
        ),
        ({"data__mixture_base": "mine.py"}, "data.mixture_base='mine.py': want {path: ..., name"),
        ({"trainer__use_v1": False}, "trainer.use_v1=false"),
        ({"skip": {"rollout_tq": {"enable": True}}}, "skip.rollout_tq.enable=true"),
        ({"trainer__v1__trainer_mode": "mine"}, "trainer.v1.trainer_mode=mine: the mixture works"),
        ({"data__train_batch_size": "8"}, "data.train_batch_size='8': want a whole number"),
        (
            {
                "trainer__v1__trainer_mode": "mixed_sync",
                "actor_rollout_ref__actor__ppo_mini_batch_size": 3,
            },
            "data.train_batch_size=8 is no multiple of",
        ),
        (
            {
                "trainer__v1__trainer_mode": "mixed_sync",
                "actor_rollout_ref__actor__shuffle": True,
            },
            "actor_rollout_ref.actor.shuffle=true: it mixes the updates",
        ),
        (
            {
                "trainer__v1__trainer_mode": "separate_async",
                "actor_rollout_ref__actor__ppo_mini_batch_size": 2,
            },
            "is not parameter_sync_step=1 times",
        ),
        (
            {"trainer__v1__trainer_mode": "mixed_sync", "algorithm": {"adv_estimator": "gae"}},
            "a critic with trainer.v1.trainer_mode=mixed_sync",
        ),
        ({"data__train_max_samples": 5}, "data.train_max_samples without data.seed"),
        ({"data__mixtures": {"a": 1}}, "data.mixtures is no key of the mixture"),
        ({"data__mixture": {1: 1.0}}, "data.mixture has the name 1: want text"),
        ({"trainer__v1__sampler__sampler_kwargs": {"wait": 1}}, "has ['wait']: it knows"),
        (
            {"trainer__v1__sampler__sampler_kwargs": {"max_wait_s": 0}},
            "sampler_kwargs.max_wait_s=0: want a number above 0",
        ),
    ],
)
def test_each_problem_is_one_sentence(changes: dict[str, Any], words: str) -> None:
    [problem] = config_problems(recipe(**changes))
    assert words in problem


@pytest.mark.parametrize("path", ["pkg://verl_mixed/recipe", "pkg://samplers.recipe"])
def test_both_modules_are_taken_in_both_spellings(path: str) -> None:
    assert config_problems(recipe(data__custom_cls__path=path)) == []


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_all_of_verls_trainers_and_those_with_exact_updates_are_taken(mode: str) -> None:
    for name in (mode, f"mixed_{mode}"):
        assert config_problems(recipe(trainer__v1__trainer_mode=name)) == []


def test_an_error_lists_all_problems() -> None:
    found = config_problems(recipe(trainer__use_v1=False, data__mixture={"a": 2}))
    assert len(found) == 2
    assert str(RecipeError(found)).count("\n- ") == 2


def test_limits_have_defaults() -> None:
    assert limits_of({}) == Limits()
    assert limits_of({"max_wait_s": 5}) == Limits(max_wait_s=5)


def test_rows_and_shares_must_name_the_same_sources() -> None:
    sizes = {"math": 10, "code": 4, "web": 1}
    unshared, no_rows, null_without, too_few = row_problems(
        {"math": 0.5, "code": 0.0, "search": 0.5, "qa": None, "old": 0.0}, sizes, 16
    )
    assert unshared.startswith("data_source='web' has 1 rows and no share: add it to data.mixture")
    assert no_rows.startswith("data.mixture has search=0.5, and data.train_files has no row with")
    assert null_without.startswith("data.mixture has qa=null")
    assert "15 rows, fewer than data.train_batch_size=16" in too_few
    assert row_problems({"math": 1.0, "code": 0.0, "web": None}, sizes, 15) == []


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=6),
    st.lists(st.integers(0, 1000), min_size=0, max_size=5),
    st.integers(0, 1000),
)
def test_shares_sum_to_1_and_null_gets_the_rest_by_rows(
    open_rows: list[int], weights: list[int], for_open: int
) -> None:
    total = sum(weights) + for_open + 1
    mixture: dict[str, float | None] = {f"s{k}": w / total for k, w in enumerate(weights)}
    mixture |= {f"open{k}": None for k in range(len(open_rows))}
    sizes = {f"open{k}": rows for k, rows in enumerate(open_rows)}

    shares = shares_of(mixture, sizes)

    assert list(shares) == list(mixture)
    assert sum(shares.values()) == 1
    numbers = [Fraction(str(share)) for share in mixture.values() if share is not None]
    rest = 1 - sum(numbers, Fraction(0))
    for name, rows in sizes.items():
        assert shares[name] == rest * rows / sum(open_rows)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=8))
def test_shares_written_with_seven_digits_pass(weights: list[int]) -> None:
    mixture = {f"s{k}": round(w / sum(weights), 7) for k, w in enumerate(weights)}
    assert config_problems(recipe(data__mixture=mixture)) == []
    assert abs(sum(shares_of(mixture, {}).values()) - 1) <= NEAR_ONE


def test_the_plan_has_the_shares_and_a_seed_of_null_is_0() -> None:
    plan = plan_of({"math": 0.5, "code": None, "old": 0.0}, {"math": 9, "code": 4}, 4, None)
    assert plan.seed == 0
    assert plan.counts(0) == {"code": 2, "math": 2, "old": 0}


@pytest.mark.parametrize(
    ("mode", "of_update", "is_noted"),
    [
        ("sync", 4, True),
        ("colocate_async", 4, True),
        ("sync", 8, False),
        ("mixed_sync", 4, False),
        ("separate_async", 4, False),
    ],
)
def test_a_note_names_the_mode_with_exact_updates_where_updates_are_inexact(
    mode: str, of_update: int, is_noted: bool
) -> None:
    changes = {"actor_rollout_ref__actor__ppo_mini_batch_size": of_update}
    note = update_note(recipe(trainer__v1__trainer_mode=mode, **changes))
    assert (note is not None) == is_noted
    assert note is None or f"trainer.v1.trainer_mode=mixed_{mode}, and nothing else" in note


def test_no_problem_changes_the_config() -> None:
    config = recipe()
    config_problems(config)
    assert config == RECIPE and at(config, "data.mixture.code") is None
