"""The checks that `verl-mixed doctor` makes, and their deadlines. The checks change nothing.

What each check looks at is in `verl_mixed.checks`.
"""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.ray_cluster import address_of
from config.schema import ConfigError
from verl_mixed.checks import packages
from verl_mixed.checks.config.search import given_search_problems, own_search_problems
from verl_mixed.checks.finding import Check, Finding, bad, from_problem, ok, warning
from verl_mixed.checks.machine import devices, machine, ray_cluster, services, storage
from verl_mixed.checks.machine.fabric import DEADLINE_S as FABRIC_S
from verl_mixed.checks.machine.fabric import fabric as measure_fabric
from verl_mixed.run.state import RUNS

if TYPE_CHECKING:
    from verl_mixed.checks.config.reward_examples import Example
    from verl_mixed.launch.plan import Plan

COMPOSE_S = 30.0


def examine(
    overrides: Sequence[str] | ConfigError,
    *,
    ray_address: str | None,
    locks: Path | None,
    fabric: bool = False,
) -> list[Finding]:
    """Run all checks at once; takes some seconds, most of them for `import verl`.

    Args:
        overrides: Hydra overrides of the run config, or what is wrong with those that were given.
        ray_address: the cluster to check, `ip:port` or `auto`; None takes the cluster that the
            settings or RAY_ADDRESS name.
        locks: a folder in which file locks are tried between all nodes of the cluster.
        fabric: measure the network between all nodes, some seconds for each node.
    """
    plans: list[Plan] = []
    checks = [
        Check("python", packages.python),
        Check("packages", packages.packages),
        Check("plugin", packages.plugin, packages.PLUGIN_S + 5),
        Check("cpus", machine.cpus),
        Check("memory", machine.memory),
        Check("open files", machine.open_files),
        Check("disk", lambda: machine.disks(RUNS)),
        Check("config", lambda: _compose(overrides, plans), COMPOSE_S),
    ]
    checks[-1].findings()  # waits for the plan
    plan = plans[0] if plans else None
    address = _address(plan, ray_address, any_cluster=locks is not None or fabric)
    checks += _checks_of_run(plan, address, locks)
    findings = [finding for check in checks for finding in check.findings()]
    if fabric:  # last and alone, because the other checks would be measured too
        if address is None:
            return [*findings, bad("fabric", "no cluster is named", "give --ray, or MASTER_IP")]
        measured = partial(measure_fabric, address, os.environ)
        findings += Check("fabric", measured, FABRIC_S + 10).findings()
    return findings


def _address(plan: "Plan | None", given: str | None, *, any_cluster: bool) -> str | None:
    """The cluster to look at; with `any_cluster` the one that runs here, if none is named."""
    address = given or (plan and plan.cluster) or address_of(os.environ)
    return address or os.environ.get("RAY_ADDRESS") or ("auto" if any_cluster else None)


def _compose(overrides: Sequence[str] | ConfigError, plans: list["Plan"]) -> list[Finding]:
    """Compose the run's config as `train` would, and append the plan to `plans`."""
    from verl_mixed.launch.plan import make_plan

    try:
        if isinstance(overrides, ConfigError):
            raise overrides
        plan = make_plan(overrides, os.environ)
    except ConfigError as error:
        remedy = "see `verl-mixed check`; what depends on the config was not looked at"
        return [bad("config", problem, remedy) for problem in error.problems]
    plans.append(plan)
    return [ok("config", f"composes: {plan.folder.path}, {plan.total_steps} steps")]


def _search(plan: "Plan", *, data: bool) -> list[Finding]:
    """Whether a search engine answers the sources that search."""
    config = plan.config
    if plan.own_tool_server:
        found = own_search_problems(config, plan.corpus, os.environ, data=data)
    else:
        answers = services.ask_servers(config)
        healths = {url: said for url, said in answers.items() if not isinstance(said, Finding)}
        found = given_search_problems(config, healths, data=data)
    return [from_problem("search", problem) for problem in found]


def _rewards(examples: Sequence["Example"]) -> list[Finding]:
    """Whether right answers of some rows earn their reward."""
    from verl_mixed.checks.config.reward_examples import example_problems, untried

    found = [from_problem("reward", problem) for problem in example_problems(examples)]
    doubts = example_problems(examples, doubts=True)
    found += [from_problem("reward", doubt, warning) for doubt in doubts]
    found += [ok("reward", words) for words in untried(examples)]
    earning = {each.source for each in examples if not (each.problem or each.skipped)}
    words = f"right answers earn it: {', '.join(sorted(earning))}"
    return [*found, *([ok("reward", words)] if earning else [])]


def _checks_of_run(plan: "Plan | None", address: str | None, locks: Path | None) -> list[Check]:
    config = plan and plan.config
    lacking = plan.still_to_make() if plan else []
    checks = [Check("gpu", lambda: devices.devices(config))]
    if address is not None:
        shared = RUNS if RUNS.exists() else None
        deadline_s = ray_cluster.PROBE_S + (ray_cluster.LOCKS_S if locks else 0.0) + 5.0
        deadline_s += ray_cluster.SHARED_S if shared else 0.0
        look = partial(
            ray_cluster.joined,
            address,
            config,
            os.environ,
            data=not lacking,
            locks=locks,
            shared=shared,
        )
        checks.append(Check("ray", look, deadline_s))
    elif config is not None:
        checks.append(Check("ray", lambda: ray_cluster.own(config)))
    if plan is None or config is None:
        return checks
    checks += [
        Check("tools", lambda: services.tools(config, own_server=plan.own_tool_server)),
        Check("search", lambda: _search(plan, data=not lacking)),
        Check("judge", lambda: services.judges(config)),
        Check("limiter", lambda: storage.limiter(config, cluster=address is not None)),
    ]
    if lacking:
        checks.append(Check("data", lambda: [ok("data", words) for words in lacking]))
    else:
        checks.append(Check("data", lambda: storage.data(config)))
        checks.append(Check("model", lambda: storage.model(config)))
        checks.append(Check("reward", lambda: _rewards(plan.reward_examples()), COMPOSE_S))
    return [
        *checks,
        Check("shared memory", lambda: machine.shared_memory(config)),
        Check("ports", lambda: machine.ports(config)),
        Check("wandb", lambda: services.wandb(config)),
    ]
