"""Several adapters in one run of MindFormers' Trainer: the train step, and each adapter as a run of its own."""
