"""Several adapters that train beside each other over one base, each as a run of its own."""
