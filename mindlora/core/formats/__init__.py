"""Tensor files: safetensors, MindSpore's .ckpt, PyTorch's pickle; without MindSpore."""
