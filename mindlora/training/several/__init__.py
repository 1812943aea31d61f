"""Several adapters that train side by side over one base, each as a run of its own."""
