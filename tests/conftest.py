"""What every test runs under."""

from hypothesis import settings

# No test may fail because the machine is busy.
settings.register_profile("no_deadline", deadline=None)
settings.register_profile("thorough", deadline=None, max_examples=3000)  # --hypothesis-profile
settings.load_profile("no_deadline")
