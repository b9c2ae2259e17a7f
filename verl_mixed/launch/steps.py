"""How many steps a run trains: `trainer.total_training_steps`, or whole passes of the mixture."""

from collections.abc import Collection, Sequence
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from config.schema import ConfigError
from verl_mixed.run.audit import plan_of
from verl_mixed.run.compose import SHIPPED_EPOCHS, unset_keys
from verl_mixed.run.settings import override_key

STEPS, EPOCHS = "trainer.total_training_steps", "trainer.total_epochs"
_PAGE = "see docs/mixture.md, Epochs"


def settle_steps(
    config: DictConfig, overrides: Sequence[str], changed: Collection[str], *, has_rows: bool
) -> int | None:
    """Replace `trainer.total_epochs` by the number of steps of so many passes of the mixture.

    `total_epochs` counts only where the user sets it, and then no steps may be set.

    Args:
        config: a run config with the files of all sources; it is changed.
        overrides: of the command line and of the environment.
        changed: keys that have another value than this project ships.
        has_rows: whether the training files are there.

    Returns:
        The number of epochs; None if steps are set.

    Raises:
        ConfigError: neither is set, or both, or the rows are not there.
    """
    steps, epochs = config.trainer.total_training_steps, config.trainer.total_epochs
    if EPOCHS not in changed:
        if steps is None:
            raise ConfigError(
                [
                    f"{STEPS}=null: nothing ends the run; set it (TOTAL_TRAINING_STEPS), or "
                    f"{EPOCHS} for whole passes of the mixture"
                ]
            )
        return None
    is_typed = STEPS in changed or any(override_key(each) == STEPS for each in overrides)
    if is_typed and steps is not None:
        raise ConfigError(
            [
                f"{EPOCHS}={epochs} and {STEPS}={steps}: only one can end the run; remove one, "
                f"{_PAGE}"
            ]
        )
    if type(epochs) is not int or epochs < 1:
        raise ConfigError([f"{EPOCHS}={epochs!r}: want a whole number >= 1, {_PAGE}"])
    if not has_rows or "data.train_files" in unset_keys(cast(Any, config)):
        raise ConfigError(
            [
                f"{EPOCHS}={epochs}: the training rows are not there yet; make them first, as "
                f"`verl-mixed prepare demo` does, or set {STEPS} instead"
            ]
        )
    resolved = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    try:
        config.trainer.total_training_steps = plan_of(resolved).batches_of_passes(epochs)
    except ValueError as error:
        lines = str(error).splitlines()
        raise ConfigError([f"{EPOCHS}={epochs}: {line}" for line in lines]) from error
    config.trainer.total_epochs = SHIPPED_EPOCHS
    return epochs
