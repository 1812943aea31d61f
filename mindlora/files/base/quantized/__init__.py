"""Base models as they are published in quantized forms: one module for each form, and the registry of all."""
