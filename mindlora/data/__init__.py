"""Training data: rows and text files to the MindRecord that MindFormers' causal language models train on."""
