"""Failures that the metrics of steps show: divergence, lost trajectories, slow steps.

Standard library only. A step is compared with the median of the steps before it.
"""

import json
import math
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from statistics import median

HISTORY = 50  # steps before a step that it is compared with
MOST_LAG_S = 0.5  # as agent_loop.training.alarms, which is not imported here
LEAST_HISTORY = 5  # steps that must come before a comparison
_PERIODIC = ("testing", "save_checkpoint")
"""Phases that only some steps have: such a phase is compared with its own earlier times."""

_LOSSES = ("actor/loss", "actor/pg_loss", "actor/grad_norm", "critic/vf_loss")
_NUMBER = re.compile(r"(?:np\.\w+\()?([-+]?(?:nan|inf|[\d.]+(?:e[-+]?\d+)?))\)?", re.IGNORECASE)
_STEP = re.compile(r"(?:^|\s)step:(\d{1,18}) - ")
_USED = ("actor/", "critic/vf_loss", "training/rollout_", "mixed/", "timing_s/")
_LOST = re.compile(r"mixed/([^/]+)/(infra_error|loop_error)_rate")


def step_of_record(line: bytes) -> tuple[int, dict[str, float], str | None] | None:
    """(step, metrics, time) of a line of `metrics.jsonl`; None for any other line."""
    try:
        record = json.loads(line)
        metrics = {
            str(name): float(value)
            for name, value in record["metrics"].items()
            if isinstance(value, int | float)
        }
        time_s, step = float(record.get("time") or 0), int(record["step"])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    try:
        moment = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(time_s)) if time_s else None
    except (ValueError, OverflowError, OSError):
        moment = None
    return step, metrics, moment


def step_of_console(text: str) -> tuple[int, dict[str, float]] | None:
    """(step, metrics) of a line of verl's console logger, `step:3 - actor/loss:0.1 - ...`."""
    match = _STEP.search(text)
    if match is None:
        return None
    metrics = {}
    for part in text[match.end() :].split(" - "):
        if not part.startswith(_USED):
            continue
        name, _, value = part.rpartition(":")
        if number := _NUMBER.fullmatch(value.strip()):
            with suppress(ValueError):
                metrics[name] = float(number[1])
    return int(match[1]), metrics


class StepChecks:
    """Checks the steps of one run, in their order."""

    def __init__(self) -> None:
        self._losses: set[str] = set()
        self._norms: deque[float] = deque(maxlen=HISTORY)
        self._kls: deque[float] = deque(maxlen=HISTORY)
        self._entropies: list[float] = []
        self._rest_s: deque[float] = deque(maxlen=HISTORY)
        self._phases: dict[str, deque[float]] = {}

    def check(
        self, metrics: Mapping[str, float], *, finite_only: bool = False
    ) -> Iterator[tuple[str, str, str]]:
        """Compare one step with the steps before it.

        Args:
            metrics: name -> number, which may be NaN.
            finite_only: report only numbers that are not finite; another file has the others.

        Yields:
            (id of the signature, source, phase or metric, text).
        """
        yield from self._not_finite(metrics)
        if finite_only:
            return
        yield from self._divergence(metrics)
        for name, value in metrics.items():
            if value > 0 and (match := _LOST.fullmatch(name)):
                yield "trajectories-lost", match[1], f"{name}={value:.3g}"
        factor = metrics.get("mixed/limiter/rate_factor")
        if factor is not None and factor < 0.5:
            yield "limiter-slowed", "", f"mixed/limiter/rate_factor={factor:.2f}"
        lag_s = metrics.get("mixed/loop_lag_s/p99")
        if lag_s is not None and lag_s > MOST_LAG_S:
            yield "loop-lag", "", f"mixed/loop_lag_s/p99={lag_s:.2f}"
        yield from self._slow(metrics)

    def _not_finite(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
        trained = "timing_s/update_actor" in metrics
        for name in _LOSSES:
            value = metrics.get(name)
            if value is not None and not math.isfinite(value):
                yield "loss-not-finite", name, f"{name}={value}"
            elif value is None and trained and name in self._losses:
                # metrics.jsonl has only finite numbers, so a missing number was not finite
                yield "loss-not-finite", name, f"{name} is missing: it was not a finite number"
            elif value is not None:
                self._losses.add(name)

    def _divergence(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
        norm = _finite(metrics.get("actor/grad_norm"))
        if norm is not None:
            usual = median(self._norms) if len(self._norms) >= LEAST_HISTORY else math.inf
            if norm > max(20 * usual, 1.0) or norm > 1e4:
                yield "gradient-explosion", "", _compared("actor/grad_norm", norm, usual)
            self._norms.append(norm)
        kl = _finite(metrics.get("actor/ppo_kl"))
        if kl is not None:
            usual = median(self._kls) if self._kls else 0.0
            if abs(kl) > max(0.2, 10 * usual):
                yield "kl-blow-up", "", _compared("actor/ppo_kl", kl, usual)
            self._kls.append(abs(kl))
        entropy = _finite(metrics.get("actor/entropy"))
        if entropy is not None:
            if len(self._entropies) < LEAST_HISTORY:
                self._entropies.append(entropy)
            elif entropy < 0.01 and entropy < 0.05 * median(self._entropies):
                usual = median(self._entropies)
                yield "entropy-collapse", "", _compared("actor/entropy", entropy, usual)
        correlation = _finite(metrics.get("training/rollout_actor_probs_pearson_corr"))
        difference = _finite(metrics.get("training/rollout_probs_diff_mean"))
        if metrics.get("training/rollout_probs_diff_valid", 1.0):
            if difference is not None and difference > 0.05:
                text = f"training/rollout_probs_diff_mean={difference:.3g}"
                yield "probabilities-differ", "", text
            elif correlation is not None and correlation < 0.95:
                text = f"training/rollout_actor_probs_pearson_corr={correlation:.3g}"
                yield "probabilities-differ", "", text

    def _slow(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
        """At most one finding: the phase that grew most, compared with its own earlier times."""
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
        # verl does not count validation in timing_s/step
        rest_s = step_s - phases.get("save_checkpoint", 0.0)
        usual_s = median(self._rest_s) if len(self._rest_s) >= LEAST_HISTORY else math.inf
        is_slow = _is_slow(rest_s, usual_s)
        grown = {
            name: value - median(past)
            for name, value in phases.items()
            if (past := self._phases.get(name))
            and (is_slow or (name in _PERIODIC and len(past) > 1 and _is_slow(value, median(past))))
        }
        if is_slow or grown:
            worst = max(grown, key=lambda name: grown[name], default="")
            took_s = rest_s if is_slow else phases[worst]
            usually_s = usual_s if is_slow else median(self._phases[worst])
            text = f"{took_s:.1f} s, usually {usually_s:.1f} s"
            if worst and is_slow:
                before_s = median(self._phases[worst])
                text += f"; {worst} {phases[worst]:.1f} s, usually {before_s:.1f} s"
            yield "slow-step", worst or "unknown phase", text
        self._rest_s.append(rest_s)
        for name, value in phases.items():
            self._phases.setdefault(name, deque(maxlen=HISTORY)).append(value)


def _is_slow(seconds: float, usual_s: float) -> bool:
    return seconds > 3 * usual_s and seconds > usual_s + 10


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _compared(name: str, value: float, usual: float) -> str:
    return f"{name}={value:.3g}" + (f", before {usual:.3g}" if math.isfinite(usual) else "")
