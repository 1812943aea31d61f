"""All that knows MindFormers: its Trainer, its YAMLs and its launcher."""
