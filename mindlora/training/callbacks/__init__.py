"""Callbacks that do not belong to a single feature, one per file; registry.py has all those that a YAML can name."""
