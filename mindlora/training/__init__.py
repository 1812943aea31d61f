"""What training needs besides a network: LoRA+'s learning rates, the held-out loss, the loss curve."""
