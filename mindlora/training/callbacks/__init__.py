"""The callbacks that belong to no feature alone, one file each; registry.py has all that a YAML can name."""
