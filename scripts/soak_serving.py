"""Runs many clients against `mindlora serve` on a small random model, to find wrong or lost answers, and leaks.

    python scripts/soak_serving.py --clients 100 --seconds 600 --json figures.json

The server is a separate process, too small for its clients: requests are preempted, wait and are rejected (429), and
adapters lose their slots. Clients ask adapters and the base for completions and chats, streamed or not, free and
constrained, for tool calls, scores of prompts, tokens, embeddings and classes (tests/support/soak_kinds.py). Each
complete answer is compared with the answer that the same request got alone. Some clients leave in the middle of an
answer; a tenth of them are processes that are killed (SIGKILL) and restarted. Meanwhile, one adapter is rewritten again
and again, another alternates between two weights, and a third is damaged and repaired. Some requests name a missing
adapter, or have an invalid body.

The exit code is 1 if a request that its client did not abandon got no answer, an answer was wrong or a status 5xx,
blocks or slots were not released, the server's memory grew (by 3% and 20 MB from the second fifth of the time to the
last), SIGTERM did not end it with exit code 0, its log has an error, or one of these events did not happen.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import types
from typing import Any, Dict, Iterator, List

from bench import ROOT, common

SIZES = {"slots": 4, "max-running": 24, "block-size": 4, "num-blocks": 80, "max-waiting": 64, "adapter-memory": 40_000}
LENGTH = 192  # Tokens of a prompt, tools included, plus its answer.
BASE = "tiny"
MODELS = ("llama", "qwen3-moe")
PROVOKED = ("evictions from slots", "evictions from memory", "adapters refused", "preemptions", "cancelled")


def main() -> int:
    """Runs the soak; returns the exit code."""
    parser = common.parser(__doc__)
    for name, default, meaning in (
        ("clients", 100, "at once, a tenth of which are processes that are killed"),
        ("seconds", 600, "for which they ask"),
        ("adapters", 12, "three of which change on the disk"),
        ("seed", 0, "of all that is random"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning}. Default: {default}")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help="small and random. Default: %(default)s")
    args = parser.parse_args()
    # Otherwise, transformers advises installing PyTorch.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from tests.support import soak

    plan = soak.Plan(args.clients, args.seconds, args.adapters, seed=args.seed)
    machine = common.machine("mindspore", "mindformers", "uvicorn", "fastapi")
    print(f"{common.machine_line(machine)}\n{plan}\n{SIZES}\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        ended: List[str] = []
        with serving(folder, ended, args.model) as server:
            figures = soak.soak(server, folder, BASE, plan)
    missing = [name for name in PROVOKED if not figures["server"][name]]
    figures["defects"] += [*(f"there were no {name}: other sizes would provoke them" for name in missing), *ended]
    print(text(figures))
    common.write_json(args.json, {"machine": machine, "sizes": SIZES, **figures})
    return 1 if figures["defects"] else 0


@contextlib.contextmanager
def serving(folder: str, ended: List[str], model: str) -> Iterator[Any]:
    """Runs `mindlora serve` on a small model in a folder; yields its URL and pid, and ends it with SIGTERM.

    Args:
        folder (str): An empty folder.
        ended (list of str): Collects the faults of the server's log and end.
        model (str): One of MODELS.
    """
    from tests.support.served_llama import wait_until_ready, write_llama, write_qwen3_moe

    if model == "llama":
        write_llama(folder, LENGTH)
        source = ["--config", "run.yaml"]
    else:
        write_qwen3_moe(folder, LENGTH)
        source = ["--model", "base"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
    words = ["serve", *source, "--adapters", "adapters", "--port", str(port), "--model-name", BASE]
    command = [sys.executable, "-m", "mindlora.cli", *words, *options, "--request-log", "requests.jsonl"]
    path = os.path.join(folder, "log.txt")
    environment = {**os.environ, "PYTHONPATH": ROOT}
    with open(path, "w", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, lambda: process.poll() is not None and _read(path))
        yield types.SimpleNamespace(url=url, pid=process.pid)
    finally:
        if process.poll() is not None:
            print(f"The server has ended by itself:\n{_read(path)[-4000:]}")
        code = _end(process)
    wrong = [line for line in _read(path).splitlines() if "ERROR" in line or "Traceback" in line]
    ended += [f"the server's log: {line}" for line in wrong]
    if code:
        ended.append(f"SIGTERM ended the server with exit code {code}")


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Returns the exit code of a process after SIGTERM; after a minute, the process is killed."""
    process.terminate()
    try:
        return process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def text(figures: Dict[str, Any]) -> str:
    """Formats the figures as a table."""
    rows = {
        "requests": figures["requests"],
        **figures["outcomes"],
        "sent again, as the connection was closed before an answer": figures["sent again"],
        "tokens in whole answers": figures["tokens in whole answers"],
        **{f"first token, {name}, seconds": value for name, value in figures["first token, seconds"].items()},
        "adapters changed on the disk": figures["adapters changed"],
        **{f"server: {name}": f"{count:.0f}" for name, count in figures["server"].items()},
        **{f"memory: {name}": json.dumps(value) for name, value in figures["memory"].items()},
        "defects": len(figures["defects"]),
    }
    shown = [f"{name:<60}{value!s:>48}" for name, value in rows.items()]
    return "\n".join([*shown, *(f"DEFECT {problem}" for problem in figures["defects"][:20])])


if __name__ == "__main__":
    sys.exit(main())
