"""Training under MindFormers' PyNative Trainer: its model with mindlora's adapters, which it treats as its own."""
