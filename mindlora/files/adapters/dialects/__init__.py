"""Forms of adapter files: one module for each world they come from, and the registry of all."""
