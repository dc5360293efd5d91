"""For all tests."""

from hypothesis import settings

settings.register_profile("headrace", deadline=None)  # how fast a machine is, and how busy, is nobody's mistake
settings.load_profile("headrace")
