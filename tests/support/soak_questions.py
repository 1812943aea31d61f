"""What a soak asks, what each is answered alone, and the adapters that change on the disk meanwhile."""

import itertools
import json
import os
import random

from tests.support.served_llama import ADAPTERS, write_adapter
from tests.support.soak_answers import Question

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ALTERNATING, DAMAGED, REWRITTEN = "soak-alternating", "soak-damaged", "soak-rewritten"
SEEDS = {ALTERNATING: 901, DAMAGED: 902, REWRITTEN: 903}
OTHER_SEED = 904  # of the other weights of ALTERNATING
# Two logprobs that are nearer than this are a tie: rounding may let either win.
TIE = 1e-3
BUSY = {"queue_full": 429}
WORDS = ("there", "are", "cats", "and", "dogs", "x", "in", "the", "house")
BEGINNINGS = ("", "", "there are cats and dogs and cats and dogs ")
# Bodies that are refused, by the code of the error. MODEL stands for one that is served.
REFUSED = {
    "invalid_json": '{"model": "MODEL", "prompt": ',
    "missing_field": '{"model": "MODEL"}',
    "invalid_value": '{"model": "MODEL", "prompt": "x", "temperature": -1}',
    "unknown_field": '{"model": "MODEL", "prompt": "x", "colour": "red"}',
    "unsupported_field": '{"model": "MODEL", "prompt": "x", "suffix": "y"}',
    "context_length_exceeded": '{"model": "MODEL", "prompt": "x", "max_tokens": 1000000}',
}


class Adapters:
    """A soak's adapters in a server's folder: ``count`` of them, three of which change on the disk.

    Args:
        folder (str): The folder that holds adapters/.
        count (int): How many, three at least.
    """

    def __init__(self, folder, count):
        self._folder = folder
        self._seeds = {**SEEDS, **{f"soak-{number}": number for number in range(count - len(SEEDS))}}
        self.names, self.changes, self._alternate = list(self._seeds), 0, itertools.cycle([OTHER_SEED, None])
        for name in self.names:
            self.write(name)

    def write(self, name, seed=None):
        """Writes an adapter, in one step; those of even seeds have one form and those of odd seeds another."""
        seed = seed or self._seeds[name]
        write_adapter(self._folder, name, seed, list(ADAPTERS)[seed % 2])

    def change(self, rng):
        """Changes one of the three: the same weights again, the other weights, half a file, or a whole one."""
        self.changes += 1
        name = rng.choice([ALTERNATING, *SEEDS])
        if name == DAMAGED and rng.random() < 0.5:
            path = os.path.join(self._folder, "adapters", name, "adapter_model.safetensors")
            os.truncate(path, os.path.getsize(path) // 2)
        else:
            self.write(name, next(self._alternate) if name == ALTERNATING else None)


def questions(client, base, adapters, each, seed=0):
    """Returns ``each`` questions on completions and on chats for every model, with what it answers alone.

    Those whose answer a rounding error could change are left out. Those to ALTERNATING are there four times, since
    they find most: what one version computed must not be used for the other.

    Args:
        client (httpx.Client): Of a server that nobody else asks.
        base (str): The base's name.
        adapters (Adapters): The others.
        each (int): How many.
        seed (int): Of prompts and lengths. Default: 0.
    """
    rng, drawn = random.Random(seed), []
    for model in [base, *adapters.names]:
        for path in [COMPLETIONS, CHAT] * each:
            prompt = rng.choice(BEGINNINGS) + " ".join(rng.choices(WORDS, k=rng.randint(1, 9)))
            asked = {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
            fixed = {"max_tokens": rng.randint(3, 32), "temperature": 0, "ignore_eos": True}
            drawn.append((path, {"model": model, **asked, **fixed}))
    alone = [_alone(client, *one) for one in drawn]
    adapters.write(ALTERNATING, OTHER_SEED)
    others = [_alone(client, *one) if one[1]["model"] == ALTERNATING else text for one, text in zip(drawn, alone)]
    made = [one for one in zip(drawn, alone, others) if None not in one]
    assert 2 * len(made) > len(drawn), "most answers are undecided"
    times = [4 if body["model"] == ALTERNATING else 1 for (_, body), *_ in made]
    return [_question(*one, *texts) for (one, *texts), count in zip(made, times) for _ in range(count)]


def errors(base):
    """Returns questions that only an error answers rightly."""
    unknown = json.dumps({"model": "soak-O", "prompt": "x"})
    refused = [(code, body.replace("MODEL", base)) for code, body in REFUSED.items()]
    made = [Question("refused body", COMPLETIONS, body, [], 0, {code: 400}) for code, body in refused]
    return [*made, *[Question("unknown adapter", COMPLETIONS, unknown, [], 0, {"model_not_found": 404})] * len(made)]


def _question(path, body, *texts):
    allowed = {"adapter_refused": 400} if body["model"] == DAMAGED else {}
    kind = "completion" if path == COMPLETIONS else "chat"
    return Question(kind, path, json.dumps(body), list(texts), body["max_tokens"], {**BUSY, **allowed})


def _alone(client, path, body):
    """Returns the text of an answer, or None if two tokens were nearly as likely as each other at one place."""
    wanted = {"logprobs": 5} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 5}
    answer = client.post(path, json={**body, **wanted})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    if path == COMPLETIONS:
        text, tops = choice["text"], [list(top.values()) for top in choice["logprobs"]["top_logprobs"]]
    else:
        text = choice["message"]["content"]
        tops = [[one["logprob"] for one in entry["top_logprobs"]] for entry in choice["logprobs"]["content"]]
    best = [sorted(top, reverse=True) for top in tops]
    return text if all(len(top) > 1 and top[0] - top[1] > TIE for top in best) else None
