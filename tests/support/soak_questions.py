"""What a soak asks, what each is answered alone, and the adapters that change on the disk meanwhile."""

import itertools
import json
import os
import random

from tests.support.scripted_engine import write_pooling
from tests.support.served_llama import ADAPTERS, write_adapter
from tests.support.soak_answers import Answer, Question
from tests.support.soak_kinds import CLASSIFIER, COMPLETIONS, EMBEDDER, OFTEN, READ, REWARD, once

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
    """A soak's adapters in a server's folder: those of READ, and ``count`` that write; three change on the disk.

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
        for labels, name in ((3, CLASSIFIER), (1, REWARD), (0, EMBEDDER)):
            write_adapter(folder, name, 910 + labels, list(ADAPTERS)[0], labels)
        write_pooling(os.path.join(folder, "adapters", EMBEDDER))

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
    """Returns questions of all kinds for every model, ``each`` of those in OFTEN, with what they are answered alone.

    Those whose answer a rounding error could change are left out. Those to ALTERNATING are there four times, since
    they find most: what one version computed must not be used for the other.

    Args:
        client (httpx.Client): Of a server that nobody else asks.
        base (str): The base's name.
        adapters (Adapters): The others.
        each (int): How many.
        seed (int): Of prompts and lengths. Default: 0.
    """
    rng = random.Random(seed)
    kinds = [*OFTEN.items()] * each + [*once().items()]
    drawn = [_drawn(rng, model, *one) for model in [base, *adapters.names] for one in kinds]
    drawn += [_drawn(rng, model, *one) for model, asked in READ.items() for one in [*asked.items()] * 2]
    alone = [_alone(client, *one) for one in drawn]
    adapters.write(ALTERNATING, OTHER_SEED)
    others = [_alone(client, *one) if one[2]["model"] == ALTERNATING else found for one, found in zip(drawn, alone)]
    made = [one for one in zip(drawn, alone, others) if None not in one]
    assert 2 * len(made) > len(drawn), "most answers are undecided"
    times = [4 if body["model"] == ALTERNATING else 1 for (_, _, body), *_ in made]
    return [_question(*one, *answers) for (one, *answers), count in zip(made, times) for _ in range(count)]


def _drawn(rng, model, name, kind):
    prompt = rng.choice(BEGINNINGS) + " ".join(rng.choices(WORDS, k=rng.randint(1, 9)))
    return name, kind, {"model": model, **kind.draw(rng, prompt)}


def errors(base):
    """Returns questions that only an error answers rightly."""
    unknown = json.dumps({"model": "soak-O", "prompt": "x"})
    refused = [(code, body.replace("MODEL", base)) for code, body in REFUSED.items()]
    made = [Question("refused body", COMPLETIONS, body, [], {code: 400}) for code, body in refused]
    return [*made, *[Question("unknown adapter", COMPLETIONS, unknown, [], {"model_not_found": 404})] * len(made)]


def _question(name, kind, body, *answers):
    allowed = {"adapter_refused": 400} if body["model"] == DAMAGED else {}
    return Question(name, kind.path, json.dumps(body), list(answers), {**BUSY, **allowed}, kind.streams)


def _alone(client, name, kind, body):
    """Returns what is answered, or None if two tokens were nearly as likely as each other at one place."""
    if kind.is_of_logits and not _is_decided(client, kind, body):
        return None
    response = client.post(kind.path, json=body)
    assert response.status_code == 200, (name, response.text)
    answer = Answer(200)
    answer.take_whole(response.content)
    return answer.said()


def _is_decided(client, kind, body):
    wanted = {"logprobs": 5} if kind.path == COMPLETIONS else {"logprobs": True, "top_logprobs": 5}
    choice = client.post(kind.path, json={**body, "echo": False, **wanted}).raise_for_status().json()["choices"][0]
    if kind.path == COMPLETIONS:
        tops = [list(top.values()) for top in choice["logprobs"]["top_logprobs"]]
    else:
        tops = [[one["logprob"] for one in entry["top_logprobs"]] for entry in choice["logprobs"]["content"]]
    best = [sorted(top, reverse=True) for top in tops]
    return all(len(top) > 1 and top[0] - top[1] > TIE for top in best)
