"""Against transformers and PEFT on PyTorch, for the benchmark serving: the same weights, prompts and threads."""

import itertools
import json
import os
import subprocess
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from bench import ROOT
from bench.serving_engine import Ratio, answer, compare
from bench.serving_model import Files, Size, prompts
from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.engine import Engine

PYTHON = "MINDLORA_PEERS_PYTHON"
BATCH, STEPS = 8, 12
OURS, THEIRS, THEIR_BASE = "mindlora", "PEFT", "transformers, no adapters"
# Label -> how PyTorch's threads wait for each other.
WAITING = {"GOMP_SPINCOUNT as it is by default": {}, "GOMP_SPINCOUNT=0": {"GOMP_SPINCOUNT": "0"}}
NAMES = [f"r16-{number}" for number in range(BATCH)]


class Peer:
    """A process such as serving_peft_process.py; ``peer.verb(...)`` waits for its answer.

    Args:
        python (str): A Python with the packages that the script needs.
        variables (mapping): Environment variables of the process.
        script (str): Name of a file in this folder.
        named_by (str): The variable that names the Python, for errors.
    """

    def __init__(
        self, python: str, variables: Mapping[str, str], script: str = "serving_peft_process.py", named_by: str = PYTHON
    ):
        self._named_by = named_by
        environment = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
        environment.update(HF_HUB_OFFLINE="1", **variables)
        script = os.path.join(ROOT, "scripts", "bench", script)
        # Isolated (-I), it imports nothing from this folder: the package would change how PyTorch's threads wait.
        self._process = subprocess.Popen(
            [python, "-I", "-W", "ignore", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def ask(**arguments: Any) -> Any:
            self._process.stdin.write(json.dumps({"do": verb, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            if not line:
                raise SystemExit(f"error: the process of {self._named_by} has ended; what it wrote is above.")
            return json.loads(line)

        return ask

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait()


def against_peft(files: Files, size: Size) -> Iterator[Dict[str, Any]]:
    """Yields the tables of decoding at batch 1 and 8, and of reading a prompt."""
    python = os.environ.get(PYTHON)
    if not python:
        print(f"peft is left out: {PYTHON} names no Python that has PyTorch, transformers and PEFT.")
        return
    paths = files.adapters(size, dict.fromkeys(NAMES, 16))
    peer, remark = faster_peer(python, files.base(size), paths, size)
    engine = files.engine(size, AdapterRegistry(None, paths), slots=BATCH).start()
    try:
        yield decoding(engine, peer, size, NAMES[:1], "goal: at least 1.0", remark)
        yield decoding(engine, peer, size, NAMES, "goal: at least 1.5", remark)
        yield reading(engine, peer, size, remark)
    finally:
        engine.stop()
        peer.close()


def faster_peer(python: str, base: str, adapters: Mapping[str, str], size: Size) -> Tuple[Peer, str]:
    """Returns the faster PyTorch process, whose threads wait as by default or as ours do, and a remark on it.

    PyTorch is faster with the former on idle cores, and with the latter on busy ones.
    """
    threads = len(os.sched_getaffinity(0))
    candidates = []
    for name, variables in WAITING.items():
        peer = Peer(python, variables)
        versions = peer.load(base=base, adapters=dict(adapters), threads=threads)
        seconds = 0.0
        for names in (NAMES[:1], NAMES):
            peer.read(key="trial", prompts=prompts(size, len(names), size.contexts[0]), adapters=names)
            seconds += min(peer.decode(key="trial", steps=4)["seconds"] for _ in range(4))
        candidates.append((seconds, name, peer))
    candidates.sort(key=lambda candidate: candidate[0])
    _, waiting, fastest = candidates[0]
    for _, _, slower in candidates[1:]:
        slower.close()
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return fastest, f"{packages}; {threads} threads each; PyTorch's with {waiting}, which was faster"


def decoding(engine: Engine, peer: Peer, size: Size, names: Sequence[str], goal: str, remark: str) -> Dict[str, Any]:
    """Returns the table of decoding a batch with a request per adapter; it compares the greedy tokens too."""
    asked = prompts(size, len(names), size.contexts[0])
    tokens: Dict[str, List[List[int]]] = {}

    def ours() -> float:
        answers = answer(engine, asked, names, [STEPS + 1] * len(names))
        tokens[OURS] = answers.tokens
        return answers.seconds_of_a_step()

    def theirs(key: str, adapters: Sequence[Optional[str]]) -> Callable[[], float]:
        peer.read(key=key, prompts=asked, adapters=adapters)

        def run() -> float:
            result = peer.decode(key=key, steps=STEPS)
            tokens[key] = result["tokens"]
            return result["seconds"]

        return run

    sides = {OURS: ours, THEIRS: theirs(THEIRS, names), THEIR_BASE: theirs(THEIR_BASE, [None] * len(names))}
    ratios = {
        f"tokens/s, {OURS} / {THEIRS}": Ratio(OURS, THEIRS, goal, kind="tokens"),
        f"tokens/s, {OURS} / {THEIR_BASE}": Ratio(OURS, THEIR_BASE, kind="tokens"),
        f"{THEIRS} / {THEIR_BASE}": Ratio(THEIRS, THEIR_BASE),
    }
    title = f"decoding, batch {len(names)} with {len(names)} adapter{'s' * (len(names) > 1)}, contexts from "
    title += f"{size.contexts[0]}, float32, rank 16; {OURS}: the whole engine, {THEIRS}: the model alone"
    table = compare(title, sides, size.rounds, len(names), ratios, remark, warm_up=2)
    table["ratios"]["greedy tokens that are equal"] = {
        "value": equal_share(tokens[OURS], tokens[THEIRS]),
        "goal": "goal: 1, where logits do not tie",
    }
    return table


def equal_share(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Returns the share of equal tokens."""
    pairs = list(zip(itertools.chain(*ours), itertools.chain(*theirs)))
    return sum(a == b for a, b in pairs) / len(pairs)


def reading(engine: Engine, peer: Peer, size: Size, remark: str) -> Dict[str, Any]:
    """Returns the table of reading one prompt, up to its first token; all prompts differ."""
    length = size.contexts[-1]
    fresh = iter(range(1, 1 << 30))

    def ours() -> float:
        request = answer(engine, prompts(size, 1, length, next(fresh)), NAMES[:1], [1]).requests[0]
        return request.first_token - request.arrived

    def theirs(adapter: Optional[str]) -> Callable[[], float]:
        return lambda: peer.prefill(prompt=prompts(size, 1, length, next(fresh))[0], adapter=adapter)["seconds"]

    sides = {OURS: ours, THEIRS: theirs(NAMES[0]), THEIR_BASE: theirs(None)}
    ratios = {
        f"tokens/s, {OURS} / {THEIRS}": Ratio(OURS, THEIRS, "goal: at least 0.9", kind="tokens"),
        f"tokens/s, {OURS} / {THEIR_BASE}": Ratio(OURS, THEIR_BASE, kind="tokens"),
    }
    title = f"reading a prompt of {length} tokens, with one adapter, float32, rank 16"
    return compare(title, sides, size.rounds, length, ratios, remark, "milliseconds to the first token", 2)
