"""A trainer that connects to Ray as the real one does, and writes which Ray that is.

Only verl's task runner is replaced: `agent_loop.training.main` and verl's `run_ppo` are the real
ones. `python -m tests.fakes.ray_probe_trainer CONFIG`
"""

import sys
from pathlib import Path
from typing import Any

import ray
from verl.trainer import main_ppo

from agent_loop.training.main import main


@ray.remote(num_cpus=0)
class Probe:
    def run(self, config: Any) -> None:
        address = ray.get_runtime_context().gcs_address
        Path(config.mixed.run_dir, "joined").write_text(address, encoding="utf-8")


if __name__ == "__main__":
    main_ppo.TaskRunnerV1 = Probe
    main(sys.argv[1])
