"""Bytes, losses and seconds of compressed gradient exchange against dense exchange, between real processes.

Bytes: the bytes that two and four ranks send in a step, by formula and by the loopback device's counter; for eight
ranks only by formula. Losses: LoRA fine-tunings of a small Llama on two ranks, for each seed, with a control that drops
unsent gradients. Seconds: an exchange between two network namespaces, with a link limited to 100 Mbit/s and 1 Gbit/s by
a token bucket; if the machine does not allow that, the seconds are computed from the bytes, and the table says so. On
CPUs, a receiver returns every message as a receipt, so the device counts twice the bytes of the formula.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from typing import Any, Dict, List, Optional, Sequence

import numpy as np
from mindspore import Parameter, Tensor

from bench import ROOT, exchange_rank
from bench.common import add_number, child_command
from mindlora.training.exchange.exchange import CPU_RECEIPTS, FlatLayout, Ranks, make_exchange
from mindlora.training.exchange.settings import exchange_settings

METHODS = {
    "dense": {"type": "dense", "local_size": 1},
    "float16": {"type": "float16", "local_size": 1},
    "quantized": {"type": "quantized", "local_size": 1},
    "quantized 4": {"type": "quantized", "bits": 4, "local_size": 1},
}
TRAINED = {
    "dense": METHODS["dense"],
    "float16": METHODS["float16"],
    "quantized": METHODS["quantized"],
    "quantized, no feedback": {**METHODS["quantized"], "feedback": False},
    "quantized 4": METHODS["quantized 4"],
}
RANKS, BY_FORMULA = (2, 4), 8
LINKS = {"100 Mbit/s": (1e8, "100mbit"), "1 Gbit/s": (1e9, "1gbit")}
OWN_NETWORK = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
GOALS = {"saving": 0.7, "bytes": 0.03}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_number(parser, "--seeds", [1, 2, 3, 4, 5], [1], "of the fine-tunings", nargs="+")


def run(args: argparse.Namespace) -> Dict[str, Any]:
    """Prints the tables and returns the figures."""
    figures: Dict[str, Any] = {"methods": METHODS, "goals": GOALS}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        figures["bytes"] = measure_bytes(100_000 if args.quick else 1_000_000)
        print(bytes_table(figures["bytes"]), flush=True)
        figures["losses"] = measure_losses(args)
        print(loss_table(figures["losses"]), flush=True)
        figures["seconds"] = measure_seconds(250_000 if args.quick else 1_000_000, 2 if args.quick else 8)
        print(seconds_table(figures["seconds"]), flush=True)
    return figures


def child(args: argparse.Namespace, words: List[str]) -> None:
    """Runs one rank: takes the measurement that ``words`` names, with the JSON settings that follow."""
    what, settings = words
    exchange_rank.measure(what, json.loads(settings))


def measure_bytes(size: int) -> Dict[str, Any]:
    """Returns {ranks: {method: bytes that rank 0 sends in a step, and the device's bytes of all ranks}}."""
    rows: Dict[str, Any] = {"elements": size}
    isolated = subprocess.run([*OWN_NETWORK, "true"], capture_output=True, check=False).returncode == 0
    for count in RANKS:
        result = run_ranks(count, "exchange", {"methods": METHODS, "size": size, "steps": 4}, isolated)
        rows[str(count)] = {
            name: {
                "formula": row["counted"],
                # Unless these processes have the loopback device to themselves, the bytes that rank 0 wrote count.
                "measured": row["device"] / count if isolated else row["written"],
            }
            for name, row in result.items()
        }
    rows[str(BY_FORMULA)] = {name: {"formula": by_formula(name, size, BY_FORMULA)} for name in METHODS}
    return rows


def by_formula(name: str, size: int, count: int) -> int:
    """Returns the number of bytes that a rank sends in a step."""
    layout = FlatLayout([Parameter(Tensor(np.zeros(size, np.float32)), name="a")])
    return make_exchange(exchange_settings(METHODS[name]), layout, Ranks(0, count), 1).bytes_per_step


def measure_losses(args: argparse.Namespace) -> Dict[str, List[float]]:
    """Returns {method: held-out loss of each seed}, and the loss before training as "before"."""
    steps, base_steps = (60, 60) if args.quick else (200, 300)
    settings = {"methods": TRAINED, "seeds": args.seeds, "steps": steps, "base_steps": base_steps}
    return run_ranks(2, "loss", settings, False)


def measure_seconds(size: int, steps: int) -> Dict[str, Any]:
    """Returns {link: {method: seconds of a step}}; "measured" says whether the link was actually limited."""
    limited = Link.allowed()
    seconds: Dict[str, Any] = {"elements": size, "measured": limited}
    for name, (rate, word) in LINKS.items():
        if limited:
            with Link(word) as link:
                result = link.run({"methods": METHODS, "size": size, "steps": steps})
            seconds[name] = {method: statistics.median(row["seconds"]) for method, row in result.items()}
        else:
            seconds[name] = {method: 8 * CPU_RECEIPTS * by_formula(method, size, 2) / rate for method in METHODS}
    return seconds


class Link:
    """Two network namespaces with a limited link between them, one rank in each. Needs root."""

    NAMES, ADDRESSES = ("mindlora-bench-a", "mindlora-bench-b"), ("10.77.0.1", "10.77.0.2")

    def __init__(self, rate: str):
        self.rate = rate

    @classmethod
    def allowed(cls) -> bool:
        """Returns whether this machine allows such a link."""
        if not (shutil.which("ip") and shutil.which("tc")):
            return False
        try:
            with cls("100mbit"):
                return True
        except subprocess.CalledProcessError:
            return False

    def __enter__(self) -> "Link":
        try:
            for name in self.NAMES:
                _call("ip", "netns", "add", name)
            first, second = self.NAMES
            _call("ip", "link", "add", "veth-a", "netns", first, "type", "veth", "peer", "veth-b", "netns", second)
            for name, address, device in zip(self.NAMES, self.ADDRESSES, ("veth-a", "veth-b")):
                inside = ("ip", "netns", "exec", name)
                _call(*inside, "ip", "address", "add", f"{address}/24", "dev", device)
                _call(*inside, "ip", "link", "set", "lo", "up")
                _call(*inside, "ip", "link", "set", device, "up")
                bucket = ("rate", self.rate, "burst", "256kb", "latency", "400ms")
                _call(*inside, "tc", "qdisc", "add", "dev", device, "root", "tbf", *bucket)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for name in self.NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def run(self, settings: Dict[str, Any]) -> Dict[str, Any]:
        """Runs the two ranks, and returns rank 0's measurements."""
        port = str(free_port())
        nodes = [
            subprocess.Popen(
                ["ip", "netns", "exec", name]
                + msrun(2, 1, self.ADDRESSES[0], port, number, ["exchange", json.dumps(settings)]),
                env=environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for number, name in enumerate(self.NAMES)
        ]
        return read_result([node.wait(timeout=600) for node in nodes])


def _call(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=True)


def run_ranks(count: int, what: str, settings: Dict[str, Any], isolated: bool) -> Any:
    """Runs ``count`` ranks on this machine, and returns rank 0's measurements."""
    command = msrun(count, count, "127.0.0.1", str(free_port()), 0, [what, json.dumps(settings)])
    if isolated:
        command = [*OWN_NETWORK, *command]
    ended = subprocess.run(command, env=environment(), capture_output=True, check=False)
    return read_result([ended.returncode])


def msrun(count: int, local: int, address: str, port: str, node: int, words: List[str]) -> List[str]:
    """Returns the command that starts a machine's ranks, each of them a child with ``words``."""
    options = {"worker_num": count, "local_worker_num": local, "master_addr": address, "master_port": port}
    options.update(node_rank=node, log_dir=f"log_{node}", join=True)
    flags = [f"--{key}={value}" for key, value in options.items()]
    _, *script = child_command("exchange", "--child", *words)
    return [sys.executable, "-m", "mindspore.parallel.cluster.run", *flags, *script]


def environment() -> Dict[str, str]:
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}


def read_result(codes: Sequence[Optional[int]]) -> Any:
    """Returns rank 0's result, or exits with the end of its log."""
    if any(codes):
        with open(os.path.join("log_0", "worker_0.log"), encoding="utf-8") as file:
            sys.exit(f"msrun ended with exit codes {list(codes)}:\n{file.read()[-3000:]}")
    with open("result.json", encoding="utf-8") as file:
        return json.load(file)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def bytes_table(figures: Dict[str, Any]) -> str:
    """Formats the bytes as a table."""
    lines = [
        f"\nbytes that a rank sends in a step, {figures['elements']:,} gradients (goal: quantized saves at least "
        f"{GOALS['saving']:.0%})",
        f"{'ranks':>5}  {'method':<10}{'formula':>12}{'saving':>9}{'device / (2 x formula)':>25}",
    ]
    for count in (*RANKS, BY_FORMULA):
        rows = figures[str(count)]
        for name, row in rows.items():
            saving = 1 - row["formula"] / rows["dense"]["formula"]
            ratio = f"{row['measured'] / CPU_RECEIPTS / row['formula']:.3f}" if "measured" in row else "by formula"
            lines.append(f"{count:>5}  {name:<10}{row['formula']:>12,}{saving:>9.1%}{ratio:>25}")
    return "\n".join(lines)


def loss_table(figures: Dict[str, Any]) -> str:
    """Formats the losses as a table."""
    dense = figures["dense"]
    lines = [
        "\nheld-out loss (nats per byte) after LoRA fine-tunings of a Llama on 2 ranks; before: "
        f"{figures['before']:.4f}; dense over {len(dense)} seeds: {min(dense):.4f} to {max(dense):.4f}",
        f"{'method':<26}{'median':>8}{'- dense':>10}   each seed",
    ]
    middle = statistics.median(dense)
    for name in TRAINED:
        losses = figures[name]
        median = statistics.median(losses)
        each = " ".join(f"{loss:.4f}" for loss in losses)
        lines.append(f"{name:<26}{median:>8.4f}{median - middle:>+10.4f}   {each}")
    return "\n".join(lines)


def seconds_table(figures: Dict[str, Any]) -> str:
    """Formats the seconds as a table."""
    how = "measured" if figures["measured"] else "BY FORMULA from the bytes, as this machine allows no limited link"
    lines = [
        f"\nmilliseconds of an exchange between 2 ranks, {figures['elements']:,} gradients, receipts included; {how}"
    ]
    lines.append(f"{'link':<12}" + "".join(f"{name:>12}" for name in METHODS) + f"{'dense / quantized 4':>21}")
    for link in LINKS:
        row = figures[link]
        times = "".join(f"{1e3 * row[name]:>12.1f}" for name in METHODS)
        lines.append(f"{link:<12}{times}{row['dense'] / row['quantized 4']:>20.1f}x")
    return "\n".join(lines)
