"""Checks for missing requirements before the first step of scripts/verify_npu.py, to avoid an hour's wait."""

import os
import shutil
import subprocess
from typing import Mapping, Sequence

from verify_npu_run import ROOT

# Steps that write into the checkout, and steps that compile C++ in it or through MindSpore.
WRITE = ("library", "build", "aclnn")
COMPILE = ("library", "build", "aclnn", "operators", "fine-tune", "two-devices", "bench", "msprof", "ways")


def missing(steps: Sequence[str], device: str, environment: Mapping[str, str]) -> str:
    """Returns the requirements that the steps lack, with the remedies, or "".

    Args:
        steps (sequence of str): The requested steps.
        device (str): Ascend or CPU.
        environment (mapping): The commands' environment variables.
    """
    found = []
    if unwritable() and not {*WRITE}.isdisjoint(steps):
        found.append(unwritable())
    if not {*COMPILE}.isdisjoint(steps) and not shutil.which("g++", path=environment["PATH"]):
        found.append("g++: install it (Debian, Ubuntu: apt-get install g++)")
    if "build" in steps and device == "Ascend":
        # The script knows the requirements of CANN's compiler and cmake.
        command = ["bash", os.path.join(ROOT, "scripts", "build_ascend.sh"), "--missing"]
        done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
        found += done.stdout.splitlines()
    return "; ".join(found)


def unwritable() -> str:
    """Returns a message if the checkout cannot be written to, with the remedy, or ""."""
    if os.access(ROOT, os.W_OK):
        return ""
    return f"a checkout that can be written to: cp -r {ROOT} FOLDER && bash FOLDER/scripts/verify_npu.sh"
