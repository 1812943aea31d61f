"""Serving: one base model, many adapters, each request with its own."""
