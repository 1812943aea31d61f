"""What models are called, and LoraConfig: its variants, and which cells of a model it means. No MindSpore."""
