"""Cells whose frozen weight is in 4 bits."""
