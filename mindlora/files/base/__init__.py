"""Checkpoints of base models: read and written as streams, converted, quantized, merged into."""
