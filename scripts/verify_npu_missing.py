"""What scripts/verify_npu.py can see to be missing before its first step, so that nobody waits an hour to read it."""

import os
import shutil
import subprocess
from typing import Mapping, Sequence

from verify_npu_run import ROOT

# The steps that write into the checkout, and those that compile C++ in it or through MindSpore.
WRITE = ("library", "build", "aclnn")
COMPILE = ("library", "build", "aclnn", "operators", "fine-tune", "two-devices", "bench", "msprof", "ways")


def missing(steps: Sequence[str], device: str, environment: Mapping[str, str]) -> str:
    """Returns what the steps lack, with what to do about it, or "".

    Args:
        steps (sequence of str): Those that were asked for.
        device (str): Ascend or CPU.
        environment (mapping): The variables of the commands.
    """
    found = []
    if unwritable() and not {*WRITE}.isdisjoint(steps):
        found.append(unwritable())
    if not {*COMPILE}.isdisjoint(steps) and not shutil.which("g++", path=environment["PATH"]):
        found.append("g++: install it (Debian, Ubuntu: apt-get install g++)")
    if "build" in steps and device == "Ascend":
        # It knows what CANN's compiler and cmake ask of the machine.
        command = ["bash", os.path.join(ROOT, "scripts", "build_ascend.sh"), "--missing"]
        done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
        found += done.stdout.splitlines()
    return "; ".join(found)


def unwritable() -> str:
    """Returns that the checkout cannot be written to, with what to do about it, or ""."""
    if os.access(ROOT, os.W_OK):
        return ""
    return f"a checkout that can be written to: cp -r {ROOT} FOLDER && bash FOLDER/scripts/verify_npu.sh"
