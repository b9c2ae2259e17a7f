"""Which checkpoints and trajectory files a run keeps, and which groups of a step it writes.

The choices are pure functions of steps and names. `prune_checkpoints` and `prune_trajectories`
remove what is not kept. Nothing is remembered: each call looks at the folders, so a restart or a
kill changes nothing. Checkpoints at other places (HDFS, object stores) are not touched.
"""

import logging
import random
import shutil
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path

from agent_loop.records.run_folder import checkpoint_folders, tracked_step, trajectory_files

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


def prune_trajectories(folder: Path, step: int, keep: int | None) -> None:
    """Remove the trajectory files of all steps but the `keep` newest up to `step`, oldest first."""
    if keep is None:
        return
    try:
        for path in trajectory_files(folder):
            if int(path.stem) <= step - keep and path.is_file():
                path.unlink()
    except OSError as error:
        logger.warning("cannot remove old trajectories: %s; the next step tries again", error)


def sampled_groups(
    groups: Mapping[str, Sequence[int]],
    *,
    step: int,
    sources: Sequence[str],
    per_source: int | None,
    per_step: int | None,
) -> set[tuple[str, int]]:
    """The groups of a step whose trajectories are written.

    Without `per_step`, each source gives its first `per_source` groups. With `per_step`, sources
    take turns: the first source in the order of the step gives its first group, then the next one,
    and so on; after the last source comes the second group of the first. The order of a step
    begins where the `per_step` turns of the step before ended, so a source that has groups in every
    step is written at least once in any `2 * ceil(sources / per_step)` steps.

    Args:
        groups: source -> draws of its groups, in order.
        step: the optimizer step, from 1.
        sources: all sources of the mixture; those that only `groups` has are added.
        per_source: most groups of a source; None for all.
        per_step: most groups of all sources together; None for all.

    Returns:
        (source, draw) of each group.
    """
    offered = {source: draws[:per_source] for source, draws in groups.items()}
    if per_step is None:
        per_step = sum(map(len, offered.values()))
    names = sorted({*sources, *groups})
    # two rounds contain one complete round, so every source is in the order
    turns = islice(_turns(names, (step - 1) * per_step), 2 * len(names))
    order = [name for name in dict.fromkeys(turns) if name in offered]
    rounds = range(max(map(len, offered.values()), default=0))
    by_turn = (
        (source, offered[source][number])
        for number in rounds
        for source in order
        if number < len(offered[source])
    )
    return set(islice(by_turn, per_step))


def _turns(names: Sequence[str], first: int) -> Iterator[str]:
    """The endless order of turns of sources, from turn number `first`.

    Each round has every source once. Each round is shuffled by its own number, because in a fixed
    order a source that has a group every few steps could meet the turns of others each time.
    """
    for number in count(first // len(names)):
        turns = random.Random(number).sample(names, len(names))
        yield from turns[max(0, first - number * len(names)) :]
