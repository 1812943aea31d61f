"""The factor of the learning rate while it warms up."""


def warm_up_factor(step: int, steps: int, start: float) -> float:
    """Returns the factor of the learning rate at a step: start + (1 - start) min((step - 1) / steps, 1).

    Args:
        step (int): The step, counted from 1.
        steps (int): Steps until the factor is 1; at least 1.
        start (float): The factor at the first step.

    Returns:
        float, as torch.optim.lr_scheduler.LinearLR multiplies the rate by at its epoch step - 1.
    """
    done = step - 1
    return 1.0 if done >= steps else start + (1.0 - start) * done / steps
