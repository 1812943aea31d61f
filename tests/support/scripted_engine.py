"""The engine with a runner that has no model: what it answers is known, and it is as slow or as broken as a test asks.

The base repeats the prompt, an end token behind it, and then the same again. An adapter says its mark first: the text
in its file adapter_model.bin. One with a file score.npy, [labels, HIDDEN], is a classifier, and with
tags.npy one of words.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import threading
import time

import numpy as np

from mindlora.core.errors import AdapterFormatError
from mindlora.serving.adapter_memory import AdapterMemory
from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.adapter_slots import AdapterSlots
from mindlora.serving.blocks import BlockPool
from mindlora.serving.detokenizer import end_tokens
from mindlora.serving.engine import Engine
from mindlora.serving.scheduler import Scheduler
from mindlora.serving.score_head import ScoreHead
from tests.support.chat_templates import CHATML, chat_tokenizer

BASE = "tiny-base"
SEQ_LENGTH = 256
HIDDEN = 8
# Subfolder and kind of each of sentence-transformers' modules.
MODULES = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]


@dataclasses.dataclass(frozen=True)
class Packed:
    """An adapter that has been read.

    Attributes:
        mark (list of int): Tokens that its answers begin with.
        score (ScoreHead or None): The head of a classifier.
        nbytes (int): Bytes of memory.
        invocation_tokens (tuple of int): Those from which on it acts.
    """

    mark: list
    score: object = None
    nbytes: int = 64
    invocation_tokens: tuple = ()


class ScriptedRunner:
    """Stands in for ModelRunner.

    Attributes:
        delay (float): Seconds that each step takes.
        error (Exception or None): What each step raises.
        going (threading.Event): Steps wait while it is cleared.
        steps (int): Steps so far.
    """

    def __init__(self, tokenizer):
        self.vocab_size, self._end = len(tokenizer), tokenizer.eos_token_id
        self.marks, self.delay, self.error, self.steps = {-1: []}, 0.0, None, 0
        self.heads, self.hidden_size = {}, HIDDEN
        # The hidden state of a token, whatever is before it.
        self.hidden = np.random.default_rng(0).normal(size=(self.vocab_size, HIDDEN)).astype(np.float32)
        self.going = threading.Event()
        self.going.set()

    def warm_up(self, many_tokens=True, scores=True, adapters=True):
        pass

    def forward(self, parts):
        self.going.wait()
        time.sleep(self.delay)
        self.steps += 1
        if self.error is not None:
            raise self.error
        self._computed = [token for part in parts for token in part.tokens]
        rows = [
            self._next(part.request, ahead) for part in parts for ahead in range(1 + len(part.drafts)) if part.samples
        ]
        logits = np.zeros((len(rows), self.vocab_size), np.float32)
        logits[np.arange(len(rows)), rows] = 50.0  # nothing else is ever drawn
        return logits

    def logits_after(self, rows):
        """After a token of the prompt, the same token is the likeliest."""
        logits = np.zeros((len(rows), self.vocab_size), np.float32)
        logits[np.arange(len(rows)), [self._computed[row] for row in rows]] = 5.0
        return logits

    def hidden_at(self, rows):
        return self.hidden[[self._computed[row] for row in rows]]

    def score_head(self, slot):
        return self.heads.get(slot)

    def write(self, slot, packed):
        self.marks[slot], self.heads[slot] = packed.mark, packed.score

    def _next(self, request, ahead):
        line = [*self.marks[request.slot], *request.prompt, self._end]
        return line[(len(request.generated) + ahead) % len(line)]


def write_adapter(folder, name, mark="marked ", score=None, of_tokens=False):
    """Writes an adapter, which says its mark; without a mark it is damaged. With a score it is a classifier."""
    path = os.path.join(folder, name)
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, "adapter_model.bin"), "w", encoding="utf-8") as file:
        file.write(mark)
    if score is not None:
        np.save(os.path.join(path, "tags.npy" if of_tokens else "score.npy"), score)
    return path


def write_pooling(folder, mode="mean_tokens", modules=MODULES, **config):
    """Writes what sentence-transformers writes beside a model."""
    entries = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(modules)
    ]
    flags = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    folder = pathlib.Path(folder)
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": HIDDEN, **flags}))
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "config.json").write_text(json.dumps(config))


def make_engine(
    folder=None,
    slots=4,
    max_running=8,
    max_waiting=16,
    num_blocks=256,
    block_size=4,
    name=BASE,
    paths=None,
    seq_length=SEQ_LENGTH,
    tokenizer=None,
    base_folder=None,
    prompt_lookup=0,
):
    """Returns an engine that has not been started; engine.runner is a ScriptedRunner."""
    tokenizer = tokenizer or chat_tokenizer(CHATML)
    runner = ScriptedRunner(tokenizer)

    def prepare(path):
        with open(os.path.join(path, "adapter_model.bin"), encoding="utf-8") as file:
            mark = file.read()
        if not mark:
            raise AdapterFormatError(f"{os.path.basename(path)} holds no tensors: copy the adapter again.")
        return Packed(tokenizer.encode(mark, add_special_tokens=False), _score_of(path))

    memory = AdapterMemory(AdapterRegistry(folder, paths), prepare, max_bytes=1 << 20)
    adapters = AdapterSlots(memory, slots, runner.write)
    pool = BlockPool(num_blocks, block_size)
    scheduler = Scheduler(pool, adapters, max_running, 64, max_waiting, seq_length, prompt_lookup)
    return Engine(runner, scheduler, adapters, tokenizer, end_tokens(tokenizer), name, base_folder)


def _score_of(path):
    for name in ("score.npy", "tags.npy"):
        if os.path.exists(os.path.join(path, name)):
            weight = np.load(os.path.join(path, name))
            names = tuple(f"LABEL_{number}" for number in range(len(weight)))
            return ScoreHead(weight, None, names, of_tokens=name == "tags.npy")
    return None


@contextlib.contextmanager
def started(engine):
    """Runs an engine while the context lasts."""
    engine.start()
    try:
        yield engine
    finally:
        engine.runner.delay, engine.runner.error = 0.0, None
        engine.runner.going.set()
        engine.stop()
