"""Checks of the Ray that a run joins or starts: its answer, its nodes, and room for the run."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

from cluster.placement import Node, need_of, own_node, placement_problems
from cluster.ray_cluster import ClusterUnreachable, ask
from config.lookup import at, files_at
from verl_mixed.checks.config.devices import cuda_devices
from verl_mixed.checks.finding import Finding, bad, from_problem, ok, warning
from verl_mixed.checks.machine.machine import GB, LEAST_DISK_GB
from verl_mixed.checks.machine.probe import ask_probe
from verl_mixed.checks.machine.storage import MODEL_KEY
from verl_mixed.run.compose import unset_keys

PROBE_S = 30.0
SHARED_S = 15.0
"""Added to the deadline if the run's folder is looked at on all nodes."""

LOCKS_S = 120.0
"""Added to the deadline if locks are tried, between all pairs of nodes in turn."""

MOST_SKEW_S = 1.0

_ENV = "source ~/.verl_mixed/<cluster>/env, as every shell on the nodes has it"


def own(config: Mapping[str, Any]) -> list[Finding]:
    """Whether the run fits on the Ray that it starts here."""
    found = [ok("ray", "no cluster is named: a run starts its own here")]
    if (need := need_of(config)) is None:
        return found  # preflight reports why
    return found + _placed(need, [own_node(config, cuda_devices)])


def _placed(need: Any, nodes: Sequence[Node]) -> list[Finding]:
    problems = placement_problems(need, nodes)
    if problems:
        return [from_problem("placement", problem) for problem in problems]
    words = (
        f"it takes {need.gpus} logical GPUs and {need.cpus} logical CPUs of "
        f"{sum(node.gpus for node in nodes):g} and {sum(node.cpus for node in nodes):g}"
    )
    return [ok("placement", words)]


def cluster_problems(config: Mapping[str, Any], address: str) -> list[str]:
    """Why a run cannot start on the cluster at an address, in one question to the head."""
    try:
        cluster = ask(address)
    except ClusterUnreachable as error:
        return [str(error)]
    nodes, wanted = cluster.nodes, at(config, "trainer.nnodes")
    need = need_of(config)
    problems = []
    if isinstance(wanted, int) and len(nodes) < wanted:
        problems.append(
            f"trainer.nnodes={wanted!r}: the cluster at {address} has {len(nodes)} nodes "
            f"({', '.join(node.ip for node in nodes)}); start the others with "
            "`./setup_cluster.sh setup`, or take them out of WORKER_NODES"
        )
    elif need is not None:
        problems += placement_problems(need, [node.whole for node in nodes])
        left = [node.free for node in nodes]
        if cluster.jobs and not problems and placement_problems(need, left):
            problems.append(
                f"the cluster at {address} has no room beside its jobs "
                f"({'; '.join(cluster.jobs)}): the run takes {need.gpus} logical GPUs and "
                f"{need.cpus} logical CPUs; stop one (`./run_mixed_training.sh stop`), or wait"
            )
    return problems


def shared_problems(folder: Path, address: str, environ: Mapping[str, str]) -> list[str]:
    """Why a run on several nodes cannot use this folder, seen by a task on each node.

    Every training process writes its part of a checkpoint on its own node, and verl's trainer may
    be on any of them. A resumed run reads all parts.
    """
    question = {"address": address, "files": [], "folders": [], "locks": None}
    answers, _ = _ask({**question, "shared": str(folder.absolute())}, environ)
    return [sentence for answer in answers for sentence in _not_shared(answer)]


def _not_shared(answer: Mapping[str, Any]) -> Iterator[str]:
    if answer["stage"] != "shared":
        return
    folder = answer["folder"]
    if answer["unwritable"]:
        yield f"{folder}: cannot write: {answer['unwritable']}; change its owner, or free space"
    elif answer["other"]:
        nodes = ", ".join(f"{ip} ({found})" for ip, found in answer["other"].items())
        yield (
            f"{folder} is not the same folder on every node: a file that was written here is not "
            f"on {nodes}. Each node writes its part of a checkpoint there, and a resumed run reads "
            "all; mount one folder there on all nodes (SHARED_DIRS of setup_cluster.sh checks it), "
            "or train on one node (NNODES=1)"
        )


def token_of(environ: Mapping[str, str]) -> str | None:
    """Where this shell's token comes from; None where it has none."""
    if environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    given = environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(given) if given else Path(environ.get("HOME", "~")).expanduser() / ".ray/auth_token"
    try:
        return str(path) if path.read_text().strip() else None
    except OSError:
        return None


def joined(
    address: str,
    config: Mapping[str, Any] | None,
    environ: Mapping[str, str],
    *,
    data: bool = True,
    locks: Path | None = None,
    shared: Path | None = None,
) -> list[Finding]:
    """The cluster at an address.

    Args:
        address: `ip:port`, or `auto` for the one that runs here.
        config: the resolved run config; None where it could not be composed.
        environ: with RAY_AUTH_MODE and the token's place.
        data: look for data files and model on the nodes; False where they are still to be made.
        locks: a folder whose locks are tried between all nodes.
        shared: a folder that must be the same on all nodes.
    """
    mode, token = environ.get("RAY_AUTH_MODE", ""), token_of(environ)
    if mode == "token" and token is None:
        place = environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
        return [bad("ray", f"RAY_AUTH_MODE=token and no token in {place}", _ENV)]
    question = {
        "address": address,
        "files": _files(config) if data else [],
        "folders": _folders(config),
        "locks": None if locks is None else str(locks.absolute()),
        "shared": None if shared is None else str(shared.absolute()),
    }
    answers, late_s = _ask(question, environ)
    seen = {answer["stage"]: answer for answer in answers}
    address = seen.get("address", {}).get("address", address)
    if "refused" in seen:
        return [_refusal(address, seen["refused"], mode, token)]
    findings = list(_versions(seen.get("metadata", {})))
    if "nodes" not in seen:
        why = f"no answer within {late_s:g} s" if late_s else "it gave no list of its nodes"
        findings.append(bad("ray", f"{address}: {why}", "see `./setup_cluster.sh status`, logs"))
        return findings
    findings += _nodes(address, seen, config)
    if "not joined" in seen:
        words = f"what is on the nodes was not looked at: {seen['not joined']['words']}"
        remedy = "run the doctor on a node of the cluster (`./setup_cluster.sh doctor`)"
        findings.append((bad if locks else warning)("on nodes", words, remedy))
    findings += _on_nodes(answers)
    if "shared" in seen and seen["shared"]["nodes"] != 1:
        faults = [from_problem("shared", problem) for problem in _not_shared(seen["shared"])]
        same = f"{shared} is one folder on {seen['shared']['nodes']} nodes"
        findings += faults or [ok("shared", same)]
    if "locks" in seen:
        faults = [from_problem("locks", problem) for problem in seen["locks"]["problems"]]
        agree = f"{locks}: locks, contents, clocks agree on {seen['locks']['nodes']} nodes"
        findings += faults or [ok("locks", agree)]
    if late_s:
        words = f"not all was asked within {late_s:g} s"
        findings.append(bad("on nodes", words, "see `ray status` and the logs of the nodes"))
    return findings


def _ask(
    question: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[list[dict[str, Any]], float]:
    """The probe's answers, and its deadline where it was not done by then, else 0."""
    deadline_s = PROBE_S + LOCKS_S * (question["locks"] is not None)
    deadline_s += SHARED_S * (question.get("shared") is not None)
    words = ["verl_mixed.checks.machine.ray_probe"]
    return ask_probe(words, environ, deadline_s, json.dumps(question))


def _files(config: Mapping[str, Any] | None) -> list[str]:
    """What each node must be able to read."""
    if config is None or unset_keys(config):
        return []
    model = Path(str(at(config, MODEL_KEY))).expanduser()
    files = files_at(config, "data.train_files") + files_at(config, "data.val_files")
    paths = [os.path.abspath(file) for file in files]
    return [*paths, str(model / "config.json")] if model.is_absolute() else paths


def _folders(config: Mapping[str, Any] | None) -> list[str]:
    """Where each node must be able to write."""
    given = None if config is None else at(config, "trainer.default_local_dir")
    return [os.path.abspath(str(given))] if given else []


def _refusal(address: str, refused: Mapping[str, Any], mode: str, token: str | None) -> Finding:
    words, why = refused["words"], refused["why"]
    if why == "none":
        return bad("ray", f"no Ray cluster runs here: {words}", "./setup_cluster.sh setup")
    if why == "socket":
        remedy = "./setup_cluster.sh setup, or correct MASTER_IP and RAY_PORT"
        return bad("ray", f"nothing answers at {address}: {words}", remedy)
    if why == "token":
        ours = f"the one of {token}" if mode != "disabled" and token else "none"
        words = f"{address} wants another token than ours ({ours}, RAY_AUTH_MODE={mode or 'unset'})"
        return bad("ray", f"{words}: InvalidAuthToken", _ENV)
    return bad("ray", f"{address} answers, and not as Ray: {words}", "correct MASTER_IP, RAY_PORT")


def _versions(metadata: Mapping[str, Any]) -> Iterator[Finding]:
    """Ray and Python must be the same on driver and cluster."""
    remedy = "use the environment that the cluster was started with (CONDA_ENV, VENV)"
    for package, ours in {"ray": version("ray"), "python": python_version()}.items():
        theirs = metadata.get(f"{package}_version", ours)
        if theirs != ours:
            words = f"the cluster has {package} {theirs}, this shell {ours}"
            yield bad("ray", words, remedy)


def _nodes(
    address: str, seen: Mapping[str, Mapping[str, Any]], config: Mapping[str, Any] | None
) -> list[Finding]:
    nodes, jobs = seen["nodes"]["nodes"], seen["nodes"]["jobs"]
    free = seen.get("free", {}).get("nodes", {})
    alive = [node for node in nodes if node["alive"]]
    number = seen.get("metadata", {}).get("ray_version", "?")
    findings = [ok("ray", f"{address}: Ray {number}, {len(alive)} nodes are alive")]
    findings += [ok("node", _described(node, free.get(node["node_id"]))) for node in alive]
    back = {node["ip"] for node in alive}
    for node in nodes:
        if not node["alive"] and node["ip"] not in back:
            words = f"{_name(node)} is dead: {node['why_dead'] or 'no reason given'}"
            remedy = "bring it back with `./setup_cluster.sh setup`, or take it out of WORKER_NODES"
            findings.append(warning("node", words, remedy))
    if jobs:
        findings.append(ok("ray", f"it has jobs: {'; '.join(jobs)}"))
    need = None if config is None else need_of(config)
    if need is None:
        return findings
    all_of = [Node(cpus=node["cpus"], gpus=node["gpus"], name=node["ip"]) for node in alive]
    left = [
        Node(cpus=own.get("CPU", 0.0), gpus=own.get("GPU", 0.0))
        for own in (free.get(node["node_id"], {}) for node in alive)
    ]
    placed = _placed(need, all_of)
    if free and placed[0].status == "ok" and placement_problems(need, left):
        words = f"{placed[0].words}: there is room, and others use it now"
        placed = [warning("placement", words, "end their work (`ray status`), or wait")]
    return findings + placed


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['ip']} ({node['hostname']}{', head' if node['is_head'] else ''})"


def _described(node: Mapping[str, Any], free: Mapping[str, float] | None) -> str:
    """A node with its resources, and how many are in use where that is known."""
    cpus, gpus = f"{node['cpus']:g} CPUs", f"{node['gpus']:g} GPUs"
    if free is None:
        return f"{_name(node)}: {cpus}, {gpus}"
    used_cpus, used_gpus = node["cpus"] - free.get("CPU", 0), node["gpus"] - free.get("GPU", 0)
    return f"{_name(node)}: {used_cpus:g} of {cpus}, {used_gpus:g} of {gpus} in use"


def _on_nodes(answers: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What tasks on the nodes saw."""
    findings = [
        bad("on nodes", f"{answer['ip']}: {answer['words']}", "see the node's logs and memory")
        for answer in answers
        if answer["stage"] == "silent"
    ]
    facts = [answer for answer in answers if answer["stage"] == "facts"]
    for fact in facts:
        findings += _of_node(fact)
    findings += _unequal(facts)
    for fact in facts:
        if fact["skew_s"] > MOST_SKEW_S:
            words = f"{fact['ip']}: {fact['skew_s']:.1f} s apart from this machine"
            findings.append(warning("clocks", words, "synchronise them (chrony, ntpd)"))
    if facts and not findings:
        words = f"{len(facts)} nodes see data, model and folders; versions and clocks agree"
        return [ok("on nodes", words)]
    return findings


def _of_node(fact: Mapping[str, Any]) -> Iterator[Finding]:
    ip = fact["ip"]
    if unseen := ", ".join(fact["unseen"]):
        shared = "put it on a folder that all nodes share (SHARED_DIRS), or copy it there"
        yield bad("on nodes", f"{ip}: cannot read {unseen}", shared)
    for folder in fact["unwritable"]:
        yield bad("on nodes", f"{ip}: cannot write to {folder}", "change its owner, or share it")
    for folder, free in fact["free_bytes"].items():
        if free < LEAST_DISK_GB * GB:
            words = f"{ip}: {free / GB:.1f} GB free for {folder}"
            yield bad("on nodes", words, "delete old runs there")
    if not fact["ours"]:
        words = f"{ip}: this project is not importable ({fact['executable']})"
        yield bad("on nodes", words, "./setup_cluster.sh sync and restart")


def _unequal(facts: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Packages of which nodes have different versions."""
    for name in facts[0]["packages"] if facts else []:
        found = {fact["ip"]: fact["packages"][name] for fact in facts}
        if len(set(found.values())) > 1:
            shown = ", ".join(f"{ip} {number or 'none'}" for ip, number in found.items())
            remedy = "install the same environment on every node"
            yield bad("on nodes", f"{name} differs: {shown}", remedy)
