"""Every rule about a MindFormers YAML: a YamlRun in, findings out. No MindSpore, no MindFormers."""
