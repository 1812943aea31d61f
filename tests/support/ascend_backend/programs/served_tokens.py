"""Serves small mcore models, one after the other in one process: what a JSON list of jobs asks for.

A job names the folder that mcore_serving.write_folder made, and may have overrides of its YAML and sizes of the engine.
For each it prints a line of JSON: adapter and number of the prompt -> greedy tokens and their log-probabilities.
"""

import json
import pathlib
import sys

from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.request import Sampling
from mindlora.training.launch.serve import build_engine
from tests.support.mcore_serving import ADAPTERS, PROMPTS

SAMPLING = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)
SIZES = {"max_running": 8, "max_tokens_per_step": 64, "slots": 2, "max_rank": 9}


def answers(folder, overrides=(), **sizes):
    """Returns the answers to all prompts, asked at once."""
    adapters = {name: str(pathlib.Path(folder) / path) for name, path in ADAPTERS.items()}
    registry = AdapterRegistry(None, adapters)
    engine = build_engine(f"{folder}/run.yaml", overrides, registry=registry, sizes={**SIZES, **sizes}).start()
    streams = {
        f"{adapter} {number}": engine.submit(list(prompt), SAMPLING, adapter)
        for adapter in (None, *adapters)
        for number, prompt in enumerate(PROMPTS)
    }
    found = {}
    for asked, stream in streams.items():
        sampled = [one for piece in stream for one in piece.logprobs or ()]
        found[asked] = [[one.token for one in sampled], [one.logprob for one in sampled]]
    engine.stop()
    return found


for job in json.loads(sys.argv[1]):
    print("@answered", json.dumps(answers(**job)), flush=True)
