"""The train step: micro-batches, learning rates, packed rows, steps that are skipped."""
