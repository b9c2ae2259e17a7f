"""The real package reasoning-gym, in an environment of its own."""
