"""Each command and setting that `diagnose`, the pages and our messages name can be typed so.

tests/release/test_docs.py looks at the names in the pages one by one. Here whole commands are
parsed, and the remedies of verl_mixed/diagnose/known/ are read word for word.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.accepted import ROOT, is_shell, refusals
from tests.release import test_docs as docs
from verl_mixed.diagnose.signatures import SIGNATURES

OURS = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:env |exec )?(?:verl-mixed|\./\w+\.sh|\w+/\w+\.sh|ray|python3? -m) "
)
"""How a text begins that is a command of ours or of Ray."""

SYNOPSIS = re.compile(r"[\[<]|\.\.\.|\w\|\w")
"""A text with these shows a form, not a command."""

STAND_FOR = {"KIND": "math", "COMMAND": "watch RUN"} | dict.fromkeys(("N", "SECONDS", "PORT"), "1")
"""Words of a form, and one of the words that a reader types there."""

LOOKED_UP = {"HF_DATASETS_": "datasets", "HF_": "huggingface_hub", "WANDB_": "wandb"}
"""Beginning of a variable of another program -> the installed package whose files have it."""

NOT_INSTALLED = (
    *("CUDA_", "NCCL_", "GLOO_", "VLLM_", "PYTORCH_", "TORCH_", "SLURM_", "SGL_", "APEX_", "NVTE_"),
    *("HSA_", "AMD_", "TRITON_", "ENROOT_", "NVIDIA_", "CURL_CA_BUNDLE", "MAX_JOBS", "LOCAL_RANK"),
    *("RAY_JOB_START_TIMEOUT_SECONDS", "RAY_OVERRIDE_JOB_RUNTIME_ENV"),
)
"""Beginnings of variables of programs that not every machine has, or whose names are in C++."""

NO_VARIABLES = {"ROW_REMAPPER", "NVML_SUCCESS"}
"""Words of nvidia-smi and NVML that look like variables."""

OPEN_KEYS = (
    "actor_rollout_ref.rollout.engine_kwargs.",
    "actor_rollout_ref.rollout.limit_images",
    "actor_rollout_ref.actor.fsdp_config.wrap_policy.",
    "actor_rollout_ref.actor.megatron.override_transformer_config.",
    "ray_kwargs.ray_init.",
)
"""Beginnings of keys that verl hands on without a list of them, typed with a + before them."""


@cache
def remedies() -> dict[str, str]:
    return {one.id: one.remedy for one in SIGNATURES}


def code_in(text: str) -> list[str]:
    """The spans between backticks."""
    return re.findall(r"`([^`]+)`", text)


def bare_words(text: str) -> list[str]:
    """The words outside of backticks, without the marks of a sentence."""
    words = re.sub(r"`[^`]*`", " ", text).split()
    return [word.strip("(),;:'\"").removesuffix(".").removesuffix("/") for word in words]


def said_by_code() -> Iterator[tuple[str, str]]:
    """The commands in backticks or quotes in the texts of our modules and scripts; `1`
    stands for what is filled in."""
    for path in sorted(ROOT.glob("*/**/*.py")):
        top = path.parts[len(ROOT.parts)]
        if top in ("tests", "docs") or top.startswith("."):  # .venv, and .cache of the long tests
            continue
        source = path.read_text(encoding="utf-8")
        if not re.search(r"`(?:verl-mixed|ray|\./)", source):
            continue
        for text in _texts(ast.parse(source)):
            yield from ((path.name, span) for span in code_in(text))
    for path in (*ROOT.glob("*.sh"), *ROOT.glob("cluster/**/*.sh")):
        text = path.read_text(encoding="utf-8")
        text = re.sub(
            r"\$\{0##\*/\}", "./run_mixed_training.sh", re.sub(r"\"\s*\\\n\s*\"", " ", text)
        )
        for span in re.findall(r"'(\./[^'\n]+)'", text):
            yield path.name, re.sub(r"\$(\{[^}]*\}+|\w+)|\$\(.*\)", "1", span)


def _texts(tree: ast.Module) -> Iterator[str]:
    """The texts of a module; its docstrings have no commands to type."""
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "1" for part in node.values
            )
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts
        ):
            yield node.value


WANTS_MORE = re.compile(r"arguments are required|Missing argument|requires an argument")


def typed(text: str) -> str:
    """A command as a reader types it: a number for `N`, one choice of several."""
    text = re.sub(r"<[\w -]+>", "X", text)
    for name, word in STAND_FOR.items():
        text = re.sub(rf"(?<=[ =]){name}\b", word, text)
    return re.sub(r"\{(\w+),[^}]*\}", r"\1", text.replace("\\|", "|"))


def refused(text: str, *, is_mention: bool = False) -> list[str]:
    """Why a command would be refused. A mention names a command or one of its options, and leaves
    out the other words that the command wants."""
    try:
        found = refusals(typed(text))
    except ValueError as error:
        return [f"{text}: {error}"]
    if is_mention and found and WANTS_MORE.search(found[0]):
        words = text.split()
        program = " ".join(words[:2]).replace(" prepare", " prepare math")
        known = docs.help_of(program) if words[0] == "verl-mixed" and len(words) > 1 else ""
        unknown = set(docs.OPTION.findall(text)) - set(docs.OPTION.findall(known))
        return [f"{text}: {one}" for one in sorted(unknown)] if known else []
    return found


def test_every_command_of_a_remedy_is_accepted() -> None:
    wrong = [
        f"{name}: {why}"
        for name, remedy in remedies().items()
        for span in code_in(remedy)
        if (" " in span and not span.startswith(("/", "--", "#"))) or OURS.match(f"{span} ")
        for why in refused(span, is_mention=True)
    ]
    assert wrong == []


def test_every_command_of_a_page_is_accepted() -> None:
    wrong = [
        f"{quote.page}: {why}"
        for quote in docs.ALL
        if not quote.is_block and OURS.match(quote.text) and not SYNOPSIS.search(quote.text)
        for why in refused(quote.text, is_mention=True)
    ]
    assert wrong == []


@pytest.mark.slow
def test_every_command_of_a_message_is_accepted() -> None:
    wrong = [
        f"{place}: {why}"
        for place, span in said_by_code()
        if OURS.match(f"{span} ") and not SYNOPSIS.search(span)
        for why in refused(span, is_mention=True)
    ]
    assert wrong == []


def shell_blocks() -> Iterator[tuple[str, str]]:
    for page in docs.PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for kind, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.M | re.S):
            if kind == "bash":
                yield page, block


def test_every_block_of_commands_is_shell_and_every_command_in_it_is_accepted() -> None:
    wrong = []
    for page, block in shell_blocks():
        lines = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
        for line in lines:
            line = re.sub(r"(\s|^)#.*", "", line)
            choices = re.sub(r"^(\S+\.sh) (\S+(?: -f)?(?: \| \S+(?: -f)?)+)$", r"\1 \2", line)
            script, _, rest = choices.partition(" ")
            each = (
                [f"{script} {one}" for one in rest.split(" | ")]
                if script.endswith(".sh")
                else [line]
            )
            wrong += [f"{page}: {why}" for one in each for why in refused(one)]
    assert wrong == []
    assert is_shell("\n".join(typed(block).replace("...", "") for _, block in shell_blocks())) == ""


@cache
def installed_text(package: str) -> str:
    files = distribution(package).files or []
    return "\n".join(
        Path(str(file.locate())).read_text(encoding="utf-8", errors="replace")
        for file in files
        if file.suffix == ".py" and re.search(r"env|const|config|option", file.name)
    )


@cache
def flags_of_ray() -> bytes:
    """Ray's compiled module, which holds the names of the flags that RAY_<flag> sets."""
    from ray import _raylet  # pyright: ignore[reportAttributeAccessIssue]

    return Path(_raylet.__file__).read_bytes()


@cache
def in_our_code() -> set[str]:
    return set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", docs.code()))


def is_variable(name: str) -> bool:
    if name in in_our_code() | NO_VARIABLES or name.startswith(NOT_INSTALLED):
        return True
    if name.startswith("RAY_") and name.removeprefix("RAY_").encode() in flags_of_ray():
        return True
    return any(
        name.startswith(prefix) and name in installed_text(package)
        for prefix, package in LOOKED_UP.items()
    )


def test_every_variable_of_a_remedy_is_read_by_someone() -> None:
    wrong = [
        f"{name}: {variable}"
        for name, remedy in remedies().items()
        for variable in re.findall(r"(?<![\w/{$-])[A-Z][A-Z0-9]*_[A-Za-z0-9_]+(?![\w>*-])", remedy)
        if not is_variable(variable)
    ]
    assert wrong == []


def key_problems(word: str) -> Iterator[str]:
    """What keeps a word that looks like a key of the run config from being one."""
    found = docs.KEY.fullmatch(word)
    roots = {key.split(".")[0] for key in docs.config_keys()} | docs.ABBREVIATED.keys()
    if found is None or word.endswith(docs.FILE_ENDINGS):
        return
    root = found[1].split(".")[0]
    if root not in roots | {"actor", "rollout", "optim"}:
        return
    if root in docs.ABBREVIATED:
        yield f"{found[1]} is short for another key"
    for key in docs.expanded(found[1]):
        if not docs.is_key(key) and not key.startswith(OPEN_KEYS):
            yield f"no key {key}"


@pytest.mark.slow
def test_every_key_of_a_remedy_is_a_key_of_the_run_config_in_full() -> None:
    wrong = [
        f"{name}: {problem}"
        for name, remedy in remedies().items()
        for word in (*bare_words(remedy), *" ".join(code_in(remedy)).split())
        for problem in key_problems(word)
    ]
    assert wrong == []
