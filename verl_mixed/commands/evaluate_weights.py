"""Which weights `verl-mixed evaluate` evaluates: their identity, and the export of a checkpoint.

An identity is a few words that are equal only for the same weights. It is kept in the folder of an
evaluation, so that records of other weights are not reported as those of the weights that were
named. Weights in files are known by path, size and time of writing; their content is not read.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from agent_loop.records.run_folder import write_text
from verl_mixed.commands.export import export
from verl_mixed.run.checkpoints import checkpoint_of, model_files
from verl_mixed.run.state import RunFolder

Identity = dict[str, str]
"""What the weights are known by -> its value."""

LOADED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".jinja", ".model", ".txt"}
"""Suffixes of the files of a Hugging Face folder that make an answer: weights, config, tokenizer,
chat template."""


def identity_of_server(base_url: str, model: str) -> Identity:
    """The identity of a model at a server."""
    return {"base_url": base_url, "model": model}


def identity_of_model(model: str) -> Identity:
    """The identity of a Hugging Face folder; a model on a hub is known by its name alone."""
    folder = Path(model)
    if not folder.is_dir():
        return {"model": model}
    files = (file for file in folder.iterdir() if file.suffix in LOADED and file.is_file())
    return {"model": str(folder.resolve())} | _written(files)


def identity_of_checkpoint(run: RunFolder, step: int) -> Identity:
    """The identity of a whole checkpoint. A step that is trained again has another one."""
    actor = checkpoint_of(run, step) / "actor"
    beside = (file for file in (actor / "huggingface").iterdir() if file.is_file())
    return {"step": str(step)} | _written([*model_files(actor), *beside])


def _written(files: Iterable[Path]) -> Identity:
    """Name -> size and time of writing of each file."""
    found: Identity = {}
    for file in sorted(files):
        facts = file.stat()
        found[f"file {file.name}"] = f"{facts.st_size} bytes of mtime_ns={facts.st_mtime_ns}"
    return found


def exported(run: RunFolder, step: int) -> Path:
    """The checkpoint of a step as a Hugging Face folder, exported if it is not yet.

    An export of an earlier checkpoint of the same step is moved aside, because it may be the only
    copy of those weights, and the step is exported again. The identity of the exported checkpoint
    is in a file beside the folder. An export without this file was made by `verl-mixed export`; it
    is used if it is newer than the checkpoint.
    """
    folder = run.path / "export" / f"step_{step}-fp32"
    note = folder.with_name(f"{folder.name}.checkpoint.json")
    identity = identity_of_checkpoint(run, step)
    if folder.exists() and not _is_of(run, step, folder, note, identity):
        old = _free_name(folder)
        folder.rename(old)
        print(f"{folder} is of an earlier checkpoint of step {step}: moved to {old}")
    if not folder.exists():
        note.unlink(missing_ok=True)
        export(run, str(step), folder)
    write_text(note, json.dumps(identity, indent=1) + "\n")
    return folder


def _is_of(run: RunFolder, step: int, folder: Path, note: Path, identity: Identity) -> bool:
    """Whether an export is of the checkpoint that the run has now."""
    try:
        return json.loads(note.read_text()) == identity
    except FileNotFoundError:
        files = model_files(checkpoint_of(run, step) / "actor")
        newest = max(file.stat().st_mtime_ns for file in files)
        return all(file.stat().st_mtime_ns >= newest for file in folder.glob("*.safetensors"))


def _free_name(folder: Path) -> Path:
    number = 1
    while (name := folder.with_name(f"{folder.name}.old{number}")).exists():
        number += 1
    return name
