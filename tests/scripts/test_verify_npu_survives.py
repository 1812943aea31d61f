"""What scripts/verify_npu.sh leaves where it is ended, hangs, or finds no room: its page, its exit code, no process."""

import contextlib
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT
from tests.support.made_up_cann import made_up_cann

# A build that does not end, and says in which process.
ENDLESS = 'file(WRITE "$ENV{MINDLORA_TEST_LOG}" "")\nexecute_process(COMMAND sh -c "echo building; exec sleep 3210")\n'
pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")


@pytest.fixture
def machine(tmp_path):
    """A checkout of its own beside a made-up CANN whose build does not end; returns the variables for it."""
    for name in ("scripts", "ops"):
        shutil.copytree(os.path.join(ROOT, name), tmp_path / "checkout" / name)
    (tmp_path / "checkout/mindlora").mkdir()
    shutil.copy(os.path.join(ROOT, "mindlora/__init__.py"), tmp_path / "checkout/mindlora")
    made_up_cann(tmp_path, "8.5.0", cmake_code=ENDLESS)
    (tmp_path / "tmp").mkdir()
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ASCEND", "MINDLORA"))}
    kept.update(ASCEND_HOME_PATH=str(tmp_path / "cann"), MINDLORA_TEST_LOG=str(tmp_path / "log"), PYTHON=sys.executable)
    return {**kept, "TMPDIR": str(tmp_path / "tmp")}


def start(tmp_path, machine, *arguments, output=None):
    command = ["bash", str(tmp_path / "checkout/scripts/verify_npu.sh"), "--only", "build", "aclnn", *arguments]
    command += ["--output", str(output or tmp_path / "out")]
    return subprocess.Popen(command, env=machine, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read(path):
    return path.read_text() if path.exists() else ""


def wait_for(condition, seconds=60):
    ends = time.time() + seconds
    while not condition():
        assert time.time() < ends
        time.sleep(0.05)


def read_bytes(path):
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read()
    return b""


def builds_of(tmp_path):
    """The processes of the build in this checkout: process id -> command line."""
    found = {}
    for folder in glob.glob("/proc/[0-9]*"):
        line = read_bytes(f"{folder}/cmdline").replace(b"\0", b" ").decode("utf-8", "replace")
        if str(tmp_path).encode() in read_bytes(f"{folder}/environ") and "verify_npu" not in line:
            found[int(os.path.basename(folder))] = line
    return found


@pytest.mark.parametrize(
    "number, name", [(signal.SIGINT, "Ctrl-C (SIGINT)"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")]
)
def test_a_signal_ends_the_step_and_the_page_says_so(tmp_path, machine, number, name):
    process = start(tmp_path, machine)
    page = tmp_path / "out/report.md"
    wait_for(lambda: any("sleep 3210" in line for line in builds_of(tmp_path).values()))
    text = read(page)
    assert "| build | is running | since" in text and "at most 7200 s" in text
    assert "**The run is at build.** Not begun: aclnn." in text
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert f"ended early: {name}" in output and "Traceback" not in output
    text = read(page)
    assert f"**The run ended early: {name}" in text and "Not begun: aclnn." in text
    assert "What could run holds" not in text and f"| build | ended early | {name}" in text
    (step,) = json.loads(read(tmp_path / "out/report.json"))["steps"]
    assert step["state"] == "ended early" and step["log"] == "logs/build.log"
    assert sorted(os.listdir(tmp_path / "out")) == ["logs", "report.json", "report.md"]
    assert os.listdir(tmp_path / "tmp") == [] and not builds_of(tmp_path)


def test_a_step_that_hangs_is_ended_and_the_next_one_runs(tmp_path, machine):
    process = start(tmp_path, machine, "--limit", "3")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    text = read(tmp_path / "out/report.md")
    assert "| build | does not hold | it did not end within 3 s and was killed; last line: " in text
    assert "| aclnn | not run | " in text and not builds_of(tmp_path)


def test_a_run_that_is_killed_without_a_word_leaves_a_page_that_says_where_it_was(tmp_path, machine):
    process = start(tmp_path, machine)
    wait_for(lambda: any("sleep 3210" in line for line in builds_of(tmp_path).values()))
    process.kill()
    process.communicate()
    text = read(tmp_path / "out/report.md")
    assert "**The run is at build.**" in text
    assert "if it is older than a minute and no such process is left, the run was killed there." in text
    for number in builds_of(tmp_path):
        os.kill(number, signal.SIGKILL)


def mounted(tmp_path, machine, options, script):
    """Runs a shell script behind a mount that no other process sees."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount anything")
    (tmp_path / "mount").mkdir()
    command = f"mount {options} {tmp_path}/mount && {script}"
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", command], env=machine, capture_output=True, text=True, check=False
    )


FULL = """
cd {0}; bash checkout/scripts/verify_npu.sh --only build aclnn --output mount/out > said 2>&1 & run=$!
until grep -q '^| build | is running' mount/out/report.md 2> nothing; do sleep 0.1; done
cat /dev/zero > mount/fill 2> nothing
wait $run; echo $? > code; cp mount/out/report.md mount/out/report.json {0}
"""


def test_where_the_disk_is_full_the_last_page_is_whole(tmp_path, machine):
    result = mounted(tmp_path, machine, "-t tmpfs -o size=1200k none", FULL.format(tmp_path))
    assert read(tmp_path / "code") == "1\n", result.stderr + read(tmp_path / "said")
    text = read(tmp_path / "report.md")
    # What was written when the space ended: the page, or the log of the build.
    (what,) = re.findall(r"\*\*The run ended early: (.* cannot be written to \(No space left on device\))\.\*\*", text)
    assert "Not begun: aclnn." in text and f"| build | ended early | {what}; it ran since" in text
    assert json.loads(read(tmp_path / "report.json"))["steps"][0]["state"] == "ended early"
    assert os.listdir(tmp_path / "tmp") == [] and not builds_of(tmp_path)


def test_a_folder_without_room_for_a_page_is_one_line(tmp_path, machine):
    run = f"bash {tmp_path}/checkout/scripts/verify_npu.sh --only build --output {tmp_path}/mount/out"
    result = mounted(tmp_path, machine, "-t tmpfs -o size=100k none", run)
    assert result.returncode == 2 and result.stdout.endswith(
        "mount/out has no room for a page (No space left on device): name another folder with --output.\n"
    ), result.stdout + result.stderr


def test_a_checkout_that_cannot_be_written_to_gets_advice_that_helps(tmp_path, machine):
    mount = f"--bind {tmp_path}/checkout"
    script = f"mount -o remount,ro,bind {tmp_path}/mount"
    run = f"bash {tmp_path}/mount/scripts/verify_npu.sh --only build aclnn"
    result = mounted(tmp_path, machine, mount, f"{script} && {run} --output {tmp_path}/out")
    assert result.returncode == 1 and "--install-path" not in result.stdout, result.stderr
    assert (
        f"missing: a checkout that can be written to: cp -r {tmp_path}/mount FOLDER && bash FOLDER/scr" in result.stdout
    )
    text = read(tmp_path / "out/report.md")
    for step in ("build", "aclnn"):
        assert f"| {step} | not run | it needs a checkout that can be written to: cp -r <checkout> FOLDER" in text
