"""Samples from the weights of a small Qwen3 as a network in training holds them: of the folder in the command line.

The context is that of the YAML there, with the overrides of a JSON list. It prints a line of JSON: number of the prompt
-> greedy tokens and their log-probabilities.
"""

import json
import sys

from mindspore import Parameter, nn
from safetensors.numpy import load_file

from mindlora.data.tokenizers import load_tokenizer
from mindlora.network.tensors import to_tensor
from mindlora.serving.in_training import TRAINED, TrainedEngine
from mindlora.serving.request import Sampling
from mindlora.serving.settings import EngineSettings
from mindlora.training.launch.launcher import build_config
from mindlora.training.launch.serve import set_up_context
from tests.support.mcore_serving import PROMPTS

SAMPLING = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)


class Weights(nn.Cell):
    """Parameters under mcore's names, their joined rows in the order of training."""

    def __init__(self, path):
        super().__init__()
        for number, (name, array) in enumerate(load_file(path).items()):
            parameter = Parameter(to_tensor(array), name=name, requires_grad=False)
            self.insert_param_to_cell(f"weight_{number}", parameter)


folder, overrides = sys.argv[1], json.loads(sys.argv[2])
yaml = build_config(["--config", f"{folder}/run.yaml", *overrides])
yaml.context.mode = 0
set_up_context(yaml)
sizes = EngineSettings(96, max_running=8, max_tokens_per_step=64, slots=1, max_rank=4)
model = {"model_config": dict(yaml.model.model_config)}
tokenizer = load_tokenizer(f"{folder}/base")
trained = TrainedEngine({TRAINED: Weights(f"{folder}/mcore.safetensors")}, model, tokenizer, sizes)
engine = trained.engine.start(scores=False)
found = {}
for number, stream in enumerate([engine.submit(list(prompt), SAMPLING) for prompt in PROMPTS]):
    sampled = [one for piece in stream for one in piece.logprobs or ()]
    found[number] = [[one.token for one in sampled], [one.logprob for one in sampled]]
engine.stop()
print("@answered", json.dumps(found), flush=True)
