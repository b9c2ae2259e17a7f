"""The machines of the tests here, and what the runs on them train."""

import shutil
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.nodes.scripts import DEMO
from tests.nodes.site import Site, missing


@pytest.fixture(scope="session")
def can_have_sites() -> None:
    if why := missing():
        pytest.skip(why)


@pytest.fixture
def site(can_have_sites: None) -> Generator[Site]:
    """Machines on which nothing has run yet."""
    made = Site()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo whose model was trained next to nothing."""
    from verl_mixed.demo.model import prepare_demo
    from verl_mixed.demo.recipe import Recipe

    folder = tmp_path_factory.mktemp("demo") / "seed0"
    recipe = Recipe(traces=2000, min_steps=60, max_steps=60, floor=0.0, probe_prompts=2)
    prepare_demo(folder, 0, recipe=recipe, threads=1, progress=lambda line: None)
    return folder


@pytest.fixture(scope="module")
def site_with_demo(can_have_sites: None, demo: Path) -> Generator[Site]:
    """Machines with a model and rows for a run, on all hosts."""
    made = Site()
    try:
        shutil.copytree(demo, made.hosts[0].path(DEMO))
        yield made
    finally:
        made.close()
