"""The checks that `verl-mixed doctor` makes, and their deadlines. The checks change nothing.

What each check looks at is in `verl_mixed.checks`.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.ray_cluster import address_of
from config.schema import ConfigError
from verl_mixed.checks import packages
from verl_mixed.checks.finding import Check, Finding, bad, ok, run_all
from verl_mixed.checks.machine import devices, machine, ray_cluster, services, storage
from verl_mixed.run.state import RUNS

if TYPE_CHECKING:
    from verl_mixed.launch.plan import Plan

COMPOSE_S = 30.0


def examine(
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    *,
    ray_address: str | None = None,
    locks: Path | None = None,
) -> list[Finding]:
    """Run all checks at once; takes some seconds, most of them for `import verl`.

    Args:
        overrides: Hydra overrides of the run config.
        environ: environment with the settings of the scripts; None takes this process's.
        ray_address: the cluster to check, `ip:port` or `auto`; None takes the cluster that the
            settings or RAY_ADDRESS name.
        locks: a folder in which file locks are tried between all nodes of the cluster.
    """
    environ = os.environ if environ is None else environ
    plans: list[Plan] = []
    of_machine = [
        Check(name="python", look=packages.python),
        Check(name="packages", look=packages.packages),
        Check(name="plugin", look=packages.plugin, deadline_s=packages.PLUGIN_S + 5),
        Check(name="cpus", look=machine.cpus),
        Check(name="memory", look=machine.memory),
        Check(name="open files", look=machine.open_files),
        Check(name="disk", look=lambda: machine.disks(RUNS)),
    ]
    composed = Check(
        name="config", look=lambda: _compose(overrides, environ, plans), deadline_s=COMPOSE_S
    )
    for check in (*of_machine, composed):
        check.start()
    of_config = composed.findings()
    of_run = run_all(_checks_of_run(plans[0] if plans else None, environ, ray_address, locks))
    return [*(found for check in of_machine for found in check.findings()), *of_config, *of_run]


def _compose(
    overrides: Sequence[str], environ: Mapping[str, str], plans: list["Plan"]
) -> list[Finding]:
    """The run's config, as `train` would compose it."""
    from verl_mixed.launch.plan import make_plan

    try:
        plan = make_plan(overrides, environ)
    except ConfigError as error:
        remedy = "see `verl-mixed check`; what depends on the config was not looked at"
        return [bad("config", problem, remedy) for problem in error.problems]
    plans.append(plan)
    return [ok("config", f"composes: {plan.folder.path}, {plan.total_steps} steps")]


def _checks_of_run(
    plan: "Plan | None",
    environ: Mapping[str, str],
    ray_address: str | None,
    locks: Path | None,
) -> list[Check]:
    config = None if plan is None else plan.config
    lacking = [] if plan is None else plan.still_to_make()
    made = not lacking
    address = ray_address or (None if plan is None else plan.cluster) or address_of(environ)
    address = address or environ.get("RAY_ADDRESS") or ("auto" if locks else None)
    checks = [Check(name="gpu", look=lambda: devices.devices(config))]

    def add(name: str, look: Callable[[], Sequence[Finding]], deadline_s: float = 20.0) -> None:
        checks.append(Check(name=name, look=look, deadline_s=deadline_s))

    if address is not None:
        deadline_s = ray_cluster.PROBE_S + (ray_cluster.LOCKS_S if locks else 0.0) + 5.0
        add(
            "ray",
            lambda: ray_cluster.joined(address, config, environ, data=made, locks=locks),
            deadline_s,
        )
    elif config is not None:
        add("ray", lambda: ray_cluster.own(config))
    if plan is None or config is None:
        return checks
    add("tools", lambda: services.tools(config, own_server=plan.own_tool_server))
    add("limiter", lambda: storage.limiter(config, cluster=address is not None))
    if not made:
        add("data", lambda: [ok("data", words) for words in lacking])
    else:
        add("data", lambda: storage.data(config))
        add("model", lambda: storage.model(config))
    add("shared memory", lambda: machine.shared_memory(config))
    add("ports", lambda: machine.ports(config))
    add("wandb", lambda: services.wandb(config))
    return checks
