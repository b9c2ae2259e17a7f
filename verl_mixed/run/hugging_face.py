"""A checkpoint's model as a Hugging Face folder: FSDP2 shards and adapters are merged and written.

verl's own merger (`verl.model_merger`) is not used, because it rounds every weight to bfloat16.
Importing this module takes seconds, because it imports torch and transformers.
"""

import logging
import re
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from verl_mixed.run.checkpoints import DType, lora_facts, model_files

_TORCH_DTYPES: Mapping[DType, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


@contextmanager
def write_errors(output: Path) -> Generator[None]:
    """Turn an error of writing in the block into an OSError that names the output."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"cannot write {output}: {getattr(error, 'strerror', None) or error}; make room there "
            "and the right to write, or name another --output"
        ) from error


def read_model(actor: Path, dtype: DType) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The model of a whole checkpoint's folder `actor`, and its weights; adapters are merged.

    Raises:
        OSError: a file cannot be read.
        ValueError: transformers cannot make the model, or the weights do not fit it.
    """
    torch_dtype = _TORCH_DTYPES[dtype]
    if lora_facts(actor) is None:
        model = _model(actor / "huggingface", torch_dtype)
        weights = merge(model_files(actor), torch_dtype)
    else:  # merged in fp32, and rounded afterwards
        adapted, missing = _adapted(actor)
        if missing:
            raise ValueError(
                f"{actor} holds the adapter without the {len(missing)} weights of its base model "
                "(actor.checkpoint.save_lora_only): export it with --adapter"
            )
        model = cast(Any, adapted.merge_and_unload()).to(torch_dtype)
        weights = model.state_dict()
    _untie(model, weights)
    _compare(model, weights, actor)
    return model, weights


def read_adapter(actor: Path, dtype: DType, base: str) -> tuple[LoraConfig, dict[str, Tensor]]:
    """The adapter of a whole checkpoint's folder `actor`, and its weights.

    `base` is the model that the adapter was trained on, for adapter_config.json.

    Raises:
        OSError, ValueError: as `read_model`; or the checkpoint has no adapter.
    """
    if lora_facts(actor) is None:
        raise ValueError(
            f"{actor} has no adapter: it was trained without LoRA; leave --adapter out"
        )
    adapted, _ = _adapted(actor)
    config = cast(LoraConfig, adapted.peft_config["default"])
    config.base_model_name_or_path, config.inference_mode = base, True
    found = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    torch_dtype = _TORCH_DTYPES[dtype]
    return config, {name: weight.to(torch_dtype).contiguous() for name, weight in found.items()}


def write_adapter(config: LoraConfig, weights: dict[str, Tensor], folder: Path) -> None:
    """Write an adapter into an existing folder, as peft and vLLM load it."""
    for file in folder.iterdir():  # left by an export that was killed
        file.unlink()
    config.save_pretrained(str(folder))
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_model.safetensors").chmod((folder / "adapter_config.json").stat().st_mode)


def _adapted(actor: Path) -> tuple[PeftModel, list[str]]:
    """The base model of a checkpoint with its adapter, in fp32, and names of missing base weights.

    A checkpoint says rank and alpha; the names of its weights say which layers have an adapter.
    """
    weights = merge(model_files(actor), torch.float32)
    prefix = "base_model.model."
    layers = {
        name.partition(".lora_A.")[0].removeprefix(prefix) for name in weights if ".lora_A." in name
    }
    config = LoraConfig(**(lora_facts(actor) or {}), target_modules=sorted(layers))
    try:
        adapted = get_peft_model(
            _model(actor / "huggingface", torch.float32), config, low_cpu_mem_usage=True
        )
        found = adapted.load_state_dict(weights, strict=False, assign=True)
    except (RuntimeError, ValueError) as error:  # other shapes, or no such layers
        reason = " ".join(str(error).split())
        raise ValueError(f"weights of {actor} do not fit its model: {reason}") from error
    if wrong := [
        *found.unexpected_keys,
        *(name for name in found.missing_keys if ".lora_" in name),
    ]:
        raise ValueError(f"weights of {actor} are not the model's: {', '.join(wrong[:5])}")
    cast(Any, adapted.get_base_model()).tie_weights()  # loading has separated them
    return cast(PeftModel, adapted), found.missing_keys


def write_model(
    model: PreTrainedModel, weights: dict[str, Tensor], described: Path, folder: Path
) -> None:
    """Write a model and its tokenizer into an existing folder. This empties `weights`.

    `described` is the folder with the model's config and tokenizer.
    """
    for file in folder.iterdir():  # left by an export that was killed
        file.unlink()
    for file in described.iterdir():  # the tokenizer of the training
        if file.is_file() and not re.search(r"\.(safetensors|bin|index\.json)$", file.name):
            shutil.copy(file, folder)
    disable_progress_bar()
    model.save_pretrained(folder, state_dict=weights, max_shard_size="5GB")
    for file in folder.glob("*.safetensors"):  # safetensors lets only the owner read them
        file.chmod((folder / "config.json").stat().st_mode)


def _model(described: Path, dtype: Any) -> PreTrainedModel:
    """The model that a config describes, without weights."""
    try:
        config = transformers.AutoConfig.from_pretrained(described)
        (name,) = config.architectures or ["none"]
        with torch.device("meta"):
            model = getattr(transformers, name)(config).to(dtype)
        if (described / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(described)
    except Exception as error:  # the type depends on the content of the files
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"cannot export {described}: transformers makes no model of its files ({reason}); "
            "export another step, or use `python -m verl.model_merger` for a model with own code"
        ) from error
    return model


def merge(shards: Sequence[Path], dtype: Any) -> dict[str, Tensor]:
    """The whole weights of a model from the states that all ranks saved, in order of rank.

    Weights of floating point get the torch `dtype`. Tied weights occur under each of their names.

    Raises:
        OSError: a file cannot be read.
        ValueError: the parts of a weight do not fit together.
    """
    states = [_load(path) for path in shards]
    weights: dict[str, Tensor] = {}
    with torch.no_grad():
        for name in states[0]:
            try:
                whole = _whole([state[name] for state in states])
            except (AttributeError, LookupError, RuntimeError, ValueError) as error:
                raise ValueError(
                    f"cannot merge weight={name!r} of {shards[0].parent}: its parts on the ranks "
                    f"do not fit together ({error}); export another step"
                ) from error
            weights[name] = whole.to(dtype) if whole.is_floating_point() else whole
    return weights


def _load(path: Path) -> Mapping[str, Any]:
    """The state that a rank saved, mapped from its file. No code of the file is run."""
    # torch warns that there is no process group; reading a shard needs none
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(state, Mapping):
            raise ValueError(f"it holds a {type(state).__name__}")
        if others := [name for name in state if not isinstance(state[name], torch.Tensor)]:
            raise ValueError(f"{others[0]!r} is not a tensor")
    except OSError:
        raise
    except Exception as error:  # the type depends on the bytes
        message = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
        reason = re.split(r"\.?\s*\n|\. ", message)[0] or type(error).__name__
        raise OSError(
            f"cannot read {path}: damaged, or not a state of weights ({reason}); "
            "export another step"
        ) from error
    return state


def _whole(parts: Sequence[Any]) -> Tensor:
    """One weight from the parts of all ranks: DTensors, or equal copies of a tensor.

    FSDP2 gives each rank a slice along one dimension; the slices of the last ranks may be shorter
    or empty. With HSDP, each row of the device mesh has all slices.
    """
    first = parts[0]
    if not isinstance(first, DTensor):
        if not all(torch.equal(first, part) for part in parts[1:]):
            raise ValueError("it is not sharded, and ranks differ")
        return first
    ranks, places = first.device_mesh.mesh, first.placements
    dims = [axis for axis, place in enumerate(places) if type(place) is Shard]
    if len(dims) > 1 or any(type(place) not in (Shard, Replicate) for place in places):
        raise ValueError(f"placements={places}: want one dimension sharded, the others replicated")
    if dims:
        holders = ranks.movedim(dims[0], -1).reshape(-1, ranks.shape[dims[0]])[0]
        slices = [parts[int(rank)].to_local() for rank in holders]
        whole = torch.cat(slices, dim=cast(Shard, places[dims[0]]).dim)
    else:
        whole = parts[int(ranks.flatten()[0])].to_local()
    if whole.shape != first.shape:
        raise ValueError(f"slices make up {tuple(whole.shape)}, not {tuple(first.shape)}")
    return whole


def _untie(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Remove all but one of the tied weights, as Hugging Face does."""
    for name, source in (model.all_tied_weights_keys or {}).items():
        if name in weights and source in weights:
            if not torch.equal(weights[name], weights[source]):
                raise ValueError(f"weights {name!r} and {source!r} are tied, and differ")
            del weights[name]


def _compare(model: PreTrainedModel, weights: Mapping[str, Tensor], actor: Path) -> None:
    """Raise ValueError if names or shapes of the weights are not those of the model."""
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
            f"{len(differing)} weights of {actor} are not the model's: {shown}; checkpoints of "
            "another version of transformers cannot be exported"
        )
