"""The reference that is kept with the data: its log-probabilities as a column, and what tells it from another one."""

import numpy as np
import pytest
from mindspore import Tensor

from mindlora import LoraConfig, apply_lora, freeze_base
from mindlora.core.errors import DataError
from mindlora.training.preference.reference import from_column, reference_fingerprint, to_column


def test_a_column_keeps_log_probabilities_as_exactly_as_float32_adds_them():
    values = -np.random.default_rng(0).exponential(3, (5, 7)).astype(np.float32)
    column = to_column(values)
    assert column.dtype == np.int32
    np.testing.assert_allclose(from_column(Tensor(column)).asnumpy(), values, rtol=1e-7, atol=2**-23)


@pytest.mark.parametrize("value", [-600.0, -np.inf, np.nan])
def test_what_is_no_log_probability_is_refused(value):
    with pytest.raises(DataError, match="the base is not the model"):
        to_column(np.array([-1.0, value], np.float32))


@pytest.fixture
def fingerprint(make_llama):
    """Returns a function that gives the fingerprint of a network: keys of LoraConfig, and a factor of its base."""
    values = {}

    def of(factor=1.0, trained=None, **config):
        network = make_llama(num_layers=1)
        for parameter in network.get_parameters():
            values.setdefault(parameter.name, parameter.asnumpy().copy())
            parameter.set_data(Tensor(values[parameter.name] * np.float32(factor)))
        apply_lora(network, LoraConfig(lora_rank=4, target_modules=".*wq", **config))
        freeze_base(network)
        for parameter in network.trainable_params() if trained else ():
            parameter.set_data(Tensor(np.full(parameter.shape, trained, np.float32)))
        return reference_fingerprint(network).tolist()

    return of


def test_a_reference_is_known_by_its_base_and_by_what_it_begins_with(fingerprint):
    new = fingerprint()
    # A new adapter adds nothing, whatever it is.
    assert fingerprint(lora_alpha=64) == new
    others = [
        fingerprint(factor=1.5),
        fingerprint(trained=0.1),
        fingerprint(trained=0.2),
        # The same tensors at another scale.
        fingerprint(trained=0.1, lora_alpha=64),
        fingerprint(trained=0.1, use_rslora=True),
        fingerprint(trained=0.1, alpha_pattern={"wq": 5}),
        fingerprint(trained=0.1, alora_invocation_tokens=[3, 4]),
        fingerprint(lora_init="pissa"),
        fingerprint(lora_init="pissa", lora_alpha=64),
    ]
    assert len({tuple(each) for each in [new, *others]}) == 10
