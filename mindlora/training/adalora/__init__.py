"""AdaLoRA in training: the importance of triplets, and the budget that decides which to keep."""
