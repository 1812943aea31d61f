"""What MindFormers' Trainer runs: the model with its adapters, and the train step."""
