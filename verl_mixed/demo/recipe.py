"""`Recipe`: every number that shapes the demo model, part of the fingerprint of a made demo."""

import math
from dataclasses import dataclass, field

SOURCES = ("math", "nq", "taco")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Shape of the model, and length and mixture of its supervised run."""

    vocabulary: int = 800
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    traces: int = 16_000
    shares: dict[str, float] = field(default_factory=lambda: {"math": 0.4, "nq": 0.3, "taco": 0.3})
    careful: dict[str, float] = field(
        default_factory=lambda: {"math": 0.45, "nq": 0.5, "taco": 0.45}
    )
    """Source -> share of examples in which the teacher makes no mistake."""

    forms: dict[str, str] = field(default_factory=lambda: dict.fromkeys(SOURCES, "tags"))
    """Source -> form in which the model asks for its tool: tags, react or native."""

    batch: int = 32
    drill_rows: int = 16
    drill_weight: float = 0.5
    context_weight: float = 0.3
    """Loss weight of prompt and tool tokens; tokens of the model have weight 1."""

    learning_rate: float = 3e-3
    warm_up_steps: int = 30
    min_steps: int = 1000
    max_steps: int = 1600
    probe_every: int = 100

    probe_prompts: int = 48
    floor: float = 0.25
    """Mean sampled reward that every source must reach: the supervised run ends then."""

    @property
    def passes(self) -> int:
        """How often `max_steps` steps go through all traces, rounded up."""
        return math.ceil(self.max_steps * self.batch / self.traces)
