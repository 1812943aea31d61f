"""save_lora and load_lora between a model with a head and the bare model in it, whose cells are called layers.0..."""

import numpy as np
import pytest

from mindlora import load_lora, save_lora
from tests.support.networks import Backbone
from tests.support.plain_networks import inputs, plain
from tests.support.saved_adapters import network

FORMS = [("peft", "adapter"), ("ckpt", "adapter.ckpt"), ("mindformers", "adapter.safetensors")]


@pytest.mark.parametrize(("form", "name"), FORMS)
@pytest.mark.parametrize("has_lora", [True, False], ids=["built with LoRA", "plain"])
def test_an_adapter_of_a_bare_model_loads_into_it_and_into_the_model_with_a_head(tmp_path, form, name, has_lora):
    path = str(tmp_path / name)
    whole = network(seed=3)
    save_lora(whole.model, path, form)
    expected = whole.model(inputs()).asnumpy()
    for of_bare_model in (True, False):
        target = network(seed=4) if has_lora else plain()
        load_lora(target.model if of_bare_model else target, path)
        np.testing.assert_array_equal(target.model(inputs()).asnumpy(), expected)


@pytest.mark.parametrize(("form", "name"), FORMS)
def test_an_adapter_of_the_model_with_a_head_loads_into_the_bare_model(tmp_path, form, name):
    path = str(tmp_path / name)
    whole = network(seed=3)
    save_lora(whole, path, form)
    bare = plain().model
    load_lora(bare, path)
    assert isinstance(bare, Backbone)
    np.testing.assert_array_equal(bare(inputs()).asnumpy(), whole.model(inputs()).asnumpy())
