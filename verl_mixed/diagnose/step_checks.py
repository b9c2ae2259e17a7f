"""What the numbers of a run's steps say: divergence, losses, slow steps. Standard library only.

A step is held against the median of those before it, so that a run of any size is judged by itself.
"""

import json
import math
import re
from collections import deque
from collections.abc import Iterator, Mapping
from statistics import median

HISTORY = 50
"""Steps that a step is held against."""

SETTLED = 5
"""Steps that must have been seen before one is called unlike them."""

_PERIODIC = ("testing", "save_checkpoint")
"""Phases that not every step has: each is held against its own."""

_LOSSES = ("actor/loss", "actor/pg_loss", "actor/grad_norm", "critic/vf_loss")
_NUMBER = re.compile(r"(?:np\.\w+\()?([-+]?(?:nan|inf|[\d.]+(?:e[-+]?\d+)?))\)?", re.IGNORECASE)
_STEP = re.compile(r"(?:^|\s)step:(\d+) - ")
_USED = ("actor/", "critic/vf_loss", "training/rollout_", "mixed/", "timing_s/")
_LOST = re.compile(r"mixed/([^/]+)/(infra_error|loop_error)_rate")


def of_record(line: bytes) -> tuple[int, float | None, dict[str, float]] | None:
    """Step, time and numbers of a line of `metrics.jsonl`; None where it is none."""
    try:
        record = json.loads(line)
        metrics = {
            str(name): float(value)
            for name, value in record["metrics"].items()
            if isinstance(value, int | float)
        }
        time_s = record.get("time")
        return int(record["step"]), float(time_s) if time_s is not None else None, metrics
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def of_console(text: str) -> tuple[int, dict[str, float]] | None:
    """Step and numbers of a line of verl's console logger, `step:3 - actor/loss:0.1 - ...`."""
    found = _STEP.search(text)
    if found is None:
        return None
    metrics = {}
    for part in text[found.end() :].split(" - "):
        if not part.startswith(_USED):
            continue
        name, _, value = part.rpartition(":")
        number = _NUMBER.fullmatch(value.strip())
        if number is not None:
            try:
                metrics[name] = float(number[1])
            except ValueError:
                continue
    try:
        return int(found[1]), metrics
    except ValueError:  # thousands of digits
        return None


class StepChecks:
    """Follows the steps of one run."""

    def __init__(self) -> None:
        self._losses: set[str] = set()
        self._norms: deque[float] = deque(maxlen=HISTORY)
        self._kls: deque[float] = deque(maxlen=HISTORY)
        self._entropies: list[float] = []
        self._rest: deque[float] = deque(maxlen=HISTORY)
        self._phases: dict[str, deque[float]] = {}

    def check(
        self, metrics: Mapping[str, float], *, finite_only: bool = False
    ) -> Iterator[tuple[str, str, str]]:
        """Hold one step against those before it.

        Args:
            metrics: name -> number, which may be NaN.
            finite_only: look for numbers that are none; another file has the others.

        Yields:
            Signature's id, of what, and words.
        """
        yield from self._not_finite(metrics)
        if finite_only:
            return
        yield from self._divergence(metrics)
        for name, value in metrics.items():
            if value > 0 and (found := _LOST.fullmatch(name)):
                yield "trajectories-lost", found[1], f"{name}={value:.3g}"
        factor = metrics.get("mixed/limiter/rate_factor")
        if factor is not None and factor < 0.5:
            yield "limiter-slowed", "", f"mixed/limiter/rate_factor={factor:.2f}"
        yield from self._slow(metrics)

    def _not_finite(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
        trained = "timing_s/update_actor" in metrics
        for name in _LOSSES:
            value = metrics.get(name)
            if value is not None and not math.isfinite(value):
                yield "loss-not-finite", name, f"{name}={value}"
            elif value is None and trained and name in self._losses:
                # metrics.jsonl holds finite numbers only
                yield "loss-not-finite", name, f"{name} is left out: it was no finite number"
            elif value is not None:
                self._losses.add(name)

    def _divergence(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
        norm = _finite(metrics.get("actor/grad_norm"))
        if norm is not None:
            usual = median(self._norms) if len(self._norms) >= SETTLED else math.inf
            if norm > max(20 * usual, 1.0) or norm > 1e4:
                yield "gradient-explosion", "", _beside("actor/grad_norm", norm, usual)
            self._norms.append(norm)
        kl = _finite(metrics.get("actor/ppo_kl"))
        if kl is not None:
            usual = median(self._kls) if self._kls else 0.0
            if abs(kl) > max(0.2, 10 * usual):
                yield "kl-blow-up", "", _beside("actor/ppo_kl", kl, usual)
            self._kls.append(abs(kl))
        entropy = _finite(metrics.get("actor/entropy"))
        if entropy is not None:
            if len(self._entropies) < SETTLED:
                self._entropies.append(entropy)
            elif entropy < 0.01 and entropy < 0.05 * median(self._entropies):
                usual = median(self._entropies)
                yield "entropy-collapse", "", _beside("actor/entropy", entropy, usual)
        likeness = _finite(metrics.get("training/rollout_actor_probs_pearson_corr"))
        difference = _finite(metrics.get("training/rollout_probs_diff_mean"))
        if metrics.get("training/rollout_probs_diff_valid", 1.0):
            if difference is not None and difference > 0.05:
                words = f"training/rollout_probs_diff_mean={difference:.3g}"
                yield "probabilities-differ", "", words
            elif likeness is not None and likeness < 0.95:
                words = f"training/rollout_actor_probs_pearson_corr={likeness:.3g}"
                yield "probabilities-differ", "", words

    def _slow(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
        """At most one: the step's slowest phase against its own past."""
        step_s = _finite(metrics.get("timing_s/step"))
        phases = {
            name.removeprefix("timing_s/"): value
            for name, value in metrics.items()
            if name.startswith("timing_s/")
            and name.count("/") == 1
            and name != "timing_s/step"
            and math.isfinite(value)
        }
        if step_s is None:
            return
        # verl times validation outside of the step
        rest_s = step_s - phases.get("save_checkpoint", 0.0)
        usual_s = median(self._rest) if len(self._rest) >= SETTLED else math.inf
        slow = _is_slow(rest_s, usual_s)
        grown = {
            name: value - median(past)
            for name, value in phases.items()
            if (past := self._phases.get(name))
            and (slow or (name in _PERIODIC and len(past) > 1 and _is_slow(value, median(past))))
        }
        if slow or grown:
            worst = max(grown, key=lambda name: grown[name], default="")
            took_s = rest_s if slow else phases[worst]
            usually_s = usual_s if slow else median(self._phases[worst])
            words = f"{took_s:.1f} s, usually {usually_s:.1f} s"
            if worst and slow:
                before_s = median(self._phases[worst])
                words += f"; {worst} {phases[worst]:.1f} s, usually {before_s:.1f} s"
            yield "slow-step", worst or "unknown phase", words
        self._rest.append(rest_s)
        for name, value in phases.items():
            self._phases.setdefault(name, deque(maxlen=HISTORY)).append(value)


def _is_slow(seconds: float, usual_s: float) -> bool:
    return seconds > 3 * usual_s and seconds > usual_s + 10


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _beside(name: str, value: float, usual: float) -> str:
    return f"{name}={value:.3g}" + (f", before {usual:.3g}" if math.isfinite(usual) else "")
