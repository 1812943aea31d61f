"""The cells of LoRA's variants on linear cells."""
