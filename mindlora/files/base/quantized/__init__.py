"""Published quantized forms of base models: one module for each form; decode.py has all."""
