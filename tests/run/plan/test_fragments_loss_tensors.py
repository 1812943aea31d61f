"""How many tensors of the logits' shape a loss holds at a time."""

import pytest

from mindlora.run.plan.fragments import LossTensors, Made, loss_tensors

WHOLE, HALF = 400, 200


@pytest.mark.parametrize(
    "is_legacy, fuses, tensors", [(True, False, 4), (True, True, 3), (False, False, 4), (False, True, 3)]
)
def test_so_many_float32_tensors_are_held_at_the_widest_point(is_legacy, fuses, tensors):
    assert loss_tensors(is_legacy, fuses).widest(WHOLE, HALF) == tensors * WHOLE


def test_a_tensor_is_held_until_an_operator_is_the_last_that_takes_it():
    product = Made("product", in_16_bits=True)
    after = (product, Made("logits", ("product",)), Made("gradient", ("logits", "labels", "gradient")))
    assert LossTensors((Made("labels"),), after).widest(WHOLE, HALF) == 3 * WHOLE
    assert LossTensors((), after[:2]).widest(WHOLE, HALF) == WHOLE + HALF


@pytest.mark.parametrize("is_legacy, fuses", [(True, False), (True, True), (False, False), (False, True)])
def test_nothing_of_a_loss_is_left_after_it(is_legacy, fuses):
    held = []
    tensors = loss_tensors(is_legacy, fuses)
    for made in (*tensors.before, *tensors.after):
        assert made.name not in held
        held.append(made.name)
        for name in made.last_for:
            held.remove(name)
    assert not held
