"""The fixture ``write``."""

from tests.support.faultless_yaml import write  # noqa: F401
