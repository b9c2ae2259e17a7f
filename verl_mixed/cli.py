"""`verl-mixed`: everything the scripts do, as subcommands.

Decides words on the command line and exit codes: 0 good, 1 the thing checked is not good, 2 usage
or config error. Imports wait inside the functions, so that `--help` answers at once.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from verl_mixed.commands.words import OVERVIEW, OVERVIEW_END, add_command
from verl_mixed.exit_codes import GOOD, INTERRUPTED, NOT_GOOD, USAGE
from verl_mixed.run.text import printable

OF_MODULES = {
    "watch": "verl_mixed.views.watch.command",
    "report": "verl_mixed.views.report.command",
    "view": "verl_mixed.views.viewer.command",
}
"""Commands whose module has `add_arguments(parser)` and `run(arguments)`; imported when named."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: words after the program's name; None takes them from the process.

    Returns:
        Exit code.
    """
    words = sys.argv[1:] if argv is None else argv
    try:
        arguments = _parser(words).parse_args(words)
        if (log_file := getattr(arguments, "log_file", None)) is None:
            return _run(arguments)

        from verl_mixed.run.screen_log import copied_to

        with copied_to(log_file):
            return _run(arguments)
    except ValueError as error:  # of the command line itself
        _say_error(error)
        return USAGE


def _run(arguments: argparse.Namespace) -> int:
    try:
        return arguments.run(arguments)
    except ValueError as error:  # config.schema.ConfigError is one
        _say_error(error)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED


def _say_error(error: object) -> None:
    """One line of its own for each of the error's; none of it acts on the terminal."""
    for line in str(error).splitlines():
        print(f"error: {printable(line)}", file=sys.stderr)


def _parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of some words; kinds of data are imported only when `prepare` is among them."""
    parser = argparse.ArgumentParser(
        prog="verl-mixed",
        description=OVERVIEW,
        epilog=OVERVIEW_END,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    overrides = argparse.ArgumentParser(add_help=False)
    overrides.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides of the run config"
    )
    overrides.add_argument(
        "--config",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="agent_config.yaml or training_config.yaml in AgentFly's style; may be given twice",
    )
    overrides.add_argument(
        "--config-dir",
        type=Path,
        metavar="FOLDER",
        help="config files of your own, as mixture/mine.yaml for mixture=mine",
    )

    train = add_command(commands, "train", parents=[overrides])
    instead = train.add_mutually_exclusive_group()
    instead.add_argument(
        "--dry-run",
        action="store_true",
        help="say what the config comes to, what would happen and what is wrong, without a look at "
        "data and model; start and write nothing",
    )
    instead.add_argument(
        "--validate-only", action="store_true", help="as `verl-mixed check` of the same config"
    )
    train.add_argument(
        "--log-file",
        type=Path,
        metavar="FILE",
        help="add what is printed to this file too; a line a step then, no screen",
    )
    train.set_defaults(run=_train)

    check = add_command(commands, "check", parents=[overrides])
    check.set_defaults(run=_check)

    plan = add_command(commands, "plan", parents=[overrides])
    plan.add_argument(
        "--batches",
        type=_at_least_one,
        default=10,
        metavar="N",
        help="how many to list (default 10)",
    )
    plan.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    plan.add_argument(
        "--diff",
        type=Path,
        metavar="OTHER",
        help="a run's config.yaml or a mixture to compare with",
    )
    plan.set_defaults(run=_plan)

    prepare = commands.add_parser("prepare", help="write the parquet files of a source")
    kinds = prepare.add_subparsers(required=True, metavar="KIND")
    demo = add_command(kinds, "prepare demo")
    demo.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of data and model (default 0)"
    )
    demo.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where to (default data/demo/seed<N>)"
    )
    demo.set_defaults(run=_prepare_demo)
    smollm = add_command(kinds, "prepare smollm")
    if words[:2] == ["prepare", "smollm"]:
        pretrained = import_module("verl_mixed.prepare.pretrained")
        pretrained.add_arguments(smollm)
        smollm.set_defaults(run=pretrained.run)
    corpus = add_command(kinds, "prepare corpus")
    corpus.add_argument(
        "--input",
        type=Path,
        required=True,
        metavar="FILE",
        help='JSON lines of {"id", "contents"}, plain or gzip',
    )
    corpus.add_argument(
        "--output", type=Path, metavar="FOLDER", help="of the index (default <input>.index)"
    )
    corpus.add_argument(
        "--skip-bad", action="store_true", help="leave out, and count, lines that are no passage"
    )
    corpus.add_argument(
        "--limit", type=_at_least_one, metavar="N", help="passages to take (default all)"
    )
    corpus.set_defaults(run=_prepare_corpus)
    if words[:1] == ["prepare"]:
        _add_kinds(prepare, kinds, words[1:2])

    serve = add_command(commands, "serve-tools")
    _add_server_options(serve)
    serve.set_defaults(run=_serve_tools)

    audit = add_command(commands, "audit")
    audit.add_argument("run_dir", type=Path, metavar="RUN", help="runs/<experiment>")
    audit.set_defaults(run=_audit)

    export = add_command(commands, "export")
    export.add_argument("run_dir", type=Path, metavar="RUN", help="runs/<experiment>")
    export.add_argument(
        "--step",
        type=_step,
        default="latest",
        metavar="N",
        help="of the checkpoint; latest (default), or best: by validation, of those that are there",
    )
    export.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="one that is not there yet (default RUN/export/step_<N>-<dtype>)",
    )
    export.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="of the weights: as they were trained (default), or rounded to half the size",
    )
    export.set_defaults(run=_export)

    for name, module in OF_MODULES.items():
        command = add_command(commands, name)
        if words[:1] == [name]:
            own = import_module(module)
            own.add_arguments(command)
            command.set_defaults(run=own.run)

    stop = add_command(commands, "stop")
    stop.add_argument("run_dir", type=Path, metavar="RUN", help="runs/<experiment>")
    stop.add_argument(
        "--grace",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="for the step under way and its checkpoint (default 900; 0: do not ask)",
    )
    stop.set_defaults(run=_stop)

    limiter = add_command(commands, "limiter")
    limiter.add_argument("path", type=Path, metavar="PATH", help="runs/<experiment> or state file")
    limiter.add_argument("--json", action="store_true", help="one JSON object, no table")
    limiter.add_argument("--watch", action="store_true", help="every second, until interrupted")
    limiter.add_argument(
        "--reset", action="store_true", help="begin anew: empty bucket, full rate, counts of 0"
    )
    limiter.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="of the cluster where an actor keeps the limit (auto: the one that runs here)",
    )
    limiter.set_defaults(run=_limiter)

    doctor = add_command(commands, "doctor", parents=[overrides])
    doctor.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    doctor.add_argument(
        "--locks",
        type=Path,
        metavar="FOLDER",
        help="try locks on a shared folder between all nodes of the Ray cluster",
    )
    doctor.add_argument(
        "--ray",
        type=_ray_address,
        metavar="ADDRESS",
        help="cluster to look at, ip:port, or auto for the one that runs here (default: that of "
        "MASTER_IP or RAY_ADDRESS, if any)",
    )
    doctor.set_defaults(run=_doctor)

    diagnose = add_command(commands, "diagnose")
    if words[:1] == ["diagnose"]:
        from verl_mixed.diagnose.diagnose import add_options as add_diagnose_options

        add_diagnose_options(diagnose)
    diagnose.set_defaults(run=_diagnose)
    return parser


def _add_kinds(prepare: argparse.ArgumentParser, kinds: Any, named: Sequence[str]) -> None:
    """Add a subcommand for every kind that comes with the project, and for one named by path."""
    from samplers.rows.sources import KINDS, kind_of
    from verl_mixed.prepare.rows import DESCRIPTION, EXAMPLES, add_options

    as_written = argparse.RawDescriptionHelpFormatter
    prepare.description, prepare.epilog = DESCRIPTION, EXAMPLES
    prepare.formatter_class = as_written
    own = {name: kind_of(name) for name in named if name.endswith(".py")}
    for name, kind in (KINDS | own).items():
        command = kinds.add_parser(
            name,
            help=kind.help.replace("%", "%%"),
            description=f"{kind.help}\n\n{DESCRIPTION}",
            formatter_class=as_written,
        )
        add_options(command, kind)
        command.set_defaults(run=_prepare_kind, kind=kind)


def _add_server_options(serve: argparse.ArgumentParser) -> None:
    """Options named as the fields of `ServerSettings`; who is not given keeps its default there."""
    serve.add_argument(
        "--ready-file",
        type=Path,
        metavar="FILE",
        help="gets url and pid once the server listens",
    )
    serve.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="holds the token that callers must send (default: $TOOL_SERVER_TOKEN, where it is "
        "set; else everybody may call)",
    )

    serve.add_argument(
        "--settings",
        type=json.loads,
        default={},
        metavar="JSON",
        help="settings by the names they have in agent_loop/tools/server/settings.py",
    )

    def add(option: str, dest: str, **words: Any) -> None:
        serve.add_argument(option, dest=dest, default=argparse.SUPPRESS, **words)

    add("--host", "host", metavar="ADDRESS", help="address to listen on (default 127.0.0.1)")
    add("--port", "port", type=int, metavar="N", help="0 takes a free one (default 8100)")
    add(
        "--corpus",
        "corpus_path",
        type=Path,
        metavar="PATH",
        help='index of `prepare corpus`, or JSON lines of {"id", "contents"}, for search',
    )
    add(
        "--search-upstream",
        "search_upstream",
        metavar="URL",
        help="search there instead: Search-R1's server, or https://google.serper.dev/search with "
        "its key in $SERPER_API_KEY",
    )
    add(
        "--search-upstream-kind",
        "search_upstream_kind",
        choices=("auto", "search_r1", "serper"),
        help="auto: a URL that ends in /search is Serper's",
    )
    add(
        "--search-timeout",
        "search_timeout_s",
        type=float,
        metavar="SECONDS",
        help="of one such search (default 30)",
    )
    add(
        "--search-workers",
        "search_workers",
        type=_at_least_one,
        metavar="N",
        help="threads that search an own index (default 2)",
    )
    add(
        "--sandbox",
        "sandbox",
        choices=("auto", "bubblewrap", "landlock", "rlimits"),
        help="auto: the strongest that works here; rlimits does not isolate",
    )
    add(
        "--sandbox-workers",
        "sandbox_workers",
        type=_at_least_one,
        metavar="N",
        help="programs run at once (default 2)",
    )
    add(
        "--sandbox-packages",
        "sandbox_packages",
        nargs="+",
        metavar="NAME",
        help="installed packages that programs may import, as numpy and sympy (default none)",
    )
    add(
        "--max-sessions",
        "max_sessions",
        type=int,
        metavar="N",
        help="persistent interpreters kept (default 64)",
    )
    add(
        "--session-idle",
        "session_idle_s",
        type=float,
        metavar="SECONDS",
        help="until one that nobody uses ends (default 900)",
    )
    add(
        "--queue-length",
        "queue_length",
        type=int,
        metavar="N",
        help="requests of a tool that may wait; others get 429 (default 20000)",
    )
    add(
        "--algebra-workers",
        "algebra_workers",
        type=_at_least_one,
        metavar="N",
        help="processes for algebra, of about 70 MB (default 2)",
    )
    add(
        "--algebra-seconds",
        "algebra_s",
        type=float,
        metavar="SECONDS",
        help="limit of one expression (default 5)",
    )
    add(
        "--algebra-memory-mb",
        "algebra_memory_mb",
        type=int,
        metavar="MB",
        help="limit of one expression (default 1024)",
    )
    add(
        "--drain-seconds",
        "drain_s",
        type=float,
        metavar="SECONDS",
        help="how long requests under way may take to end after SIGTERM (default 10)",
    )
    add(
        "--max-body-mb",
        "max_body_mb",
        type=_at_least_one,
        metavar="MB",
        help="of a request (default 64)",
    )
    add(
        "--limiter",
        "limiter_path",
        type=Path,
        metavar="FILE",
        help="a limiter's state file, shown at /metrics",
    )


def _at_least_one(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: want a whole number, 1 at least")
    return number


def _step(text: str) -> str:
    return text if text in ("latest", "best") else str(_at_least_one(text))


def _ray_address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if text != "auto" and not (host and port.isdigit() and "/" not in host):
        raise argparse.ArgumentTypeError(f"{text!r}: want ip:port, or auto")
    return text


def _overrides(arguments: argparse.Namespace) -> list[str]:
    """What Hydra is told on the command line, after what `--config` files come to."""
    given = list(arguments.overrides)
    if (folder := arguments.config_dir) is not None:
        if not folder.is_dir():
            raise ValueError(f"--config-dir {folder}: no such folder; correct the name")
        given.insert(0, f"hydra.searchpath=['file://{folder.absolute()}']")
    if not arguments.config:
        return given
    from verl_mixed.agentfly.files import translate_files

    translation = translate_files(arguments.config, given, os.environ)
    is_run = arguments.run is _train and not arguments.validate_only
    for line in translation.lines:  # stdout has the config, or JSON, of the other commands
        print(printable(line), file=sys.stdout if is_run else sys.stderr)
    return [*translation.overrides, *given]


def _train(arguments: argparse.Namespace) -> int:
    if arguments.validate_only:
        return _check(arguments)
    overrides = _overrides(arguments)
    if arguments.dry_run:
        from verl_mixed.launch.dry_run import dry_run

        lines, problems = dry_run(overrides, os.environ, arguments.config)
        for line in lines:
            print(printable(line))
        return _say_problems(problems)
    from verl_mixed.launch.launcher import train

    return train(overrides, config_files=arguments.config)


def _check(arguments: argparse.Namespace) -> int:
    from omegaconf import OmegaConf

    from verl_mixed.checks.config.prompts import first_prompts
    from verl_mixed.launch.dry_run import still_to_make
    from verl_mixed.launch.launcher import make_plan

    plan = make_plan(_overrides(arguments), os.environ)
    lacking = still_to_make(plan)
    problems = plan.problems(data=not lacking, machine=False)
    print(OmegaConf.to_yaml(OmegaConf.create(plan.config)))
    if not lacking:
        for source, prompt in first_prompts(plan.config).items():
            print(f"--- first prompt of source={source}\n{prompt}\n---\n")
    else:
        print(f"note: {'; '.join(lacking)}; data and model were not looked at")
    return _say_problems(problems)


def _say_problems(problems: Sequence[str]) -> int:
    """Name them; the exit code of a check that found them."""
    for problem in problems:
        print(f"problem: {printable(problem)}", file=sys.stderr)
    print(f"{len(problems)} problems" if problems else "no problems", file=sys.stderr)
    return USAGE if problems else GOOD


def _plan(arguments: argparse.Namespace) -> int:
    import json

    from verl_mixed.commands.plan_report import compare, other_report, report_of
    from verl_mixed.commands.plan_words import as_json, describe, describe_diff
    from verl_mixed.launch.dry_run import still_to_make
    from verl_mixed.launch.launcher import is_made, make_plan

    run = make_plan(_overrides(arguments), os.environ)
    made = run.demo is None or is_made(run.demo)
    unknown = None if made else "; ".join(still_to_make(run))
    report = report_of(run.config, batches=arguments.batches, rows_unknown=unknown)
    diff = None
    if arguments.diff is not None:
        other = other_report(
            arguments.diff, run.config, batches=arguments.batches, rows_unknown=unknown
        )
        diff = compare(str(arguments.diff), report, other)
    if arguments.json:
        print(json.dumps(as_json(report, diff)))
        return GOOD
    print("\n".join(describe(report)))
    if diff is not None:
        print("\n".join(["", *describe_diff(diff)]))
    return GOOD


def _prepare_demo(arguments: argparse.Namespace) -> int:
    from agent_loop.cpu.models.demo import WarmStartError, prepare_demo
    from verl_mixed.launch.launcher import demo_folder

    out = arguments.out or demo_folder(arguments.seed)
    try:
        prepare_demo(out, arguments.seed, progress=lambda line: print(line, flush=True))
    except (WarmStartError, OSError) as error:
        _say_error(error)
        return NOT_GOOD
    return GOOD


def _prepare_corpus(arguments: argparse.Namespace) -> int:
    from verl_mixed.prepare.corpus import prepare_corpus

    try:
        prepare_corpus(
            arguments.input, arguments.output, skip_bad=arguments.skip_bad, limit=arguments.limit
        )
    except FileNotFoundError as error:
        _say_error(error)
        return USAGE
    except OSError as error:
        _say_error(error)
        return NOT_GOOD
    return GOOD


def _prepare_kind(arguments: argparse.Namespace) -> int:
    from samplers.rows.prepare import Choice
    from samplers.rows.records import BadData
    from verl_mixed.prepare.rows import options_of, prepare_files, tokenizer_of

    try:
        prepare_files(
            arguments.kind,
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
            options=options_of(arguments.kind, arguments),
            source=arguments.source,
            agent=arguments.agent,
            tokenizer=tokenizer_of(arguments.tokenizer) if arguments.tokenizer else None,
            skip_bad=arguments.skip_bad,
        )
    except (FileNotFoundError, IsADirectoryError) as error:
        _say_error(error)
        return USAGE
    except (BadData, OSError) as error:
        _say_error(error)
        return NOT_GOOD
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    return GOOD


def _serve_tools(arguments: argparse.Namespace) -> int:
    from agent_loop.tools.server import ServerSettings, serve

    given = {
        name: value
        for name, value in vars(arguments).items()
        if name in ServerSettings.model_fields
    }
    token = _server_token(arguments.token_file)
    settings = ServerSettings.model_validate(arguments.settings | given | {"token": token})
    try:
        serve(settings, ready_file=arguments.ready_file)
    except OSError as error:
        _say_error(f"cannot serve on {settings.host}:{settings.port}: {error}")
        return NOT_GOOD
    return GOOD


def _server_token(token_file: Path | None) -> str | None:
    """What a file or the environment has as the tool server's token."""
    if token_file is None:
        return os.environ.get("TOOL_SERVER_TOKEN") or None
    try:
        return token_file.read_text().strip()
    except OSError as error:
        raise ValueError(f"cannot read --token-file {token_file}: {error.strerror}") from error


def _audit(arguments: argparse.Namespace) -> int:
    from verl_mixed.run.audit import audit_run, describe
    from verl_mixed.run.compose import load_config
    from verl_mixed.run.state import RunFolder

    folder = RunFolder(arguments.run_dir)
    report = audit_run(folder, load_config(folder.config))
    print("\n".join(describe(report)))
    return GOOD if report.ok else NOT_GOOD


def _export(arguments: argparse.Namespace) -> int:
    from verl_mixed.commands.export import export
    from verl_mixed.run.state import RunFolder

    try:
        made = export(
            RunFolder(arguments.run_dir), arguments.step, arguments.output, arguments.dtype
        )
    except OSError as error:
        _say_error(error)
        return NOT_GOOD
    print(
        f"wrote {made.folder}: {made.parameters:,} parameters, {made.size_bytes / 1e6:,.1f} MB, "
        f"step {made.step}"
    )
    return GOOD


def _stop(arguments: argparse.Namespace) -> int:
    from verl_mixed.launch.stop import stop
    from verl_mixed.run.state import RunFolder, RunHeld

    try:
        ended = stop(RunFolder(arguments.run_dir), arguments.grace)
    except RunHeld as error:
        _say_error(error)
        return NOT_GOOD
    return GOOD if ended else NOT_GOOD


def _limiter(arguments: argparse.Namespace) -> int:
    from verl_mixed.views.limiter import show

    try:
        show(
            arguments.path,
            as_json=arguments.json,
            watch=arguments.watch,
            anew=arguments.reset,
            ray_address=arguments.ray,
        )
    except OSError as error:
        _say_error(error)
        return USAGE
    return GOOD


def _doctor(arguments: argparse.Namespace) -> int:
    from verl_mixed.checks.finding import as_json, report
    from verl_mixed.commands.doctor import examine

    findings = examine(_overrides(arguments), ray_address=arguments.ray, locks=arguments.locks)
    if arguments.json:
        print(as_json(findings))
    else:
        report(findings)
    return NOT_GOOD if any(finding.status == "bad" for finding in findings) else GOOD


def _diagnose(arguments: argparse.Namespace) -> int:
    from verl_mixed.diagnose.diagnose import run

    return run(arguments)
