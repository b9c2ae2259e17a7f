"""What the real runs share."""

import os
from pathlib import Path

import pytest
from filelock import FileLock


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Path:
    """A demo whose model was trained a little: it answers now and then, and hardly ever right.

    All workers of xdist use the one that the first of them makes.
    """
    from verl_mixed.demo.model import prepare_demo
    from verl_mixed.demo.recipe import Recipe

    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "demo" / "seed0"
    recipe = Recipe(traces=4000, min_steps=250, max_steps=250, floor=0.0, probe_prompts=2)
    with FileLock(folder.parent.parent / "demo.lock"):
        prepare_demo(folder, 0, recipe=recipe, threads=1, progress=lambda line: None)
    return folder
