"""Sends the records of metrics.jsonl, each at its step, to TensorBoard, SwanLab, Weights & Biases and MLflow."""
