"""Callbacks that do not belong to a single feature; registry.py has all those that a YAML can name."""
