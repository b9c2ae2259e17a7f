"""Name, folder and progress of the run that settings and overrides describe.

The run is the one that `verl-mixed train` would start. Imports no verl, and takes a second.
`verl_mixed.commands.facts` prints this for shell scripts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from config.schema import ConfigError
from verl_mixed.run.compose import SHIPPED_EPOCHS, compose_config, load_config, resolving
from verl_mixed.run.next_start import next_start
from verl_mixed.run.settings import SETTINGS, overrides_from
from verl_mixed.run.state import RUNS, RunFolder, RunHeld


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a script needs to know before it starts, resumes or stops a run."""

    folder: str
    """`runs/<experiment>`, from the repository's root."""

    holder: str
    """The launcher that runs it now, such as `process 123 on node7`; empty if there is none."""

    step: int
    """Last step with metrics; 0 before the first."""

    total: int
    """Step after which the run is complete; 0 if the config does not say."""

    checkpoint: int
    """Step of the checkpoint that the next start resumes from; 0 if it begins with step 1."""

    done: int
    """1 if the run is complete and the next start trains nothing, else 0."""


def facts(arguments: Sequence[str], environ: Mapping[str, str]) -> RunFacts:
    """The facts of the run that overrides and settings describe; the run need not exist.

    Args:
        arguments: Hydra overrides; those of AgentFly's keys are translated already.
        environ: environment with the settings.

    Raises:
        ConfigError: settings, overrides or config files are wrong.
    """
    settings = {name: environ[name] for name in SETTINGS if name in environ}
    return facts_of(compose_config(overrides_from(settings, arguments)))


@resolving()
def facts_of(config: DictConfig) -> RunFacts:
    """The facts of the run that a composed config describes; the run need not exist.

    Raises:
        ConfigError: the config names no run.
    """
    name = OmegaConf.select(config, "mixed.experiment")
    if problems := name_problems(name):
        raise ConfigError(problems)
    folder = RunFolder(RUNS / name)
    total = OmegaConf.select(config, "trainer.total_training_steps")
    total = total if isinstance(total, int) else 0  # the check of numbers reports another value
    if (epochs := OmegaConf.select(config, "trainer.total_epochs")) != SHIPPED_EPOCHS:
        total = _steps_of_epochs(folder, epochs)
    keys = ("resume_mode", "resume_from_path")
    trainer = {key: OmegaConf.select(config, f"trainer.{key}") for key in keys}
    start = next_start(folder, {"trainer": trainer}, total)
    return RunFacts(
        folder=str(RUNS / name),
        holder=holder_words(folder),
        step=start.seen,
        total=total,
        checkpoint=start.step,
        done=int(start.is_complete),
    )


def _steps_of_epochs(folder: RunFolder, epochs: Any) -> int:
    """Steps of so many passes of the mixture that a run was started with; 0 if nobody can say.

    A resumed run has the same rows and ratios, but may be given more epochs.
    """
    if not folder.config.exists() or not isinstance(epochs, int) or epochs < 1:
        return 0
    from verl_mixed.run.audit import plan_of  # it reads parquet files, which others do not need

    try:
        return plan_of(load_config(folder.config), run=folder.path).batches_of_passes(epochs)
    except (ValueError, OSError):  # a start names the reason
        return 0


def name_problems(experiment: Any) -> list[str]:
    """Why a value cannot be the name of a run; empty if it can."""
    if isinstance(experiment, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", experiment):
        return []
    return [
        f"mixed.experiment={experiment!r}: it names a folder; "
        "use letters, digits, '.', '_' and '-' (EXPERIMENT_NAME)"
    ]


def display_name(config: DictConfig, overrides: Sequence[str], *, is_demo: bool = False) -> str:
    """The run's name at Weights & Biases: the experiment's name, if an override gives one.

    Otherwise model, agents, algorithm, learning rate, batch and KL coefficient, such as
    `demo-taco+nq+math-state_masked_grpo-lr0.0005-bs20x8-kl0`.
    """
    if any(each.partition("=")[0].lstrip("+") == "mixed.experiment" for each in overrides):
        return config.mixed.experiment
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    model = str(OmegaConf.select(config, "actor_rollout_ref.model.path") or "model")
    sources = config.mixed.sources.items()
    agents = [name for name, source in sources if OmegaConf.select(source, "ratio") != 0]
    kl = 0.0
    if actor.use_kl_loss:
        kl = actor.kl_loss_coef
    elif config.algorithm.use_kl_in_reward:
        kl = config.algorithm.kl_ctrl.kl_coef
    return "-".join(
        [
            "demo" if is_demo else Path(model).name,
            "+".join(agents),
            str(config.algorithm.adv_estimator),
            f"lr{_short(actor.optim.lr)}",
            f"bs{config.data.train_batch_size}x{rollout.n}",
            f"kl{_short(kl)}",
        ]
    )


def _short(value: Any) -> str:
    """A number with few digits; another value, which a check reports, as it is."""
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def holder_words(folder: RunFolder) -> str:
    """Who runs a run now; empty if nobody does."""
    try:
        return str(folder.holder() or "")
    except RunHeld:
        return "a process without a name"
