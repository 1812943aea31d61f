"""What any room could use: errors, text, atomic files, tensor files, NumPy numerics. No MindSpore, and no LoRA."""
