"""Is training going well: measures of adapters, and what to do when a step goes wrong."""
