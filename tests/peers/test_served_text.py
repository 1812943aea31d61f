"""The engine's greedy text against that of PEFT's generate, from the same files: the base's folder and adapters."""

import itertools

import pytest

from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.build import make_engine
from mindlora.serving.request import Sampling
from mindlora.serving.settings import EngineSettings
from tests.conftest import in_mode
from tests.peers.conftest import llama_keys
from tests.support.mixed_requests import TIE
from tests.support.tiny_serving import model, tokenizer

MODEL, ADAPTERS = "grouped", ("grouped", "one-layer")
PROMPTS, NEW = ([1, 9, 31, 44, 5], list(range(3, 24))), 20


@pytest.fixture(scope="module")
def engine(made, library, mindformers):
    """An engine on what PEFT made, without a conversion."""
    keys = {**llama_keys(made.models[MODEL]), "seq_length": 48}
    settings = EngineSettings(seq_length=48, block_size=8, max_running=8, max_tokens_per_step=32, slots=2, max_rank=8)
    registry = AdapterRegistry(None, {name: str(made.adapters[name]) for name in ADAPTERS})
    with in_mode(0):
        found = make_engine(model(**keys), str(made.models[MODEL]), tokenizer(), registry, settings)
        yield found.start()
        found.stop()


def test_two_adapters_and_the_base_say_what_peft_says(engine, peer, made):
    asked = list(itertools.product((None, *ADAPTERS), PROMPTS))
    sampling = Sampling(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    streams = [engine.submit(prompt, sampling, name) for name, prompt in asked]
    texts = [stream.text() for stream in streams]
    answers = []
    for (name, prompt), stream, text in zip(asked, streams, texts):
        adapter = made.adapters[name] if name else None
        tokens, gaps = peer.generate(model=made.models[MODEL], ids=prompt, new=NEW, adapter=adapter)
        decided = next((at for at, gap in enumerate(gaps) if gap < TIE), NEW)
        assert decided >= NEW // 2, f"{name}: two logits tie at token {decided}"
        assert stream.request.generated[:decided] == tokens[:decided]
        if decided == NEW:
            before, whole = (tokenizer().decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + tokens))
            assert text == whole[len(before) :]
        answers.append(tuple(tokens))
    assert len(set(answers)) == len(answers)
