"""Exchange of gradients between data-parallel processes, in full precision or in fewer bits."""
