"""Reinforcement learning: rewards for sampled answers, and the losses of RLOO and GRPO."""
