"""The names of models' cells; LoraConfig, its variants and the cells that it selects. Without MindSpore."""
