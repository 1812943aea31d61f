"""Checkpoints of base models: read and written as a stream, converted, merged into."""
