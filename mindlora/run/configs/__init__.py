"""The YAML of a run, written from the folder of a model. No MindSpore."""
