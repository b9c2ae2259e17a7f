"""Recipes of verl's own with the mixture: verl's trainers, on a CPU."""

import re
import shlex
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from samplers.audit import audit, plans_in
from samplers.ledger import read_ledger
from tests.e2e.recipes import (
    DAPO,
    DEADLINE_S,
    DOOR,
    FAILING_LOOP,
    MODES,
    QUOTAS,
    ROOT,
    Recipe,
    wrong,
)

PAGE = ROOT / "docs" / "beside_your_recipe.md"


def check(recipe: Recipe) -> None:
    """Every batch that verl wrote is exact, and so is the ledger."""
    trained = recipe.trained()
    assert list(trained) == list(range(1, recipe.steps + 1))
    assert {step: wrong(prompts) for step, prompts in trained.items()} == dict.fromkeys(trained, 0)
    counts = Counter(prompt for prompts in trained.values() for prompt in prompts)
    assert max(counts.values()) == 1, "a prompt was trained twice"
    lines = read_ledger(recipe.checkpoints / "ledger.jsonl")
    assert audit(lines, plans_in(lines)[-1][1]).problems == ()


@pytest.mark.ray
@pytest.mark.timeout(DEADLINE_S)
def test_the_commands_of_the_page_train_the_mixture_in_verls_trainer(
    demo: Path, tmp_path: Path
) -> None:
    recipe = Recipe(
        folder=tmp_path, model=demo / "model", steps=2, overrides=(*DAPO, *FAILING_LOOP)
    )
    recipe.write()
    (commands,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert commands.startswith("pip install .")
    typed = commands.partition("\n")[2]
    (train,) = re.findall(r"python3 -m verl.trainer.main_ppo(?:.*\\\n)*.*\n", typed)
    before = "".join(
        train.replace("python3 -m verl.trainer.main_ppo", f"verl-mixed {command}")
        for command in ("check", "plan")
    )
    script = f"set -e\nRECIPE=({shlex.join(recipe.words())})\n{before}{typed}"
    with (tmp_path / "out.log").open("wb") as out:
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=recipe.environ(),
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
        )
    log = recipe.log()
    assert done.returncode == 0, log[-4000:]
    check(recipe)
    assert "every batch as planned" in log and "data.dataloader_num_workers=8 is set to 0" in log
    for metrics in recipe.metrics():
        assert {name: metrics[f"mixed/{name}/count"] for name in QUOTAS} == QUOTAS
        assert metrics["mixed/ratio_error/max"] == 0
        assert all(0 <= metrics[f"mixed/{name}/reward/mean"] <= 1 for name in QUOTAS)


@pytest.mark.algorithm
@pytest.mark.timeout(3 * DEADLINE_S)
@pytest.mark.parametrize("mode", MODES)
def test_two_kills_lose_no_prompt_and_train_none_twice(
    mode: str, demo: Path, tmp_path: Path
) -> None:
    recipe = Recipe(
        folder=tmp_path,
        model=demo / "model",
        mode=mode,
        steps=4,
        overrides=(*DAPO, *FAILING_LOOP, *DOOR),
    )
    recipe.write()
    recipe.start().kill_in("saving")
    recipe.start().kill_in("updating")
    recipe.run()
    check(recipe)
    metrics = recipe.metrics()[-1]
    assert {name: metrics[f"mixed/{name}/count"] for name in QUOTAS} == QUOTAS


@pytest.mark.algorithm
@pytest.mark.timeout(DEADLINE_S)
def test_smaller_updates_are_named_at_the_start_and_exact_in_mixed_sync(
    demo: Path, tmp_path: Path
) -> None:
    half = "actor_rollout_ref.actor.ppo_mini_batch_size=10"
    recipe = Recipe(folder=tmp_path, model=demo / "model", steps=1, overrides=(*DOOR, half))
    recipe.write()
    recipe.run()
    assert "set trainer.v1.trainer_mode=mixed_sync, and nothing else" in recipe.log()
    mixed = (*recipe.overrides, "trainer.v1.trainer_mode=mixed_sync")
    again = replace(recipe, steps=2, overrides=mixed)
    again.run()
    check(again)
    assert "mixed/balance/imbalance" in again.metrics()[-1]
