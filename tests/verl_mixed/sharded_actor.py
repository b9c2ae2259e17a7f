"""A program: make a tiny model, shard it with FSDP2 over processes, and save it as verl does.

Usage: python -m tests.verl_mixed.sharded_actor FOLDER MESH ..., as in `3` or `2x2` (replicas x
shards): a checkpoint FOLDER/MESH of each, with the weights before they were sharded in
whole.safetensors. `3+lora` is a model with an adapter, which whole.safetensors holds too.
"""

import json
import os
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM


def tiny_model() -> Qwen3ForCausalLM:
    """Its sizes are no multiples of 3, and one weight has fewer rows than 3; head and embedding are
    tied."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=37,
        hidden_size=8,
        intermediate_size=10,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    return Qwen3ForCausalLM(config)


LORA: dict[str, Any] = {"r": 3, "lora_alpha": 12, "task_type": "CAUSAL_LM"}


def adapted_model() -> Any:
    """The tiny model with an adapter that is not 0, on two kinds of layers; as verl makes it."""
    model = get_peft_model(tiny_model(), LoraConfig(**LORA, target_modules=["q_proj", "up_proj"]))
    for name, weight in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(weight)
    return model


def save_rank(
    rank: int, mesh_shape: tuple[int, ...], actor: Path, store: Path, make: Callable[[], Any]
) -> None:
    ranks = prod(mesh_shape)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    names = ("ddp", "fsdp")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model = make()
    for layer in (model.get_base_model() if make is adapted_model else model).model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.save(model.state_dict(), actor / f"model_world_size_{ranks}_rank_{rank}.pt")
    if rank == 0:
        (actor / "fsdp_config.json").write_text(
            json.dumps({"FSDP_version": 2, "world_size": ranks})
        )
    dist.barrier()
    dist.destroy_process_group()


def save(folder: Path, mesh: str) -> bool:
    actor = folder / "actor"
    described = actor / "huggingface"
    described.mkdir(parents=True)
    mesh, _, lora = mesh.partition("+")
    make = adapted_model if lora else tiny_model
    model = make()
    model.generation_config.update(eos_token_id=5, pad_token_id=0)
    if lora:
        (actor / "lora_train_meta.json").write_text(json.dumps(LORA))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "whole.safetensors")
    model.config.save_pretrained(described)
    model.generation_config.save_pretrained(described)
    (described / "tokenizer.json").write_text("{}")
    (described / "model.safetensors").write_text("verl saves one where it is told to")
    shape = tuple(int(size) for size in mesh.split("x"))
    children = []
    for rank in range(prod(shape)):
        if (child := os.fork()) == 0:
            save_rank(rank, shape, actor, folder / "store", make)
            os._exit(0)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1] != 0]
    (folder / "store").unlink(missing_ok=True)
    (folder / "data.pt").touch()
    return not failed


if __name__ == "__main__":
    sys.exit(0 if all(save(Path(sys.argv[1]) / mesh, mesh) for mesh in sys.argv[2:]) else 1)
