"""Evaluation of a base and its adapters together: perplexity, multiple choice, answers by rule, forgetting."""
