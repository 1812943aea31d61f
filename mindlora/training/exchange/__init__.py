"""Gradients exchanged between data-parallel processes: whole, or in fewer bits."""
