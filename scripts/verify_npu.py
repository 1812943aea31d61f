"""Tries all that docs/ascend.md says was not tried on an NPU, and writes a folder with one page; see verify_npu.sh.

The exit code is 0 if everything that could run holds, 1 if something does not, 2 for wrong options, 130 after Ctrl-C.
"""

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Dict, Iterator, List

from verify_npu_choices import choices, section
from verify_npu_devices import VISIBLE, find_npus
from verify_npu_page import page
from verify_npu_run import FAILED, HELD, NOT_RUN, ROOT, Cleaner, Outcome
from verify_npu_steps import STEPS, Place

# The variables by which a shell chooses, and those that `mindlora doctor --adopt` leads to (mindlora/ops/measured.py).
CHOICES = ("MINDLORA_BACKEND", "MINDLORA_ASCEND")
MEASURED = ("MINDLORA_ASCEND_DRAW", "MINDLORA_ASCEND_MIX_LAUNCH")


def arguments() -> argparse.Namespace:
    """Reads the command line, and makes the folder of the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["Ascend", "CPU"], default="Ascend", help="default: Ascend")
    parser.add_argument("--soc", help="for build_ascend.sh: ascend910b or ascend910_93. Default: both")
    parser.add_argument("--name", help="what the report calls this machine. Default: its NPU")
    parser.add_argument("--quick", action="store_true", help="few shapes")
    parser.add_argument("--only", nargs="+", choices=list(STEPS), metavar="STEP", help=f"of {', '.join(STEPS)}")
    parser.add_argument(
        "--output", type=os.path.abspath, help="an empty or new folder. Default: one in output/, named after the time"
    )
    given = parser.parse_args()
    given.output = given.output or os.path.join(ROOT, "output", time.strftime("verify_npu_%Y%m%d_%H%M%S"))
    try:
        if os.path.isdir(given.output) and os.listdir(given.output):
            parser.error(f"{given.output} is not empty: name a new folder.")
        os.makedirs(os.path.join(given.output, "logs"))
    except OSError as error:
        parser.error(f"{given.output} cannot be written to ({error.strerror}): name another folder with --output.")
    return given


def main() -> int:
    """Runs the steps; returns the exit code."""
    given = arguments()
    outcomes: List[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="verify_npu_") as work:
        # Choices of the shell must not reach what is compared here.
        environment = {key: value for key, value in os.environ.items() if not key.startswith(CHOICES)}
        # Nor what was adopted here before: set, but to nothing.
        environment.update(dict.fromkeys(MEASURED, ""))
        environment.update(PYTHONPATH=os.pathsep.join(filter(None, [ROOT, environment.get("PYTHONPATH")])))
        environment.update(LOG_MF_PATH=os.path.join(work, "log"), MS_COMPILER_CACHE_PATH=os.path.join(work, "calls"))
        environment.setdefault("GLOG_v", "3")
        environment.update(PYTHON=sys.executable, PATH=path_with_this_python(environment.get("PATH", os.defpath)))
        places = {work: "<work>", given.output: "<report>"}
        for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH"):
            if os.environ.get(variable):
                places[os.environ[variable]] = f"<{variable}>"
        npus = find_npus(environment)
        if npus.free:
            environment[VISIBLE] = ",".join(npus.free)
        place = Place(given, work, environment, Cleaner(places), npus)
        try:
            for name in given.only or STEPS:
                for outcome in run_step(name, place):
                    outcomes.append(outcome)
                    print(f"{outcome.name:<36} {outcome.state:<14} {outcome.line}", flush=True)
                    write(place, outcomes)
        except KeyboardInterrupt:
            print(f"\ninterrupted: {given.output} has the steps that ended before")
            return 130
    print(f"\n{given.output}: send this folder back; report.md is its page")
    return 1 if any(outcome.state == FAILED for outcome in outcomes) else 0


def path_with_this_python(path: str) -> str:
    """Returns a PATH on which python and python3 are this Python: build_ascend.sh and msrun take them from there."""
    folder = os.path.dirname(sys.executable)
    found = (shutil.which(name, path=path) for name in ("python", "python3"))
    same = all(program is not None and os.path.dirname(program) == folder for program in found)
    return path if same else os.pathsep.join([folder, path])


def run_step(name: str, place: Place) -> Iterator[Outcome]:
    """Yields the outcomes of a step. What the script itself trips over is an outcome too, and the next step runs."""
    try:
        yield from STEPS[name](place)
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        yield Outcome(name, FAILED, place.clean(f"{type(error).__name__}: {error}".splitlines()[0]))


def write(place: Place, outcomes: List[Outcome]) -> None:
    """Writes report.json and report.md anew, so that they are there whatever happens later."""
    head, folder = machine(place), place.given.output
    states = {state: sum(outcome.state == state for outcome in outcomes) for state in (HELD, FAILED, NOT_RUN)}
    chosen = choices(outcomes, place.given.device)
    report = {"machine": head, "states": states, "choices": chosen}
    report["steps"] = [dataclasses.asdict(outcome) for outcome in outcomes]
    shown = "\n".join([page(head, outcomes).rstrip("\n"), *section(chosen), ""])
    for name, text in (("report.json", json.dumps(report, indent=2)), ("report.md", shown)):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(place.clean(text))


def machine(place: Place) -> Dict[str, str]:
    """Returns what the results depend on."""
    from bench.common import version

    with open(os.path.join(ROOT, "mindlora", "__init__.py"), encoding="utf-8") as file:
        own = re.search(r'__version__ = "(.+?)"', file.read())
    return {
        "name": place.given.name or place.npus.kind or "a machine without an NPU",
        "mindlora": own[1] if own else "unknown",
        "MindSpore": version("mindspore"),
        "MindFormers": version("mindformers"),
        "processor": os.uname().machine,
        "device": place.given.device,
        "NPUs": str(place.npus),
        "shapes": "few (--quick)" if place.given.quick else "all",
    }


if __name__ == "__main__":
    sys.exit(main())
