"""mindlora doctor: what stands on this machine, and what is wrong in a YAML."""

VERBS = ()
