"""One YAML of MindFormers: its checks, its plan, and how it is written; without MindSpore."""
