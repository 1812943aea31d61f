"""Names and layouts of adapter files: one module for each world they come from."""
