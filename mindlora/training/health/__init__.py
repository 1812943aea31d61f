"""The health of training: measures of adapters, and reactions to bad steps."""
