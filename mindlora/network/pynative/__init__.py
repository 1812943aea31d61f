"""The cells of the models that MindFormers' PyNative Trainer runs."""
