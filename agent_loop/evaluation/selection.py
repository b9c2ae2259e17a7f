"""Which rows of the validation files an evaluation takes. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from agent_loop.seeds import seed_from


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Rows and samples of an evaluation."""

    samples: int
    """Trajectories of each row."""

    sources: tuple[str, ...] = ()
    """Empty: all."""

    limit: int | None = None
    """The first rows of each source; None: all."""

    sample: int | None = None
    """Rows that are drawn of each source, the same each time; None: all."""

    seed: int = 0
    """Of the drawn rows."""

    def of(self, rows: Sequence[tuple[str, str]]) -> list[int]:
        """Places of the chosen rows, in their order.

        Args:
            rows: source and row_id of each row.
        """
        places: defaultdict[str, list[int]] = defaultdict(list)
        for place, (source, _) in enumerate(rows):
            if not self.sources or source in self.sources:
                places[source].append(place)
        chosen: list[int] = []
        for own in places.values():
            if self.sample is not None:
                # by the hash of a row, so that one more row replaces one of the others at most
                own = sorted(own, key=lambda place: seed_from("evaluate", self.seed, *rows[place]))
                own = sorted(own[: self.sample])
            chosen += own[: self.limit]
        return sorted(chosen)
