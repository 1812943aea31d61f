"""Runs sent to TensorBoard, SwanLab, Weights & Biases and MLflow: what metrics.jsonl records, at its step."""
