"""A training run on disk and back, alone and sharded."""
