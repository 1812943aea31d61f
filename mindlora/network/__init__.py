"""Networks with adapters: the cells, and the passes that apply, save, load, merge, quantize and initialize."""
