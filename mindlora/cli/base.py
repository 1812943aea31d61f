"""mindlora convert-base, merge: checkpoints of base models."""

VERBS = ()
