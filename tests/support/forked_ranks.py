"""Does in a forked process (see tests.support.forked) what msrun does: starts a script on every rank, and waits.

The ranks are forked as well, so none of them imports MindSpore, and the scheduler, which looks for their end every five
seconds, is ended with them. Arguments: how many ranks, the scheduler's port, whether they get a network of their own
("True"), the script and its arguments. What a rank prints is in log/worker_R.log.
"""

import ctypes
import faulthandler
import os
import runpy
import signal
import subprocess
import sys
import time

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
TIMEOUT, PATIENCE = 300, 10  # seconds: of a rank, and of the others when one has failed


def take_network():
    """Gives this process a loopback device of its own, as ``unshare --map-root-user --net`` does."""
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def fork(role, rank, count, port):
    """Forks a process with the environment and the log that msrun gives it; returns its id, and 0 in itself."""
    child = os.fork()
    if child:
        return child
    signal.alarm(TIMEOUT)
    numbers = {"RANK_ID": rank, "DEVICE_ID": rank, "RANK_SIZE": count, "MS_WORKER_NUM": count}
    if role == "MS_WORKER":
        numbers["MS_NODE_ID"] = rank
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MS_ROLE=role, MS_SCHED_HOST="127.0.0.1", MS_SCHED_PORT=port, MS_TOPO_TIMEOUT=str(TIMEOUT))
    name = f"worker_{rank}" if role == "MS_WORKER" else "scheduler"
    log = os.open(os.path.join("log", f"{name}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.enable(file=log)
    return 0


def wait(workers):
    """Waits for the workers; when one fails, the others get a while. Returns the first exit code that is not 0."""
    failed, end = 0, None
    while workers:
        for child in list(workers):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                workers.remove(child)
                failed = failed or os.waitstatus_to_exitcode(status)
        end = end or (failed and time.monotonic() + PATIENCE)
        if end and time.monotonic() > end:
            for child in workers:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return failed


def main(count, port, own_network, script, *arguments):
    os.makedirs("log", exist_ok=True)
    if own_network == "True":
        take_network()
    children = []
    for role, rank in [("MS_SCHED", 0), *(("MS_WORKER", rank) for rank in range(int(count)))]:
        children.append(fork(role, rank, count, port))
        if not children[-1]:
            sys.argv, sys.path[0] = [script, *arguments], os.path.dirname(os.path.abspath(script))
            runpy.run_path(script, run_name="__main__")
            return 0
    scheduler, *workers = children
    code = wait(workers)
    os.kill(scheduler, signal.SIGKILL)
    os.waitpid(scheduler, 0)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
