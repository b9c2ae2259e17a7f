"""Judges the network between the nodes of a Ray cluster: `verl-mixed doctor --fabric`.

It decides which pairs of nodes are compared at the same time, which pair is slow, and what to say
about a pair that does not connect. `fabric_probe` measures: it connects to the ports of every node
from every other node, sends data one way for a moment, and runs a short all-reduce.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from verl_mixed.checks.finding import Finding, bad, ok, warning
from verl_mixed.checks.machine.probe import ask_probe

DEADLINE_S = 240.0
"""Of all measurements together."""

SLOW = 0.5
"""A pair is slow below this part of the median of all pairs."""

MOST_ROWS = 20
"""Pairs that are listed, the slowest first."""

ANY_PORT = "a port that the system chose, as torch.distributed has"

_INTERFACE = (
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in HOST_ENV name the interface of the nodes' network"
)
_TABLE = "docs/cluster.md has the table of ports"

Node = TypeVar("Node", bound=Hashable)
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What was measured from one node to another."""

    source: str
    target: str
    latency_s: float = 0.0
    """Half of the shortest round trip of one byte."""

    bytes_per_s: float = 0.0
    fault: str = ""
    """Why there is no connection; empty if every port answers."""

    port: int = 0
    """The port that does not answer."""

    what: str = ""
    """Whose port it is."""

    @property
    def pair(self) -> Pair:
        """Both nodes, without direction."""
        return min(self.source, self.target), max(self.source, self.target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce:
    """One all-reduce: how long the sum of a tensor of `size_bytes` over the nodes took."""

    nodes: tuple[str, ...]
    backend: str
    size_bytes: int
    seconds: float = 0.0
    fault: str = ""

    @property
    def bytes_per_s(self) -> float:
        """What each link carries: `2 (n - 1) / n` times the tensor in a ring of n nodes."""
        if not self.seconds:
            return 0.0
        count = len(self.nodes)
        return self.size_bytes * 2 * (count - 1) / count / self.seconds


def rounds(nodes: Sequence[Node]) -> Iterator[list[tuple[Node, Node]]]:
    """Every pair once, in rounds in which no node is in two pairs.

    The circle method of tournaments: the first stays, the others go round. Four nodes a b c d give
    (a d, b c), (a c, d b), (a b, c d).
    """
    ring: list[Node | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    for _ in range(len(ring) - 1):
        pairs = zip(ring[: len(ring) // 2], reversed(ring), strict=False)
        yield [(one, other) for one, other in pairs if one is not None and other is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def slow(rates: Mapping[Node, float]) -> list[Node]:
    """Those below half of the median, the slowest first.

    Two that differ are compared with their mean: 10 and 100 give a median of 55, so 10 is slow.
    Where most are slow, none is: the table shows it.
    """
    if not rates:
        return []
    limit = SLOW * median(rates.values())
    return sorted((name for name, rate in rates.items() if rate < limit), key=lambda n: rates[n])


def needs_pairs(whole: Reduce, links: Sequence[Link]) -> bool:
    """Whether each pair has an all-reduce of its own, because the whole is slow for its links."""
    rates = [link.bytes_per_s for link in links if not link.fault]
    return len(whole.nodes) > 2 and bool(rates) and whole.bytes_per_s < SLOW * median(rates)


def fabric(address: str, environ: Mapping[str, str]) -> list[Finding]:
    """Measure the network of the cluster at an address, and judge it."""
    words = ["verl_mixed.checks.machine.fabric_probe", address]
    return judge(*ask_probe(words, environ, DEADLINE_S))


def judge(answers: Sequence[Mapping[str, Any]], late_s: float = 0.0) -> list[Finding]:
    """The findings of what the probe said; `late_s` is its deadline if it was not done by then."""
    if refused := next((answer for answer in answers if answer["stage"] == "refused"), None):
        remedy = "see the findings of ray, and run the doctor on a node of the cluster"
        return [bad("fabric", f"not measured: {refused['words']}", remedy)]
    count = next((answer["count"] for answer in answers if answer["stage"] == "nodes"), 0)
    if count == 1:
        return [ok("fabric", "one node: there is no network between nodes")]
    findings = [
        bad("fabric", f"{answer['ip']}: {answer['words']}", "see `./setup_cluster.sh status`, logs")
        for answer in answers
        if answer["stage"] == "silent"
    ]
    links = [Link(**_values(answer)) for answer in answers if answer["stage"] == "link"]
    findings += _of_links(links)
    findings += _of_reduces([_reduce(answer) for answer in answers if answer["stage"] == "reduce"])
    if note := next((answer["words"] for answer in answers if answer["stage"] == "note"), ""):
        findings.append(ok("all-reduce", note))
    if late_s:
        words = f"not all was measured within {late_s:g} s"
        findings.append(bad("fabric", words, "look at the pairs above, and at the nodes' load"))
    return findings


def _values(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key != "stage"}


def _reduce(answer: Mapping[str, Any]) -> Reduce:
    values: dict[str, Any] = _values(answer)
    values["nodes"] = tuple(values["nodes"])
    return Reduce(**values)


def _of_links(links: Sequence[Link]) -> Iterator[Finding]:
    for link in links:
        if link.fault:
            remedy = f"open it in the firewall from {link.source} to {link.target} ({_TABLE})"
            if link.what == ANY_PORT:
                remedy = (
                    "open the range of `sysctl net.ipv4.ip_local_port_range` between the nodes "
                    f"({_TABLE}); {_INTERFACE}"
                )
            words = f"{link.source} > {link.target}: port {link.port} ({link.what}): {link.fault}"
            yield bad("fabric", words, remedy)
    good = {(link.source, link.target): link for link in links if not link.fault}
    late = slow({pair: link.bytes_per_s for pair, link in good.items()})
    middle = median(link.bytes_per_s for link in good.values()) if good else 0.0
    for pair in late:
        words = f"slow pair {_row(good[pair])}: the median is {_rate(middle)}"
        yield warning("fabric", words, f"look at cable, switch and driver of both; {_INTERFACE}")
    rest = sorted(
        (link for pair, link in good.items() if pair not in late), key=lambda one: one.bytes_per_s
    )
    for link in rest[:MOST_ROWS]:
        yield ok("fabric", _row(link))
    if len(rest) > MOST_ROWS:
        yield ok("fabric", f"{len(rest) - MOST_ROWS} more pairs, all faster")


def _row(link: Link) -> str:
    return (
        f"{link.source} > {link.target}  {1000 * link.latency_s:.2f} ms  {_rate(link.bytes_per_s)}"
    )


def _rate(bytes_per_s: float) -> str:
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.2f} GB/s"
    return f"{bytes_per_s / 1e6:.1f} MB/s"


def _of_reduces(reduces: Sequence[Reduce]) -> Iterator[Finding]:
    pairs = {one.nodes: one.bytes_per_s for one in reduces[1:] if not one.fault}
    for one in reduces:
        place = f"{len(one.nodes)} nodes" if one is reduces[0] else " and ".join(one.nodes)
        if one.fault:
            yield bad("all-reduce", f"{one.backend} over {place}: {one.fault}", _INTERFACE)
            continue
        size_mb = one.size_bytes / 1e6
        words = f"{one.backend} over {place}: {size_mb:.0f} MB in {one.seconds:.3f} s"
        words += f", {_rate(one.bytes_per_s)} a link"
        if one.nodes in slow(pairs):
            yield warning("all-reduce", f"slow pair: {words}", _INTERFACE)
        else:
            yield ok("all-reduce", words)
