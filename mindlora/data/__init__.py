"""Training data: converts rows and text files to the MindRecord on which MindFormers' causal language models train."""
