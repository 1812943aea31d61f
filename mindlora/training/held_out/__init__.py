"""The loss on data that is held out, in every kind of run."""
