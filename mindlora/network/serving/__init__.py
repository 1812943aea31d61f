"""Cells in which each token has its own adapter."""
