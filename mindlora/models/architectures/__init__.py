"""One record for each architecture: its names in three worlds, its sizes, its joined tensors."""
