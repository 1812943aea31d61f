"""mindlora-run: what it does before and around MindFormers' Trainer."""
