"""One record for each architecture: its names in three naming schemes, its sizes, its joined tensors."""
