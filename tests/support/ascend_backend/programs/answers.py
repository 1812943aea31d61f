"""Runs command lines of mindlora, a JSON list of lists of words, one after the other in one process.

Prints a line of JSON for each, with what `mindlora generate --json` printed; the process ends with 1 if one failed.
"""

import contextlib
import io
import json
import sys

from mindlora import cli

for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = cli.main(words)
    if code:
        print(printed.getvalue())
        sys.exit(code)
    print("@answered", json.dumps(json.loads(printed.getvalue())), flush=True)
