"""Timing an engine, for the benchmark serving: steps of its runner, answers of the complete engine, and tables of both.

A step is ModelRunner.forward. An answer goes through the complete engine: scheduler, network, sampling, text.
"""

import statistics
import threading
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import numpy as np
from mindspore import Parameter, Tensor, nn

from bench.common import AGAIN, BASE, WARM_UP, median_ratio, quartiles, spread, take_turns
from bench.serving_model import Files, Size, mindformers_node, prompts
from mindlora.network.load_base import load_base
from mindlora.network.serving.multi_lora_dense import MultiLoRADense
from mindlora.serving.engine import Engine
from mindlora.serving.network import build_network
from mindlora.serving.request import Lease, Part, Request, Sampling
from mindlora.serving.runner import ModelRunner
from mindlora.serving.settings import EngineSettings


def resident(engine: Engine, names: Sequence[str]) -> Dict[str, Lease]:
    """Puts adapters into slots of an engine that is not started, and returns their leases."""
    leases = {}
    for name in names:
        engine.adapters.memory.load(name)
        engine.adapters.begin_step()
        leases[name] = engine.adapters.acquire(name)
        engine.adapters.release(leases[name])
    return leases


def timed_step(runner: ModelRunner, leases: Sequence[Optional[Lease]], context: int, size: Size) -> Callable[[], float]:
    """Returns a function that runs a decode step, with a request for each lease, and returns its seconds."""
    parts = []
    blocks = runner.settings.blocks_per_request
    for place, (prompt, lease) in enumerate(zip(prompts(size, len(leases), context), leases)):
        request = Request(prompt, Sampling(), computed=context - 1, lease=lease)
        request.blocks = list(range(place * blocks, (place + 1) * blocks))
        parts.append(Part(request, context - 1, 1))

    def run() -> float:
        begin = time.perf_counter()
        runner.forward(parts)
        return time.perf_counter() - begin

    return run


def plain_runner(files: Files, size: Size, settings: EngineSettings) -> ModelRunner:
    """Returns a runner of MindFormers' network with MindFormers' linear cells, in float32."""
    network = build_network(mindformers_node(size), settings)
    load_base(network, files.base(size))
    # A runner requires a cell with a pool; this cell is not part of the network.
    indices = Parameter(Tensor(np.full(settings.max_tokens_per_step, -1, np.int32)), name="i", requires_grad=False)
    apart = MultiLoRADense.from_cell(nn.Dense(8, 8, has_bias=False), "apart", 1, 8, indices)
    return ModelRunner(network, {"apart": apart}, np.dtype("<f4"), settings)


class Answers(NamedTuple):
    """The results of requests that were sent together.

    Attributes:
        tokens (list of list of int): The answers.
        times (list of list of float): When each token arrived, in seconds of time.perf_counter().
        requests (list of Request): The requests, with their own times.
        begin (float): When the first request was sent, or the time from which ``moments`` count.
    """

    tokens: List[List[int]]
    times: List[List[float]]
    requests: List[Request]
    begin: float

    def seconds_of_a_step(self) -> float:
        """Returns the mean time of the steps in which all requests decoded and each got a token."""
        begin = max(times[0] for times in self.times)
        end = min(times[-1] for times in self.times)
        steps = []
        for times in self.times:
            steps.append(sum(begin < moment <= end for moment in times))
        return (end - begin) / min(steps)


def answer(
    engine: Engine,
    asked: Sequence[Sequence[int]],
    adapters: Sequence[Optional[str]],
    counts: Sequence[int],
    moments: Optional[Sequence[float]] = None,
) -> Answers:
    """Makes a started engine answer requests greedily, and waits for the answers.

    Args:
        engine (Engine): The engine.
        asked (sequence): Prompts.
        adapters (sequence): The adapter of each; None for the base.
        counts (sequence of int): Tokens of each answer.
        moments (sequence of float): When each request is sent, in seconds from now. Default: None, at once.
    """
    tokens: List[List[int]] = [[] for _ in asked]
    times: List[List[float]] = [[] for _ in asked]
    errors: List[Exception] = []
    requests: List[Request] = []
    ended = threading.Semaphore(0)

    def listener(place: int) -> Callable[[Any], None]:
        def take(piece: Any) -> None:
            if piece.tokens:
                times[place].append(time.perf_counter())
                tokens[place].extend(piece.tokens)
            if piece.error:
                errors.append(piece.error)
            if piece.finish_reason:
                ended.release()

        return take

    def send(place: int) -> None:
        sampling = Sampling(max_tokens=counts[place], temperature=0.0, ignore_eos=True)
        stream = engine.submit(asked[place], sampling, adapters[place])
        stream.add_listener(listener(place))
        requests.append(stream.request)

    start = time.perf_counter()
    if moments is None:
        # So that the engine admits all requests in the same step.
        with engine._changed:
            for place in range(len(asked)):
                send(place)
    else:
        for place, moment in enumerate(moments):
            time.sleep(max(0.0, start + moment - time.perf_counter()))
            send(place)
    for _ in asked:
        ended.acquire()
    if errors:
        raise errors[0]
    return Answers(tokens, times, requests, start)


def timed_answers(
    engine: Engine, asked: Sequence[Sequence[int]], adapters: Sequence[Optional[str]], count: int
) -> Callable[[], float]:
    """Returns a function that makes the engine answer, and returns the seconds of a step."""
    return lambda: answer(engine, asked, adapters, [count] * len(asked)).seconds_of_a_step()


class Ratio(NamedTuple):
    """A comparison of two sides: the ratio of their seconds, as the median over the rounds.

    Attributes:
        side, base (str): The sides.
        goal (str): The target, as text.
        kind (str): "seconds"; "tokens", the ratio of tokens/s; or "difference", the difference of the seconds in
            milliseconds.
    """

    side: str
    base: str
    goal: str = ""
    kind: str = "seconds"

    def value(self, seconds: Dict[str, List[float]]) -> float:
        """Returns the figure, given side -> seconds of each round."""
        if self.kind == "tokens":
            return median_ratio(seconds[self.base], seconds[self.side])
        if self.kind == "difference":
            return statistics.median(1e3 * (a - b) for a, b in zip(seconds[self.side], seconds[self.base]))
        return median_ratio(seconds[self.side], seconds[self.base])


def compare(
    title: str,
    sides: Dict[str, Callable[[], float]],
    rounds: int,
    tokens: int,
    ratios: Dict[str, Ratio],
    remark: str,
    what: str = "milliseconds of a step",
    warm_up: int = WARM_UP,
) -> Dict[str, Any]:
    """Returns a table of sides that take turns; each call returns the seconds of ``tokens`` tokens.

    A ratio is the median of the ratios within a round.
    """
    seconds = take_turns(sides, rounds, warm_up)
    if AGAIN in sides:
        ratios = {f"{AGAIN} / {BASE}": Ratio(AGAIN, BASE, "noise"), **ratios}
    return {
        "title": title,
        "what": what,
        "remark": remark,
        "seconds": {side: spread(times) for side, times in seconds.items()},
        "tokens_per_second": {side: tokens / statistics.median(times) for side, times in seconds.items()},
        "ratios": {name: {"value": ratio.value(seconds), "goal": ratio.goal} for name, ratio in ratios.items()},
    }


def text(table: Dict[str, Any]) -> str:
    """Formats a table of ``compare`` as text."""
    lines = [table["title"], f"{table['what']:<48}{'median':>9}{'quartiles':>19}{'min':>9}{'tokens/s':>10}"]
    for side, figures in table["seconds"].items():
        lines.append(f"{side:<48}{quartiles(figures)}{table['tokens_per_second'][side]:>10.1f}")
    for name, figure in table["ratios"].items():
        goal = f"  ({figure['goal']})" if figure["goal"] else ""
        lines.append(f"{name:<76}{figure['value']:>10.3f}{goal}")
    for side, figures in table.get("more", {}).items():
        lines.append(f"{side}: " + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()))
    return "\n".join(lines + [f"({table['remark']})"])
