"""The train step: micro-batches, learning rates, packed rows and skipped steps."""
