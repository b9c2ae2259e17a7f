"""OpenEnv's own imports its server's packages here."""

raise AssertionError("openenv.core was imported; the client must do without it")
