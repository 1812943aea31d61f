"""Cells in which each token has an adapter of its own."""
