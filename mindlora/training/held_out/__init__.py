"""The loss on held-out data, in every kind of run."""
