"""Every rule about a MindFormers YAML: plain mappings in, findings out. No MindSpore, no MindFormers."""
