"""Seeds of the engine, from facts. As `agent_loop.seeds`, of which this room imports nothing."""

import hashlib
from typing import Any


def seed_from(*facts: Any) -> int:
    """A seed of 63 bits that depends only on `facts`."""
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
