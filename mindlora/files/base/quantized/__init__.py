"""Published quantized forms of base models: one module for each form, and the registry of all."""
