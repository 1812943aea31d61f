"""One YAML of MindFormers: its checks, its plan, and how it is written. No MindSpore."""
