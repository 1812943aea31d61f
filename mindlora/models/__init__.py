"""What models are called: one record for each architecture, and target selection."""
