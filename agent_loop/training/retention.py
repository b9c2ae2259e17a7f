"""Which checkpoints a run keeps.

The choice is a pure function of steps. `prune_checkpoints` removes what is not kept. Nothing is
remembered: each call looks at the folder, so a restart or a kill changes nothing. Checkpoints at
other places (HDFS, object stores) are not touched.
"""

import logging
import shutil
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path

from agent_loop.training.run_folder import checkpoint_folders, tracked_step

logger = logging.getLogger(__name__)


def checkpoints_to_remove(
    whole: Mapping[int, bool], latest: int, keep: int | None, named: Collection[int] = ()
) -> list[int]:
    """The steps whose checkpoints are removed, in the order of their removal: oldest first.

    Kept are the `keep` newest whole checkpoints up to `latest`. Checkpoints that were interrupted
    are removed once `latest` has passed them. Checkpoints after `latest` are kept: they are left
    from before a start with `resume_path`, or are being written. For example `keep=2`, `latest=15`,
    whole checkpoints at 5, 10, 15 and 20 and an interrupted one at 12: 5 and 12 are removed.

    Args:
        whole: step of each checkpoint -> whether it is whole.
        latest: step of the checkpoint that the next start continues. Without a whole checkpoint of
            this step nothing is removed.
        keep: number of checkpoints, >= 1; None keeps all.
        named: steps that are kept in any case.
    """
    if keep is None or not whole.get(latest):
        return []
    newest = sorted((step for step in whole if step <= latest and whole[step]), reverse=True)
    kept = {*newest[:keep], *named}
    return sorted(step for step in whole if step < latest and step not in kept)


def is_whole(checkpoint: Path, *, has_queue: bool) -> bool:
    """Whether the writing of a checkpoint came to its end, and its weights are still there.

    verl writes `data.pt`, a zip file, after all weights; a zip file that was cut short has no end
    record. In asynchronous modes (`has_queue`) verl writes the folder `transfer_queue` after that,
    under another name until it is complete.
    """
    weights = (
        path.is_dir() and not path.name.startswith("transfer_queue")
        for path in checkpoint.iterdir()
    )
    queue = checkpoint / "transfer_queue"
    return (
        any(weights)
        and zipfile.is_zipfile(checkpoint / "data.pt")
        and (queue.is_dir() or not has_queue)
    )


def prune_checkpoints(
    checkpoints: Path, keep: int | None, *, has_queue: bool, named: Collection[int] = ()
) -> None:
    """Remove the checkpoints that are not kept.

    The latest checkpoint is the one that verl's tracker file names. Links are left alone, and so
    is everything whose name is not `global_step_<N>`. What cannot be removed is logged, and tried
    again at the next call. The other arguments are as in `checkpoints_to_remove` and `is_whole`.
    """
    latest = tracked_step(checkpoints)
    if keep is None or latest is None:
        return
    try:
        folders = {
            step: path
            for step, path in checkpoint_folders(checkpoints).items()
            if not path.is_symlink()
        }
        whole = {step: is_whole(path, has_queue=has_queue) for step, path in folders.items()}
        for step in checkpoints_to_remove(whole, latest, keep, named):
            remove_checkpoint(folders[step])
    except OSError as error:
        logger.warning("cannot remove old checkpoints: %s; the next checkpoint tries again", error)


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint folder; `data.pt` goes first.

    A kill in the middle therefore leaves a folder that nothing takes for a whole checkpoint. Of
    links, the link is removed, and what it points to stays.
    """
    if checkpoint.is_symlink():
        checkpoint.unlink()
        return
    (checkpoint / "data.pt").unlink(missing_ok=True)
    shutil.rmtree(checkpoint)
