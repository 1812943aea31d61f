"""Adapter, and the operations on files of adapters; without MindSpore."""
