"""NumPy alone: initializers, NF4, VeRA's projection, folding."""
