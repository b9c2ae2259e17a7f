"""The core with verl 0.9.0, which pip puts into a folder that is first on the path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.recipes import DAPO, DOOR, FAILING_LOOP, Recipe
from tests.e2e.test_recipe import check
from tests.fakes.pinned_environment import ROOT, install

pytestmark = [pytest.mark.slow, pytest.mark.algorithm]

RELEASE = "0.9.0"
CORE = ("tests/samplers", "tests/rate_limit")
PYTEST = """
import sys, pytest
code = pytest.main()
import verl
print("verl", verl.__version__)
sys.exit(code)
"""
"""pytest, which names at its end the release that its tests had."""


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verl")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder)
    install([*pip, f"verl=={RELEASE}"], folder)
    return folder


@pytest.mark.timeout(2400)
def test_the_core_passes_its_tests(older: Path) -> None:
    options = ("-q", "-p", "no:cacheprovider", "-m", "not (nightly or ray)")
    done = subprocess.run(
        [sys.executable, "-c", PYTEST, *options, *CORE],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(older), str(ROOT)))},
        capture_output=True,
        text=True,
    )
    print(done.stdout[-1000:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
    assert done.stdout.endswith(f"verl {RELEASE}\n")


@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_a_recipe_that_is_killed_trains_exact_batches(
    older: Path, demo: Path, tmp_path: Path
) -> None:
    recipe = Recipe(
        folder=tmp_path,
        model=demo / "model",
        mode="colocate_async",
        steps=4,
        overrides=[*DAPO, *FAILING_LOOP, *DOOR],
        before=older,
    )
    recipe.write()
    recipe.start().kill_in("saving")
    recipe.start().kill_in("updating")
    recipe.run()
    check(recipe)
    assert str(older) in recipe.log(), "the recipe had another verl"
