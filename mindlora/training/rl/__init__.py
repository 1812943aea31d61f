"""Reinforcement learning: rewards for sampled answers, the losses of RLOO and GRPO, and distillation from a teacher."""
