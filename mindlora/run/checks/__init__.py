"""All rules about a MindFormers YAML, from a YamlRun to findings; without MindSpore and MindFormers."""
