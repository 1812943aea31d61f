"""Training with MindFormers: the model, the train step, callbacks, and one folder for each feature."""
