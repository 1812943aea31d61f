"""Adapters of sharded runs: from the slices of all ranks to one adapter, and back."""
