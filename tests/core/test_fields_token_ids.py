"""The tokens that do not count in the loss, where MindFormers' classes of models do not have them."""

import types

import pytest

from mindlora.core.fields import ignore_token_id, pad_token_id


@pytest.mark.parametrize("kind", [dict, lambda **keys: types.SimpleNamespace(**keys)])
def test_what_a_configuration_says_counts(kind):
    config = kind(ignore_token_id=-1, pad_token_id=7)
    assert (ignore_token_id(config), pad_token_id(config)) == (-1, 7)


@pytest.mark.parametrize("config", [{}, {"ignore_token_id": None, "pad_token_id": None}, types.SimpleNamespace()])
def test_what_it_does_not_say_is_as_mindformers_fills_it_in(config):
    assert (ignore_token_id(config), pad_token_id(config)) == (-100, 0)
