"""Preference training: its data, its losses, the reference, and what a train step differentiates."""
