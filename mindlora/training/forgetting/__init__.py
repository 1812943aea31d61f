"""What the model forgets of what it knew, measured while it trains, and a limit for it."""
