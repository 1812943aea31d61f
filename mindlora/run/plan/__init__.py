"""The needs of a run before it begins: parameters, bytes on each device, steps, files. Works on the YAML alone."""
