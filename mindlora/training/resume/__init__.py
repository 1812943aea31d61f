"""Saving and resuming a training run, on one device or sharded."""
