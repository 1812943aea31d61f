"""What mindlora-run does before and around MindFormers' Trainer."""
