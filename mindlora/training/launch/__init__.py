"""mindlora-run: everything before and around MindFormers' Trainer."""
