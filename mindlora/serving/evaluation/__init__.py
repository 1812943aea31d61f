"""Did it get better: perplexity, multiple choice, answers by rule, forgetting; for a base and its adapters at once."""
