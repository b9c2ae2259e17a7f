"""What the real runs share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Path:
    """A demo whose model was trained a little: it answers now and then, and hardly ever right."""
    from agent_loop.cpu.models.demo import prepare_demo
    from agent_loop.cpu.models.demo_recipe import Recipe

    folder = tmp_path_factory.mktemp("demo") / "seed0"
    recipe = Recipe(traces=4000, min_steps=250, max_steps=250, floor=0.0, probe_prompts=2)
    prepare_demo(folder, 0, recipe=recipe, threads=1, progress=lambda line: None)
    return folder
