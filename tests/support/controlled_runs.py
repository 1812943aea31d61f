"""Training runs in this process with given losses and gradient norms, and a step that obeys as mindlora's does."""

import math

from mindlora.training.step.train_step import StepRecord
from tests.support import scripted_runs
from tests.support.scripted_runs import Model, ScriptedStep

RATE = 0.01


class ControlledStep(ScriptedStep):
    """Trains nothing; obeys rate factors, limits and requests to stop, and notes what it did.

    Args:
        norms (dict): Gradient norms that are not 1: step -> norm.
        stopped_elsewhere (int): The step at which another rank's request to stop arrives.
        empty (sequence of int): Steps without a token that counts.

    Attributes:
        rates (list): The learning rate of each step.
        skipped (list): The steps that were skipped.
        limits (list): The limits at each step.
        marks (list): The value of B after each step.
    """

    is_mindformers_step = False
    loss_scaling_manager = None
    scale_sense = 1.0
    exchange = None

    def __init__(self, norms=None, stopped_elsewhere=None, start=0, empty=()):
        super().__init__(Model())
        self.given, self.stopped_elsewhere, self.number, self.empty = norms or {}, stopped_elsewhere, start, empty
        self.rate_factors, self.now = {}, (math.inf, math.inf)
        self.rates, self.skipped, self.limits, self.marks = [], [], [], []
        self.asked_to_stop = False

    def construct(self, loss):
        self.number += 1
        mean, norm = float(loss.asnumpy().mean()), self.given.get(self.number, 1.0)
        tokens = None
        if self.number in self.empty:
            mean, norm, tokens = math.nan, 0.0, 0.0
        skipped = not (mean <= self.now[0] and norm <= self.now[1] and math.isfinite(mean + norm))
        self.rates.append(RATE * math.prod(self.rate_factors.values()))
        self.limits.append(self.now)
        if skipped:
            self.skipped.append(self.number)
        stop = self.asked_to_stop or self.number == self.stopped_elsewhere
        self.record = StepRecord(mean, norm, tokens, skipped, stop, self.rates[-1])
        return loss.mean() * (math.nan if tokens == 0 else 1.0)

    def set_rate_factor(self, source, value):
        self.rate_factors[source] = value

    def set_limits(self, loss, gradient_norm):
        self.now = (loss, gradient_norm)

    def request_stop(self):
        self.asked_to_stop = True

    def last_record(self):
        return self.record


class Events(scripted_runs.ms.Callback):
    """Keeps the events of a run: (step, kind)."""

    def __init__(self):
        super().__init__()
        self.events, self.messages = [], []

    def on_train_end(self, run_context):
        events = run_context.original_args().get("training_events") or []
        self.events = [(event["step"], event["kind"]) for event in events]
        self.messages = [event["message"] for event in events]


def play(callbacks, losses, start=0, **arguments):
    """Runs callbacks over losses; returns the step and the events, also if the run ends with an error.

    Returns:
        ControlledStep, Events, and the error or None.
    """
    step, events, error = ControlledStep(start=start, **arguments), Events(), None
    try:
        scripted_runs.train([*callbacks, events], losses, skip=start, step=step)
    except Exception as raised:  # whatever the run ends with is looked at by the test
        error = raised
    return step, events, error
