"""Adapters and base checkpoints on disk: read, written as streams, converted, compared; without MindSpore."""
