"""Adapter, and what is done to files of adapters. No MindSpore."""
