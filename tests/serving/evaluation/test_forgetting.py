"""Forgetting: the divergence from the base, against the one that numpy has from all probabilities."""

import numpy as np
import pytest

from mindlora.serving.evaluation.forgetting import draw_samples, measure_forgetting
from mindlora.serving.request import Sampling


def test_samples_are_those_of_the_base_and_of_the_seed(evaluated):
    first, again, other = (draw_samples(evaluated.engine, 3, 12, seed) for seed in (0, 0, 5))
    assert first == again != other
    assert len({tuple(sample.tokens) for sample in first}) == 3
    start = first[0].tokens[:1]
    for number, sample in enumerate(first):
        request = evaluated.engine.submit(start, Sampling(max_tokens=12, seed=number))
        request.text()
        assert sample.tokens == request.request.tokens and sample.first == 1


def test_the_divergence_is_that_of_all_probabilities(evaluated):
    found = measure_forgetting(evaluated.engine, 60, 20, evaluated.models, 0)
    assert found.values["base"].value == 0 and found.examples == 60
    samples = draw_samples(evaluated.engine, 60, 20, 0)
    for model in evaluated.models[1:]:
        ratios, exact = [], []
        for sample in samples:
            base, tuned = (evaluated.logprobs(sample.tokens[:-1], name) for name in (None, model))
            places = np.arange(len(sample.tokens) - 1)
            ratios += (base - tuned)[places, sample.tokens[1:]].tolist()
            exact += (np.exp(base) * (base - tuned)).sum(-1).tolist()
        value = found.values[model]
        assert value.value == pytest.approx(np.mean(ratios), abs=1e-4)
        # Of the tokens that came, rather than of all that could have come: within four standard errors.
        noise = np.std(np.array(ratios) - exact) / len(exact) ** 0.5
        assert abs(value.value - np.mean(exact)) < 4 * noise
        assert value.low < np.mean(exact) < value.high
    assert found.values["first"].value > found.values["second"].value > 0
