"""The CPU library in a process of its own, on this processor or an emulated one.

scripts/test_aarch64.sh names the emulator in MINDLORA_TEST_EMULATOR and the compiler in CXX; tests/support/native.py
then calls every kernel through this. scripts/release.sh names the library of a wheel in MINDLORA_TEST_LIBRARY.
"""

import dataclasses
import os
import shlex
import subprocess
import tempfile
from typing import Callable, List, Tuple

import numpy as np

from mindlora.ops import build
from tests.conftest import ROOT

EMULATOR = shlex.split(os.environ.get("MINDLORA_TEST_EMULATOR", ""))
_FOLDER = os.path.join(ROOT, "build", "emulated" if EMULATOR else "native")
GIVEN_LIBRARY = os.environ.get("MINDLORA_TEST_LIBRARY")
LIBRARY = GIVEN_LIBRARY or (os.path.join(_FOLDER, "libmindlora_cpu.so") if EMULATOR else build.LIBRARY)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the library answers to one call. Each part is a line: what was returned, or "refused" and the message.

    Attributes:
        shape (str): Of InferShape: "shape" and the dimensions.
        type (str): Of InferType: "type" and the number of the input that has the type of the output.
        code (str): Of the function itself: "code" and what it returned.
    """

    shape: str
    type: str
    code: str


class OperatorProcess:
    """Opens the library in a new process; its functions of the form int f(int) are attributes.

    Args:
        *first: Libraries that the process opens before.
        **environment: Variables for that process, such as OMP_NUM_THREADS="2".

    Raises:
        OSError: The library cannot be opened.
    """

    def __init__(self, *first: str, **environment: str):
        self._process = subprocess.Popen(
            [*EMULATOR, compiled("operator_process.cc", "-O1", "-std=c++17"), LIBRARY, *first],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )
        opened = self._line()
        if opened != "opened":
            self.close()
            raise OSError(opened)

    def __getattr__(self, name: str) -> Callable[..., int]:
        def function(argument: int = 0) -> int:
            self._write(f"int {name} {argument}\n".encode())
            return int(self._line().partition(" ")[2])

        return function

    def call(self, name: str, tensors: List[Tuple[np.ndarray, np.ndarray, str]]) -> Answer:
        """Calls an operator on tensors, to which it writes.

        Args:
            name (str): The function.
            tensors (list): (whole, inner, dtype) of each input and of the output: a tensor ``inner`` in the middle of
                memory of its own, ``whole``.
        """
        request = [f"call {name} {len(tensors)}\n".encode()]
        for whole, inner, dtype in tensors:
            numbers = " ".join(map(str, ((whole.nbytes - inner.nbytes) // 2, whole.nbytes, inner.ndim, *inner.shape)))
            request += [f"{dtype} {numbers}\n".encode(), whole.tobytes()]
        self._write(b"".join(request))
        answer = Answer(*(self._line() for _ in range(3)))
        for whole, _, _ in tensors:
            whole.view(np.uint8)[:] = np.frombuffer(self._process.stdout.read(whole.nbytes), np.uint8)
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def _write(self, request):
        self._process.stdin.write(request)
        self._process.stdin.flush()

    def _line(self):
        line = self._process.stdout.readline().decode()
        assert line.endswith("\n"), f"the library's process ended with code {self._process.wait()}"
        return line[:-1]


def compiled(source: str, *flags: str) -> str:
    """Compiles a file of tests/support for the processor of the library, where that was not done or the file is newer.

    Args:
        source (str): Its name.
        *flags: For the compiler.

    Returns:
        str, the path of the result.
    """
    source = os.path.join(ROOT, "tests", "support", source)
    path = os.path.join(_FOLDER, os.path.splitext(os.path.basename(source))[0])
    if not os.path.exists(path) or os.path.getmtime(path) < os.path.getmtime(source):
        os.makedirs(_FOLDER, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:
            unfinished = os.path.join(folder, "result")
            subprocess.run([os.environ.get("CXX", "g++"), *flags, source, "-o", unfinished, "-ldl"], check=True)
            os.replace(unfinished, path)
    return path
