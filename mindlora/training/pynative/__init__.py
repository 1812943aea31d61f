"""What MindFormers' PyNative Trainer runs: its model with mindlora's adapters, which it treats as its own."""
