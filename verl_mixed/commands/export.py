"""A checkpoint of a run as a Hugging Face folder, which transformers and vLLM load.

Decides which checkpoint is meant, puts the actor's FSDP2 shards together, and says what cannot be
exported. verl's own merger (`verl.model_merger`) is not used: it rounds every weight to bfloat16.
Imports torch and transformers inside its functions, and no verl.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, cast

from samplers.disk import claimed, sync
from samplers.rows.draft import draft_folder
from verl_mixed.run.state import RunFolder
from verl_mixed.views.estimates import validations
from verl_mixed.views.progress import Line, sources_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

DType = Literal["fp32", "bf16"]

LATEST, BEST = "latest", "best"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    step: int
    folder: Path
    parameters: int
    size_bytes: int


def export(
    run: RunFolder,
    step: str = LATEST,
    output: Path | None = None,
    dtype: DType = "fp32",
    *,
    say: Callable[[str], None] = print,
) -> Exported:
    """Write the policy of a checkpoint: weights, config, tokenizer and generation config.

    The folder is there whole or not at all. fp32 is what the trainer holds, bit for bit; bf16 is
    that, rounded once.

    Args:
        run: the run; it may go on meanwhile.
        step: a number, `latest` (the newest whole checkpoint), or `best` (of those with a
            validation, that with the highest mean reward over the sources).
        output: a folder that is not there yet; None: `export/step_<N>-<dtype>` of the run.
        dtype: of the weights.
        say: gets a line when something was chosen.

    Raises:
        ValueError: no such run or checkpoint, the checkpoint is not whole or no causal model's, or
            the output is there.
        OSError: a file cannot be read or written, or another process writes the same output.
    """
    number = chosen_step(run, step, say)
    output = (output or run.path / "export" / f"step_{number}-{dtype}").absolute()
    if output.exists():
        raise ValueError(f"{output} is there already: name another --output, or remove it")
    draft = draft_folder(output)
    with _written(output):
        draft.mkdir(parents=True, exist_ok=True)
    with claimed(draft) as is_ours:
        if not is_ours:
            raise BlockingIOError(f"cannot write {output}: another process writes it now")
        try:
            actor = _checkpoint(run, number) / "actor"
            model, weights = _read(actor, dtype)
            parameters = sum(weight.numel() for weight in weights.values())
            with _written(output):
                _write(model, weights, actor / "huggingface", draft)
                for file in draft.iterdir():
                    sync(file)
                draft.rename(output)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    sync(output.parent)
    size_bytes = sum(file.stat().st_size for file in output.iterdir())
    return Exported(step=number, folder=output, parameters=parameters, size_bytes=size_bytes)


def chosen_step(run: RunFolder, step: str, say: Callable[[str], None] = print) -> int:
    """The step of the checkpoint that is meant. See `export`.

    Raises:
        ValueError: there is none, or it is not whole.
    """
    if not run.path.is_dir():
        raise ValueError(f"no {run.path}: not a run's folder; give runs/<experiment>")
    lacks = {number: what_lacks(_checkpoint(run, number)) for number in _steps(run)}
    whole = [number for number, lack in lacks.items() if lack is None]
    there = f"whole checkpoints are {', '.join(map(str, whole))}" if whole else "none is whole"
    if step == LATEST:
        if not whole:
            reasons = "; ".join(f"step {number}: {lack}" for number, lack in lacks.items())
            raise ValueError(f"no checkpoint to export in {run.path}: {reasons or 'there is none'}")
        say(f"step {whole[-1]} is the newest whole checkpoint")
        return whole[-1]
    if step == BEST:
        number, mean = _best(run.lines(), whole, run.path)
        say(f"step {number} is the best by validation, mean reward {mean:.4f} over the sources")
        return number
    number = int(step)
    if number not in lacks:
        raise ValueError(f"no checkpoint of step={number} in {run.path}: {there}")
    if (lack := lacks[number]) is not None:
        raise ValueError(
            f"the checkpoint of step={number} in {run.path} is not whole: {lack}; {there}"
        )
    return number


def what_lacks(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be exported; None where it is whole.

    verl writes `data.pt` after the actor, so a folder without one may hold half an actor.
    """
    actor = checkpoint / "actor"
    if not (checkpoint / "data.pt").is_file():
        return "it was interrupted while it was written"
    if not actor.is_dir():
        return "its weights were removed (trainer.max_actor_ckpt_to_keep)"
    try:
        files = _shards(actor)
    except (OSError, ValueError, KeyError, TypeError):
        return "actor/fsdp_config.json does not say of how many ranks it is"
    if missing := [file.name for file in files if not file.is_file()]:
        return f"actor/ has no {', '.join(missing)}"
    if not (actor / "huggingface" / "config.json").is_file():
        return "actor/huggingface has no config.json"
    return None


def _checkpoint(run: RunFolder, step: int) -> Path:
    return run.path / "checkpoints" / f"global_step_{step}"


def _steps(run: RunFolder) -> list[int]:
    """Of all checkpoint folders, whole or not, in order."""
    names = (path.name for path in (run.path / "checkpoints").glob("global_step_*"))
    return sorted(int(name[12:]) for name in names if re.fullmatch(r"global_step_\d+", name))


def _shards(actor: Path) -> list[Path]:
    """The model files of an actor, by rank."""
    ranks = int(json.loads((actor / "fsdp_config.json").read_text())["world_size"])
    if ranks < 1:
        raise ValueError(f"world_size={ranks}: want 1 at least")
    return [actor / f"model_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]


def _best(lines: Sequence[Line], whole: Sequence[int], place: Path) -> tuple[int, float]:
    """The step with the highest mean of the sources' validation rewards, the later of equals."""
    of_sources = [
        {one.steps[1]: one.mean for one in found}
        for source in sources_of(lines)
        if (found := validations(lines, source))
    ]
    means = {
        step: fmean(means[step] for means in of_sources)
        for step in whole
        if of_sources and all(step in means for means in of_sources)
    }
    if not means:
        raise ValueError(
            f"no best checkpoint in {place}: no step has both a whole checkpoint and a validation; "
            "give --step N (a trainer.save_freq that is a multiple of test_freq makes both)"
        )
    best = max(means, key=lambda step: (means[step], step))
    return best, means[best]


@contextmanager
def _written(output: Path) -> Generator[None]:
    """Say of what goes wrong in the block that the output cannot be written."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"cannot write {output}: {getattr(error, 'strerror', None) or error}; make room there "
            "and the right to write, or name another --output"
        ) from error


def _read(actor: Path, dtype: DType) -> "tuple[PreTrainedModel, dict[str, Tensor]]":
    """The model of an actor, and its weights."""
    import torch

    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model = _model(actor / "huggingface", torch_dtype)
    weights = merge(_shards(actor), torch_dtype)
    _untie(model, weights)
    _compare(model, weights, actor)
    return model, weights


def _write(
    model: "PreTrainedModel", weights: "dict[str, Tensor]", described: Path, folder: Path
) -> None:
    """Write a model, and what is beside its config, into a folder. It empties `weights`."""
    from transformers.utils.logging import disable_progress_bar

    for file in folder.iterdir():  # of a draft whose writer was killed
        file.unlink()
    for file in described.iterdir():  # the tokenizer, as it was trained with
        if file.is_file() and not re.search(r"\.(safetensors|bin|index\.json)$", file.name):
            shutil.copy(file, folder)
    disable_progress_bar()
    model.save_pretrained(folder, state_dict=weights, max_shard_size="5GB")
    for file in folder.glob("*.safetensors"):  # safetensors makes them readable for the owner only
        file.chmod((folder / "config.json").stat().st_mode)


def _model(described: Path, dtype: Any) -> "PreTrainedModel":
    """The model of a config, without weights.

    Raises:
        ValueError: transformers has no such model.
    """
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(described)
        (name,) = config.architectures or ["none"]
        with torch.device("meta"):
            model = getattr(transformers, name)(config).to(dtype)
        if (described / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(described)
    except Exception as error:  # of many kinds, by what the files hold
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"cannot export {described}: transformers makes no model of its files ({reason}); "
            "export another step; what brings its own code, `python -m verl.model_merger` can merge"
        ) from error
    return model


def merge(shards: Sequence[Path], dtype: Any = None) -> "dict[str, Tensor]":
    """The weights of a model from the state that each rank saved.

    Args:
        shards: `model_world_size_<W>_rank_<R>.pt`, all W in order of rank.
        dtype: torch's; None leaves weights as they were saved.

    Returns:
        Name -> whole weight; tied weights are there under each name.

    Raises:
        OSError: a file cannot be read.
        ValueError: weights that cannot be put together.
    """
    import torch

    states = [_load(path) for path in shards]
    weights: dict[str, Tensor] = {}
    with torch.no_grad():
        for name in states[0]:
            try:
                whole = _whole([state[name] for state in states])
            except (AttributeError, LookupError, RuntimeError, ValueError) as error:
                raise ValueError(
                    f"cannot merge weight={name!r} of {shards[0].parent}: what the ranks have of "
                    f"it does not fit together ({error}); export another step"
                ) from error
            weights[name] = whole.to(dtype) if whole.is_floating_point() else whole
    return weights


def _load(path: Path) -> "Mapping[str, Any]":
    """A rank's state. It stays in its file until it is touched, and is data only: no code runs."""
    import torch
    import torch.distributed.tensor  # makes torch know the types of shards

    # it says that no process group is there; none is needed to read a shard
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(state, Mapping):
            raise ValueError(f"it holds a {type(state).__name__}")
        if others := [name for name in state if not isinstance(state[name], torch.Tensor)]:
            raise ValueError(f"{others[0]!r} is no tensor")
    except OSError:
        raise
    except Exception as error:  # of many kinds, by what the bytes lead to
        said = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
        reason = re.split(r"\.?\s*\n|\. ", said)[0] or type(error).__name__
        raise OSError(
            f"cannot read {path}: torn, or no weights by name ({reason}); export another step"
        ) from error
    return state


def _whole(parts: Sequence[Any]) -> "Tensor":
    """One weight from what each rank has of it: DTensors, or copies of the same tensor.

    FSDP2 gives each rank a slice along one dimension, the last ranks a shorter or an empty one;
    with HSDP, each row of the mesh has all slices.

    Raises:
        ValueError: parts of another kind, or that do not make up the whole.
    """
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard

    first = parts[0]
    if not isinstance(first, DTensor):
        if not all(torch.equal(first, part) for part in parts[1:]):
            raise ValueError("it is not sharded, and ranks differ")
        return first
    ranks, places = first.device_mesh.mesh, first.placements
    dims = [axis for axis, place in enumerate(places) if type(place) is Shard]
    if len(dims) > 1 or any(type(place) not in (Shard, Replicate) for place in places):
        raise ValueError(f"placements={places}: want one dimension sharded, the others replicated")
    holders = (
        ranks.movedim(dims[0], -1).reshape(-1, ranks.shape[dims[0]])[0]
        if dims
        else ranks.flatten()[:1]
    )
    slices = [parts[int(rank)].to_local() for rank in holders]
    whole = torch.cat(slices, dim=cast(Shard, places[dims[0]]).dim) if dims else slices[0]
    if whole.shape != first.shape:
        raise ValueError(f"slices make up {tuple(whole.shape)}, not {tuple(first.shape)}")
    return whole


def _untie(model: "PreTrainedModel", weights: "dict[str, Tensor]") -> None:
    """Keep tied weights once, as Hugging Face does.

    Raises:
        ValueError: they are not equal.
    """
    import torch

    for name, source in (model.all_tied_weights_keys or {}).items():
        if name in weights and source in weights:
            if not torch.equal(weights[name], weights[source]):
                raise ValueError(f"weights {name!r} and {source!r} are tied, and differ")
            del weights[name]


def _compare(model: "PreTrainedModel", weights: "Mapping[str, Tensor]", actor: Path) -> None:
    """Hold the weights against the model.

    Raises:
        ValueError: some are missing, unknown or of another shape.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in model.all_tied_weights_keys or {}:
        wanted.pop(name, None)
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if differing := sorted(
        name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)
    ):
        shown = "; ".join(
            f"{name}: {found.get(name, 'missing')}, the model has {wanted.get(name, 'none')}"
            for name in differing[:5]
        )
        raise ValueError(
            f"{len(differing)} weights of {actor} are not the model's: {shown}; adapters (LoRA) "
            "and other versions of transformers cannot be exported"
        )
