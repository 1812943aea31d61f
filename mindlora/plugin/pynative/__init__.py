"""What MindFormers' PyNative Trainer runs: its model with mindlora's adapters, of which it knows as of its own."""
