"""Forms of adapter files: one module for each origin, and the registry of all."""
