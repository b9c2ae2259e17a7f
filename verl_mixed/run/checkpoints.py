"""The checkpoints of a run: their folders, and whether each is whole."""

import json
from pathlib import Path
from typing import Any, Literal

from agent_loop.records.run_folder import checkpoint_folders
from verl_mixed.run.state import RunFolder

DType = Literal["fp32", "bf16"]
"""Type of an exported model's weights: fp32 keeps the trainer's bits, bf16 rounds them once."""


def checkpoint_of(run: RunFolder, step: int) -> Path:
    """The folder of a checkpoint."""
    return run.path / "checkpoints" / f"global_step_{step}"


def checkpoint_steps(run: RunFolder) -> list[int]:
    """The steps of all checkpoint folders in order, whole or not."""
    return list(checkpoint_folders(run.path / "checkpoints"))


def model_files(actor: Path) -> list[Path]:
    """The model files of an actor, in order of ranks; files may be missing.

    Raises:
        OSError, ValueError, KeyError, TypeError: fsdp_config.json does not give the ranks.
    """
    ranks = int(json.loads((actor / "fsdp_config.json").read_text())["world_size"])
    if ranks < 1:
        raise ValueError(f"world_size={ranks}: want 1 at least")
    return [actor / f"model_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]


def lora_facts(actor: Path) -> dict[str, Any] | None:
    """Rank, alpha and task of an actor's adapter, as peft names them; None without LoRA."""
    path = actor / "lora_train_meta.json"
    return json.loads(path.read_text()) if path.is_file() else None


def missing_part(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be exported; None if it is whole.

    verl writes `data.pt` after the actor, so a folder without `data.pt` may hold half an actor.
    """
    actor = checkpoint / "actor"
    if not (checkpoint / "data.pt").is_file():
        return "writing it was interrupted"
    if not actor.is_dir():
        return "its weights were removed (trainer.max_actor_ckpt_to_keep)"
    if not (actor / "fsdp_config.json").is_file():
        return "it is not of FSDP, and only model_engine=dp is exported (docs/profiles.md)"
    try:
        files = model_files(actor)
    except (OSError, ValueError, KeyError, TypeError):
        return "actor/fsdp_config.json does not give the number of ranks"
    if missing := [file.name for file in files if not file.is_file()]:
        return f"actor/ has no {', '.join(missing)}"
    if not (actor / "huggingface" / "config.json").is_file():
        return "actor/huggingface has no config.json"
    return None
