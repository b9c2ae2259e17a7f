"""`verl-mixed export`: write a checkpoint as a Hugging Face folder.

Chooses the checkpoint; `verl_mixed.run.hugging_face` merges and writes the weights.
"""

import argparse
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from config.disk import claimed, sync
from config.lookup import at
from samplers.rows.draft import draft_folder
from verl_mixed.commands.arguments import Help, add_flag, add_option, add_run_dir, at_least_one
from verl_mixed.exit_codes import GOOD
from verl_mixed.run.checkpoints import DType, checkpoint_of, checkpoint_steps, missing_part
from verl_mixed.run.compose import load_config
from verl_mixed.run.state import RunFolder
from verl_mixed.views.estimates import validations
from verl_mixed.views.progress import Line, sources_of

HELP = Help(
    """\
Writes the trained model of a checkpoint into one folder that transformers and vLLM load: weights
(safetensors), config, tokenizer and generation config. fp32 keeps the trainer's weights bit for
bit; bf16 rounds them once. Of a run with LoRA, base model and adapter are merged; --adapter writes
the adapter alone. The folder appears only when it is complete. A checkpoint whose writing was
interrupted is refused. No GPU is needed; the weights must fit into memory.""",
    """\
verl-mixed export runs/mixed_demo
verl-mixed export runs/mixed_demo --step 15 --dtype bf16
verl-mixed export runs/mixed_demo --step best --output models/mixed_demo
verl-mixed export runs/with_lora --adapter""",
    "0 it is written, 1 a file cannot be read or written, 2 no such run or checkpoint, or "
    "usage error",
)

LATEST, BEST = "latest", "best"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    step = "step of the checkpoint, or best: the one with the highest validation reward"
    add_option(parser, "--step", "N", step, _step, LATEST)
    folder = "folder to make; it must not exist (default RUN/export/step_<N>[-adapter]-<dtype>)"
    add_option(parser, "--output", "FOLDER", folder, Path)
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="type of the weights: fp32 as they were trained (default), or bf16 at half the size",
    )
    add_flag(
        parser, "--adapter", "write the LoRA adapter, for peft and vLLM, without the base model"
    )


def _step(text: str) -> str:
    return text if text in (LATEST, BEST) else str(at_least_one(text))


def run(arguments: argparse.Namespace) -> int:
    """Export a checkpoint."""
    export(
        RunFolder(arguments.run_dir),
        arguments.step,
        arguments.output,
        arguments.dtype,
        adapter=arguments.adapter,
    )
    return GOOD


def export(
    run: RunFolder,
    step: str = LATEST,
    output: Path | None = None,
    dtype: DType = "fp32",
    *,
    adapter: bool = False,
) -> Path:
    """Write the policy of a checkpoint, print what was written, and return the folder.

    The folder appears only when it is complete. The run may be running. `step` is as in
    `chosen_step`. `output` must not exist; None takes `export/step_<N>-<dtype>` of the run. With
    `adapter` the LoRA adapter is written alone.

    Raises:
        ValueError: no such run or checkpoint, the checkpoint is not whole or not of a causal
            model, or the output exists.
        OSError: a file cannot be read or written, or another process writes the same output.
    """
    number = chosen_step(run, step)
    name = f"step_{number}-{'adapter-' if adapter else ''}{dtype}"
    output = (output or run.path / "export" / name).absolute()
    if output.exists():
        raise ValueError(f"{output} is there already: name another --output, or remove it")

    from verl_mixed.run.hugging_face import (
        read_adapter,
        read_model,
        write_adapter,
        write_errors,
        write_model,
    )

    draft = draft_folder(output)
    with write_errors(output):
        draft.mkdir(parents=True, exist_ok=True)
    with claimed(draft) as is_ours:
        if not is_ours:
            raise BlockingIOError(f"cannot write {output}: another process writes it now")
        try:
            actor = checkpoint_of(run, number) / "actor"
            if adapter:
                base = str(at(load_config(run.config), "actor_rollout_ref.model.path"))
                config, weights = read_adapter(actor, dtype, base)
                write = partial(write_adapter, config, weights, draft)
            else:
                model, weights = read_model(actor, dtype)
                write = partial(write_model, model, weights, actor / "huggingface", draft)
            parameters = sum(weight.numel() for weight in weights.values())
            with write_errors(output):
                write()
                for file in draft.iterdir():
                    sync(file)
                draft.rename(output)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    sync(output.parent)
    size_mb = sum(file.stat().st_size for file in output.iterdir()) / 1e6
    print(f"wrote {output}: {parameters:,} parameters, {size_mb:,.1f} MB, step {number}")
    return output


def chosen_step(run: RunFolder, step: str) -> int:
    """The step of the checkpoint to export; prints why it was chosen.

    `latest` is the newest whole checkpoint. `best` is the whole checkpoint with the highest mean
    validation reward over the sources.

    Raises:
        ValueError: there is no such checkpoint, or it is not whole.
    """
    if not run.path.is_dir():
        raise ValueError(f"no {run.path}: not a run's folder; give runs/<experiment>")
    missing = {number: missing_part(checkpoint_of(run, number)) for number in checkpoint_steps(run)}
    whole = [number for number, part in missing.items() if part is None]
    others = f"whole checkpoints are {', '.join(map(str, whole))}" if whole else "none is whole"
    if step == LATEST:
        if not whole:
            reasons = "; ".join(f"step {number}: {part}" for number, part in missing.items())
            raise ValueError(f"no checkpoint to export in {run.path}: {reasons or 'there is none'}")
        print(f"step {whole[-1]} is the newest whole checkpoint")
        return whole[-1]
    if step == BEST:
        number, mean = _best(run.lines(), whole, run.path)
        print(f"step {number} is the best by validation, mean reward {mean:.4f} over the sources")
        return number
    number = int(step)
    if number not in missing:
        raise ValueError(f"no checkpoint of step={number} in {run.path}: {others}")
    if (part := missing[number]) is not None:
        raise ValueError(
            f"the checkpoint of step={number} in {run.path} is not whole: {part}; {others}"
        )
    return number


def _best(lines: Sequence[Line], whole: Sequence[int], place: Path) -> tuple[int, float]:
    """The step with the highest mean of the sources' validation rewards, and this mean."""
    by_source = [
        {one.steps[1]: one.mean for one in rewards}
        for source in sources_of(lines)
        if (rewards := validations(lines, source))
    ]
    means = {
        step: fmean(means[step] for means in by_source)
        for step in whole
        if by_source and all(step in means for means in by_source)
    }
    if not means:
        raise ValueError(
            f"no best checkpoint in {place}: no step has both a whole checkpoint and a validation; "
            "give --step N (a trainer.save_freq that is a multiple of test_freq makes both)"
        )
    best = max(means, key=lambda step: (means[step], step))  # of equal means the later step
    return best, means[best]
