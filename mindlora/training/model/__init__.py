"""The model that MindFormers' Trainer builds, with its adapters."""
