"""Basics for all packages: errors, text, atomic files, tensor files, NumPy numerics. Neither MindSpore nor LoRA."""
