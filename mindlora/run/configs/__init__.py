"""Writes the YAML of a run from the folder of a model; without MindSpore."""
