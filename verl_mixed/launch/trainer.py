"""The trainer's process: its command and its environment."""

from collections.abc import Mapping

from config import child
from config.lookup import at
from verl_mixed.launch.plan import Plan

TRAINER = tuple(child.command("agent_loop.training.main"))
"""Command of the trainer; the path of the run's config.yaml is added."""


def trainer_environ(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """The trainer's environment: defaults of this project, overridden by the launcher's own."""
    defaults = {
        "TENSORBOARD_DIR": str(plan.folder.tensorboard),
        "WANDB_DIR": str(plan.folder.wandb),
        "WANDB_CONSOLE": "off",  # train.log already has the output
        "WANDB_RUN_ID": plan.folder.wandb_run_id(),
        "WANDB_RESUME": "allow",
    }
    if not environ.get("WANDB_API_KEY"):
        defaults |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    return defaults | driver_environ(plan, environ)


def driver_environ(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """What a process needs that starts Ray or joins it."""
    defaults = {
        "HYDRA_FULL_ERROR": "1",
        "OMP_NUM_THREADS": "1",  # two threads on a shared core are slower than one
        "PYTHONUNBUFFERED": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if at(plan.config, "trainer.device") == "cpu":
        defaults["VERL_PLATFORM"] = "cpu"  # otherwise verl would use a GPU of this machine
    own = {name: value for name, value in environ.items() if value}
    own.pop("RAY_ADDRESS", None)  # the config has the address of the Ray that the run joins
    own.pop("TENSORBOARD_DIR", None)  # each run has its own folder
    return defaults | own
