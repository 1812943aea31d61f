"""Tests everything that docs/ascend.md lists as untested on an NPU, and writes a report; see verify_npu.sh.

The exit code is 0 if all steps ran and passed; without --only, one may be left out for lack of NPUs. It is 1 if a step
failed or could not run, 2 for wrong options, and 130, 143 or 129 after Ctrl-C, SIGTERM or SIGHUP.
"""

import argparse
import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
from typing import Dict, Iterator, Sequence

from verify_npu_devices import VISIBLE, Npus, find_npus
from verify_npu_missing import missing
from verify_npu_report import Report
from verify_npu_run import FAILED, NOT_RUN, ROOT, Cleaner, Outcome, Stopped, Unwritable, check_signals, listen
from verify_npu_steps import STEPS, Place

# Variables with which a shell makes choices, and those of `mindlora doctor --adopt` (mindlora/ops/measured.py).
CHOICES = ("MINDLORA_BACKEND", "MINDLORA_ASCEND")
MEASURED = ("MINDLORA_ASCEND_DRAW", "MINDLORA_ASCEND_MIX_LAUNCH")


def arguments() -> argparse.Namespace:
    """Parses the command line, and creates the report's folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["Ascend", "CPU"], default="Ascend", help="default: Ascend")
    parser.add_argument("--soc", help="for build_ascend.sh: ascend910b or ascend910_93. Default: both")
    parser.add_argument("--name", help="what the report calls this machine. Default: its NPU")
    parser.add_argument("--quick", action="store_true", help="few shapes")
    parser.add_argument(
        "--limit", type=int, metavar="SECONDS", help="of each command. Default: an hour, two of the build"
    )
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
    listen()
    with temporary_folder() as work:
        try:
            place = prepared(given, work)
        except Unwritable as problem:
            say(f"error: {problem}: name another folder with --output.")
            return 2
        report, code = place.report, 1
        try:
            for name in given.only or STEPS:
                report.begin(name)
                for outcome in run_step(name, place):
                    report.end(outcome)
                    say(f"{outcome.name:<36} {outcome.state:<14} {outcome.line}")
                    check_signals()
            code = exit_code(report.outcomes, bool(given.only))
        except Stopped as stopped:
            code = 128 + stopped.number
            end_early(report, str(stopped))
        except Unwritable as problem:
            end_early(report, str(problem))
        report.free()
    say(f"\n{given.output}: send this folder back; report.md is its page")
    return code


def prepared(given: argparse.Namespace, work: str) -> Place:
    """Returns the Place where the steps run; its page lists what is missing."""
    # Choices of the shell must not affect the comparisons here.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(CHOICES)}
    # Nor must earlier adopted choices: the variables are set, but empty.
    environment.update(dict.fromkeys(MEASURED, ""))
    environment.update(PYTHONPATH=os.pathsep.join(filter(None, [ROOT, environment.get("PYTHONPATH")])))
    environment.update(LOG_MF_PATH=os.path.join(work, "log"), MS_COMPILER_CACHE_PATH=os.path.join(work, "calls"))
    # The folder's removal also removes the leftovers of killed commands; a command's last line shows how far it got.
    environment.update(TMPDIR=work, PYTHONUNBUFFERED="1")
    environment.setdefault("GLOG_v", "3")
    environment.update(PYTHON=sys.executable, PATH=path_with_this_python(environment.get("PATH", os.defpath)))
    places = {work: "<work>", given.output: "<report>"}
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH"):
        if os.environ.get(variable):
            places[os.environ[variable]] = f"<{variable}>"
    clean = Cleaner(places)
    npus = find_npus(environment)
    if npus.free:
        environment[VISIBLE] = ",".join(npus.free)
    steps = given.only or list(STEPS)
    head, lacks = machine(given, npus), missing(steps, given.device, environment)
    if lacks:
        head["missing"] = lacks
        say(f"missing: {lacks}")
    report = Report(given.output, head, steps, given.device, clean)
    return Place(given, work, environment, clean, npus, report)


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """Yields a folder that is removed at the end, even while killed processes are still releasing it."""
    folder = tempfile.mkdtemp(prefix="verify_npu_")
    try:
        yield folder
    finally:
        for _ in range(10):
            shutil.rmtree(folder, ignore_errors=True)
            if not os.path.exists(folder):
                break
            time.sleep(0.5)


def end_early(report: Report, reason: str) -> None:
    """Writes the last page of a run that ends early."""
    say(f"\nended early: {reason}")
    try:
        report.stop(reason)
    except Unwritable as problem:
        say(f"report.md is that of the step before: {problem}")


def exit_code(outcomes: Sequence[Outcome], named: bool) -> int:
    """Returns 0 if all steps ran and passed, except excused steps that --only did not name (``named``)."""
    left = [outcome for outcome in outcomes if outcome.state == NOT_RUN and (named or not outcome.excused)]
    return 1 if left or any(outcome.state == FAILED for outcome in outcomes) else 0


def say(text: str) -> None:
    """Prints a line. A closed terminal must not keep the page from being written."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def path_with_this_python(path: str) -> str:
    """Returns a PATH on which python and python3 are this Python, for build_ascend.sh and msrun."""
    folder = os.path.dirname(sys.executable)
    found = (shutil.which(name, path=path) for name in ("python", "python3"))
    same = all(program is not None and os.path.dirname(program) == folder for program in found)
    return path if same else os.pathsep.join([folder, path])


def run_step(name: str, place: Place) -> Iterator[Outcome]:
    """Yields the outcomes of a step. An error of the script itself is an outcome too, and the next step runs."""
    try:
        yield from STEPS[name](place)
    except (Stopped, Unwritable):
        raise
    except Exception as error:  # A page with one wrong row is better than none.
        yield Outcome(name, FAILED, place.clean(f"{type(error).__name__}: {error}".splitlines()[0]))


def machine(given: argparse.Namespace, npus: Npus) -> Dict[str, str]:
    """Returns the conditions of the results."""
    from bench.common import version

    with open(os.path.join(ROOT, "mindlora", "__init__.py"), encoding="utf-8") as file:
        own = re.search(r'__version__ = "(.+?)"', file.read())
    return {
        "name": given.name or npus.kind or "a machine without an NPU",
        "mindlora": own[1] if own else "unknown",
        "MindSpore": version("mindspore"),
        "MindFormers": version("mindformers"),
        "processor": os.uname().machine,
        "device": given.device,
        "NPUs": str(npus),
        "shapes": "few (--quick)" if given.quick else "all",
    }


if __name__ == "__main__":
    sys.exit(main())
