"""Clients of OpenAI's API as their users have them, in their own process and environment: see ask() of each module.

It reads requests from stdin, one JSON object per line ({"verb": "chat", "client": name, ...}), and answers each with a
line of JSON: {"result": ...} or {"error": traceback}. One process serves all tests, since the imports take seconds.
"""

import importlib
import json
import os
import sys
import traceback

# What a library prints must not come between the answers.
ANSWERS = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)

for line in sys.stdin:
    request = json.loads(line)
    client, verb = request.pop("client"), request.pop("verb")
    try:
        answer = {"result": getattr(importlib.import_module(f"with_{client}"), verb)(**request)}
    except BaseException:  # of any kind: the next request is answered all the same
        answer = {"error": traceback.format_exc()}
    print(json.dumps(answer), file=ANSWERS, flush=True)
