"""Turns: who asks first computes first, and nobody who asks again at once keeps the others waiting."""

import threading
import time

from mindlora.serving.engine import Turns


def test_a_thread_that_asks_again_and_again_does_not_starve_another():
    turns, order = Turns(), []

    def take(name, times):
        for _ in range(times):
            with turns.turn():
                order.append(name)
                time.sleep(0.002)

    greedy = threading.Thread(target=take, args=("greedy", 20))
    other = threading.Thread(target=take, args=("other", 20))
    greedy.start()
    other.start()
    greedy.join(10)
    other.join(10)
    assert len(order) == 40
    # Once both ask, they alternate.
    first, last = order.index("other"), len(order) - 1 - order[::-1].index("greedy")
    changes = sum(one != next_one for one, next_one in zip(order[first : last + 1], order[first + 1 : last + 1]))
    assert changes >= last - first - 2


def test_a_turn_that_fails_ends():
    turns = Turns()
    try:
        with turns.turn():
            raise ValueError
    except ValueError:
        pass
    with turns.turn():
        pass
