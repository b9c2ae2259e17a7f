"""What every test runs under."""

from hypothesis import settings

# No test may fail because the machine is busy.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
