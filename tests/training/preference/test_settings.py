"""The node preference of a YAML: its defaults, and what is refused."""

import pytest

from mindlora.core.errors import ConfigError
from mindlora.training.preference.settings import LOSSES, preference_settings


@pytest.mark.parametrize("loss", LOSSES)
def test_defaults_depend_on_the_loss(loss):
    settings = preference_settings({"loss": loss})
    assert settings.beta == {"simpo": 2.0, "reward": 1.0}.get(loss, 0.1)
    assert settings.length_normalization == (loss in ("ipo", "simpo", "orpo"))
    assert settings.sft_weight == (1.0 if loss in ("orpo", "cpo") else 0.0)
    assert settings.margin == (0.5 if loss == "simpo" else 0.0)
    assert settings.kind.pairs == (loss != "kto")
    assert settings.kind.uses_reference == (loss in ("dpo", "ipo", "hinge", "kto"))


def test_what_is_written_holds():
    settings = preference_settings({"loss": "cpo", "beta": 1, "sft_weight": 0, "length_normalization": True})
    assert (settings.beta, settings.sft_weight, settings.length_normalization) == (1, 0, True)


@pytest.mark.parametrize(
    "node, message",
    [
        ("dpo", "preference is 'dpo', but it must be a node"),
        ({"loss": "dpoo"}, "loss is 'dpoo', but it must be one of dpo, .*Did you mean"),
        ({"betta": 1}, "preference has no key 'betta'.*beta"),
        ({"beta": 0}, "preference: beta is 0"),
        ({"beta": "0.1"}, "preference: beta is '0.1'"),
        ({"label_smoothing": 0.5}, "preference: label_smoothing is 0.5"),
        ({"length_normalization": 1}, "preference: length_normalization is 1"),
        ({"margin": 1.0}, "margin belongs to simpo, but the loss is dpo"),
        ({"loss": "dpo", "desirable_weight": 2.0}, "desirable_weight belongs to kto, but the loss is dpo"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing belongs to dpo, simpo, cpo, but the loss is ipo"),
        ({"loss": "orpo", "length_normalization": False}, "orpo compares odds"),
    ],
)
def test_what_is_refused(node, message):
    with pytest.raises(ConfigError, match=message):
        preference_settings(node)
