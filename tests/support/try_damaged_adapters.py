"""Tries each case of damaged_adapters.py and prints what happened as JSON: python try_damaged_adapters.py FOLDER.

It is a separate process, so that a case that crashes or uses up memory does not end the tests, and one process for all
cases, since MindSpore takes seconds to import.
"""

import json
import logging
import os
import pathlib
import resource
import sys
import time

from mindlora import LoraConfig, apply_lora, load_lora
from mindlora.core.errors import LoraError
from mindlora.files.adapters import files as adapter_files
from tests.support.damaged_adapters import CASES
from tests.support.networks import TinyModel, adapters, randomize, snapshot


def main(root):
    """Prints one line of JSON for each case."""
    logging.disable(logging.CRITICAL)
    built, bare = TinyModel(1), TinyModel(1)
    for network in (built, bare):
        randomize(network.get_parameters())
    apply_lora(built, LoraConfig(lora_rank=2, lora_alpha=3, target_modules=["wq", "wk"]))
    randomize(adapters(built).values(), 1)
    # So that the memory of the libraries does not count for the first case.
    for name in ("ckpt: half a pair", "bin: cut"):
        attempt(lambda path: adapter_files.read(path), make(name, pathlib.Path(root, "warm-up", name)))
    for number, name in enumerate(CASES):
        folder = pathlib.Path(root, str(number))
        path = make(name, folder)
        networks, before = (snapshot(built), snapshot(bare)), (content_of(root), bytes_of(folder))
        memory, begin = peak(), time.perf_counter()
        read = attempt(lambda path: adapter_files.read(path, allow_pickle=True), path)
        # The longest of the three calls, without the time of the snapshots.
        seconds = [time.perf_counter() - begin]
        loads = []
        for network in (built, bare):
            begin = time.perf_counter()
            loads.append(
                attempt(
                    lambda path, network=network: load_lora(
                        network, path, on_base_mismatch="ignore", allow_pickle=True
                    ),
                    path,
                )
            )
            seconds.append(time.perf_counter() - begin)
        print(
            json.dumps(
                {
                    "name": name,
                    "path": path,
                    "read": read,
                    "loads": loads,
                    "seconds": max(seconds),
                    "megabytes": peak() - memory,
                    "files_same": (content_of(root), bytes_of(folder)) == before,
                    # The bare network may take an adapter that only the built one refuses.
                    "built_same": snapshot(built) == networks[0],
                    "bare_same": snapshot(bare) == networks[1],
                }
            )
        )
        if snapshot(bare) != networks[1]:
            bare = TinyModel(1)
            randomize(bare.get_parameters())


def make(name, folder):
    folder.mkdir(parents=True)
    return CASES[name][0](folder)


def attempt(function, path):
    """Returns the error of a call as [name of its class, whether it is one of ours, message], or None."""
    try:
        function(path)
    except BaseException as error:
        return [type(error).__name__, isinstance(error, LoraError), str(error)]
    return None


def peak():
    """The most memory that the process has ever had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def content_of(root):
    """Everything below a folder: names, kinds, sizes and modification times."""
    found = {}
    for folder, folders, names in os.walk(root):
        for name in folders + names:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            found[path] = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_mode)
    return found


def bytes_of(folder):
    """The bytes of the files below a folder; a pipe would wait for a writer."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


if __name__ == "__main__":
    main(sys.argv[1])
