"""The variants of LoRA: what each one is made of, which settings it has, and what it cannot be put on."""
