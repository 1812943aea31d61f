"""Several adapters that train side by side on one base, each like a separate run."""
