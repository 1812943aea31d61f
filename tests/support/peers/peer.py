"""A process of another environment, such as PEFT's, as an object; and reading safetensors files without mindlora."""

import contextlib
import json
import os
import subprocess
import threading

import numpy as np
import pytest

SCRIPT = os.path.join(os.path.dirname(__file__), "peft_side.py")
# Seconds that one request may take. The first one also waits for the imports.
PATIENCE = 600


class PeerError(AssertionError):
    """The other side refused, or its process ended."""


def python_of(variable, what, folder):
    """Returns the Python that a variable names; without one the test is skipped, and on CI it fails.

    Args:
        variable (str): The variable of the environment.
        what (str): What that Python has, for the reason.
        folder (str): The folder of tests for which scripts/test.sh makes it.
    """
    python = os.environ.get(variable)
    if python:
        return python
    reason = f"{variable} names no Python with {what}: `bash scripts/test.sh {folder}` makes one and sets it."
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(reason)
    return pytest.skip(reason)


class Peer:
    """Starts a script; ``peer.logits(...)`` runs its verb ``logits``.

    Args:
        python (str): The interpreter of the environment that holds what it needs.
        log (str): Where the process writes its stderr.
        script (str): Default: peft_side.py.
    """

    def __init__(self, python, log, script=SCRIPT):
        self.log = log
        # Without this environment's packages and without a network.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")
        environment.update(TRL_EXPERIMENTAL_SILENCE="1")
        with open(log, "w", encoding="utf-8") as stderr:
            self._process = subprocess.Popen(
                [python, script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
            )

    def __getattr__(self, verb):
        return lambda **arguments: self._ask(verb=verb, **arguments)

    def close(self):
        """Ends the process."""
        with contextlib.suppress(BrokenPipeError):  # It has ended before.
            self._process.stdin.close()
        self._process.wait(60)

    def _ask(self, **request):
        watch = threading.Timer(PATIENCE, self._process.kill)
        watch.start()
        try:
            self._process.stdin.write(json.dumps(request, default=str) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watch.cancel()
        if not line:
            with open(self.log, encoding="utf-8") as file:
                raise PeerError(
                    f"The peer's process ended (exit code {self._process.wait(10)}) on the request "
                    f"{request['verb']}:\n{file.read()[-5000:]}"
                )
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"The peer, asked for {request}:\n{answer['error']}")
        return answer["result"]


def stored(path):
    """Returns key -> (dtype, shape, bytes) of a safetensors file, to compare two files, bfloat16 included."""
    with open(path, "rb") as file:
        content = file.read()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header.pop("__metadata__", None)
    return {
        key: (
            entry["dtype"],
            tuple(entry["shape"]),
            content[begin + entry["data_offsets"][0] : begin + entry["data_offsets"][1]],
        )
        for key, entry in header.items()
    }


def arrays(path):
    """Returns key -> array of a safetensors file, all of whose tensors are float32."""
    found = {}
    for key, (dtype, shape, content) in stored(path).items():
        assert dtype == "F32", f"{key} is {dtype}"
        found[key] = np.frombuffer(content, np.float32).reshape(shape)
    return found


def read_json(*parts):
    """Returns the content of a JSON file."""
    with open(os.path.join(*map(str, parts)), encoding="utf-8") as file:
        return json.load(file)
