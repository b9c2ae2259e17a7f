"""A stand-in for the package openenv: a client whose server is a script."""
