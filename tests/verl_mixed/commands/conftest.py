"""A run for the commands that read one."""

from pathlib import Path

import pytest

from tests.verl_mixed.conftest import RunEnviron
from verl_mixed.launch.plan import make_plan
from verl_mixed.run.compose import save_config


@pytest.fixture
def run(run_environ: RunEnviron) -> Path:
    """The folder of a run without a checkpoint."""
    plan = make_plan([], run_environ)
    plan.folder.path.mkdir(parents=True)
    save_config(plan.config, plan.folder.config)
    return Path("runs/trial")
