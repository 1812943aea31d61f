"""mindlora inspect, convert, combine, diff: adapter files."""

VERBS = ()
