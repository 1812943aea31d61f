"""The NPUs of scripts/verify_npu.py: their number, those that no other process uses, and a free port."""

import contextlib
import dataclasses
import glob
import re
import shutil
import socket
import subprocess
from typing import List, Mapping, Optional

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_BUSY = re.compile(r"^\|\s*(\d+)\s+(\d+)\s*\|\s*\d+\s*\|", re.MULTILINE)
_KIND = re.compile(r"^\|\s*\d+\s+(\w*\d\w*)\s*\|\s*[A-Z]\w+\s*\|", re.MULTILINE)
_IDLE = re.compile(r"No running processes found in NPU (\d+)")


@dataclasses.dataclass(frozen=True)
class Npus:
    """The NPUs of this machine.

    Attributes:
        seen (int): The number of NPUs.
        free (list of str or None): The numbers of NPUs that may be used; None if unknown.
        why (str): The source of ``free``, or why it is unknown.
        kind (str): Their name in npu-smi, such as 910B3; "" if unknown.
    """

    seen: int
    free: Optional[List[str]]
    why: str
    kind: str = ""

    def __str__(self):
        if not self.seen:
            return "none"
        free = "which are free is not known" if self.free is None else f"free: {', '.join(self.free) or 'none'}"
        return f"{self.seen}, {free} ({self.why})"

    def problem(self) -> Optional[str]:
        """Returns why there is no NPU to run on, or None."""
        if not self.seen:
            return "no NPU: there is no /dev/davinci0"
        if self.free == []:
            return (
                f"no free NPU: {self.why} shows a process on each of {self.seen}; {VISIBLE} may name one all the same"
            )
        return None


def find_npus(environment: Mapping[str, str]) -> Npus:
    """Returns the NPUs, including those free by ASCEND_RT_VISIBLE_DEVICES or by npu-smi's table of processes."""
    seen = len(glob.glob("/dev/davinci[0-9]*"))
    program = shutil.which("npu-smi", path=f"{environment.get('PATH', '')}:/usr/local/sbin:/usr/local/bin")
    shown = ""
    if seen and program:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run([program, "info"], capture_output=True, text=True, timeout=120, check=False)
            shown = done.stdout
    named = _KIND.search(shown)
    kind = named[1] if named else ""
    if environment.get(VISIBLE):
        return Npus(seen, environment[VISIBLE].split(","), f"named by {VISIBLE}", kind)
    free = free_npus(shown, seen)
    return Npus(seen, free, "npu-smi" if free is not None else "npu-smi info shows no table of processes", kind)


def free_npus(shown: str, seen: int) -> Optional[List[str]]:
    """Returns the numbers of NPUs without a process, or None if the output of npu-smi info does not say.

    npu-smi numbers NPUs and their chips; CANN counts all chips in that order.
    """
    busy = {(int(npu), int(chip)) for npu, chip in _BUSY.findall(shown)}
    npus = sorted({int(npu) for npu in _IDLE.findall(shown)} | {npu for npu, _ in busy})
    if not npus or seen % len(npus):
        return None
    chips = [(npu, chip) for npu in npus for chip in range(seen // len(npus))]
    return [str(number) for number, chip in enumerate(chips) if chip not in busy]


def free_port() -> str:
    """Returns a free port of this machine."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return str(opened.getsockname()[1])
