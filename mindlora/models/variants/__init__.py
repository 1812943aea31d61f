"""The variants of LoRA: the parts of each, its settings, and the cells that it does not support."""
