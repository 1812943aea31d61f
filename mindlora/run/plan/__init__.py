"""What a run will take before it begins: parameters, bytes on each device, steps, files. Works on the YAML alone."""
