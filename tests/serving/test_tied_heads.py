"""An output head that is the embedding: one table in the bits of its file, and the answers of two equal tables."""

import os

import numpy as np
import pytest

from mindlora.core.numerics.dtypes import BFLOAT16, from_float32
from mindlora.files.adapters import files
from mindlora.files.adapters.adapter import Adapter
from mindlora.network.tensors import to_array
from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.build import make_engine
from mindlora.serving.request import Sampling
from mindlora.serving.settings import EngineSettings
from tests.conftest import in_mode
from tests.support import held_bases
from tests.support.held_bases import HIDDEN, VOCAB
from tests.support.llama_checkpoints import save_base
from tests.support.tiny_serving import tokenizer

SETTINGS = EngineSettings(64, 8, max_running=8, max_tokens_per_step=256, slots=4, max_rank=8, product_dtype="float32")
EMBEDDING, HEAD = "model.tok_embeddings", "lm_head"
# One is for the graph of few tokens, and all together for that of many.
PROMPTS = ((3, 4, 5), tuple(range(40, 70)))


def write_bases(folder, kind, dtype):
    """Writes a base without a head of its own, and one whose head equals its embedding; returns tied -> path."""
    stored, _ = held_bases.tensors_of(kind, None)
    stored = {name: from_float32(array, dtype) for name, array in stored.items()}
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
    paths = {}
    for tied in (True, False):
        tensors = {name: array for name, array in stored.items() if not tied or name != "lm_head.weight"}
        config = {**held_bases.CONFIG, **held_bases.MODELS[kind], "tie_word_embeddings": tied}
        paths[tied] = save_base(folder / f"tied-{tied}", tensors, **config)
    return paths


def write_adapters(folder):
    """Writes adapters with a pair on the embedding, with one on the head, and with tables; returns name -> path."""
    rng = np.random.default_rng(1)

    def normal(*shape):
        return rng.normal(0, 0.3, shape).astype(np.float32)

    made = {name: Adapter({}) for name in ("embedding", "head", "tables")}
    made["embedding"].embeddings.add(EMBEDDING)
    for name, path, wide, high in (("embedding", EMBEDDING, VOCAB, HIDDEN), ("head", HEAD, HIDDEN, VOCAB)):
        made[name].tensors.update({(path, "A"): normal(2, wide), (path, "B"): normal(high, 2)})
        made[name].alphas[path] = 4.0
    table = normal(VOCAB, HIDDEN)
    made["tables"].saved_modules.update({f"{EMBEDDING}.embedding_weight": table, f"{HEAD}.weight": table})
    made["tables"].tensors.update({("model.layers.0.attention.wo", "A"): normal(2, 64)})
    made["tables"].tensors.update({("model.layers.0.attention.wo", "B"): normal(64, 2)})
    made["tables"].alphas["model.layers.0.attention.wo"] = 4.0
    for name, adapter in made.items():
        files.write(adapter, str(folder / name))
    return {name: str(folder / name) for name in made}


def answers(engine, adapters):
    """Returns (adapter, prompt) -> tokens and log-probabilities of greedy answers; one prompt is asked alone first."""
    sampling = Sampling(max_tokens=8, temperature=0.0, logprobs=0, ignore_eos=True)
    found = {("alone", PROMPTS[0]): _answer(engine.submit(PROMPTS[0], sampling))}
    streams = {(name, prompt): engine.submit(prompt, sampling, name) for name in adapters for prompt in PROMPTS}
    return {**found, **{key: _answer(stream) for key, stream in streams.items()}}


def _answer(stream):
    pieces = list(stream)
    return stream.request.generated, [one.logprob for piece in pieces for one in piece.logprobs or ()]


def file_of(address):
    """Returns the file that is mapped at an address of this process, or ""."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            if begin <= address < end:
                return line.split(maxsplit=5)[5].strip() if len(line.split()) > 5 else ""
    return ""


# tests/peers/test_served_models.py serves tied heads of both models in bfloat16, and a Llama's in float32.
@pytest.mark.parametrize("kind, dtype", [("llama", BFLOAT16), ("qwen3", np.dtype("<f4"))], ids=["llama", "qwen3"])
def test_a_tied_table_stays_in_its_file_and_says_what_two_equal_tables_say(kind, dtype, library, mindformers, tmp_path):
    paths, adapters = write_bases(tmp_path, kind, dtype), write_adapters(tmp_path)
    name = "bfloat16" if dtype == BFLOAT16 else "float32"
    dtypes = {"params_dtype": name} if kind == "qwen3" else {"param_init_type": name, "embedding_init_type": name}
    found = {}
    for tied, path in paths.items():
        node = held_bases.node(kind, tie_word_embeddings=tied, **dtypes)
        with in_mode(0):
            engine = make_engine(node, path, tokenizer(), AdapterRegistry(None, adapters), SETTINGS)
            engine.start(scores=False)
            found[tied] = answers(engine, (None, *adapters))
            engine.stop()
        tables = [one for one in engine.runner.network.get_parameters() if tuple(one.shape) == (VOCAB, HIDDEN)]
        assert len(tables) == 2 and {str(table.dtype).lower() for table in tables} == {name}
        # Also after the graphs that read them were compiled and have run.
        addresses = {to_array(table).ctypes.data for table in tables}
        assert len(addresses) == (1 if tied else 2)
        assert {os.path.dirname(file_of(address)) for address in addresses} == {os.path.realpath(path)}
    for key, (tokens, logprobs) in found[False].items():
        assert found[True][key][0] == tokens, key
        # The last bits depend on the steps in which tokens are computed together.
        np.testing.assert_allclose(found[True][key][1], logprobs, atol=1e-5, err_msg=str(key))
    assert len({tuple(tokens) for (asked, prompt), (tokens, _) in found[True].items() if prompt == PROMPTS[0]}) == 4
