"""What prompt lookup guesses, against a search through the whole text."""

import random

from mindlora.serving.request import PromptLookup


def by_search(tokens, count):
    """Looks for the last three tokens, then the last two, from the end of the text to its beginning."""
    for run in (3, 2):
        for begin in range(len(tokens) - run - 1, -1, -1):
            if tokens[begin : begin + run] == tokens[-run:]:
                text = list(tokens)
                for place in range(begin + run, begin + run + count):
                    text.append(text[place])
                return text[len(tokens) :]
    return []


def test_it_guesses_what_followed_the_longest_run_at_its_last_place():
    assert PromptLookup(4).guess([1, 2, 3, 4, 5, 9, 1, 2, 3], 4) == [4, 5, 9, 1]
    assert PromptLookup(4).guess([7, 2, 3, 8, 1, 2, 3, 5, 6, 2, 3], 2) == [5, 6], "the last place of two"
    assert PromptLookup(4).guess([1, 2, 3, 8, 7, 2, 3, 5, 1, 2, 3], 2) == [8, 7], "three go before two"
    assert PromptLookup(4).guess([1, 2, 3, 4, 5, 6], 4) == []
    assert PromptLookup(4).guess([1, 2, 3, 3], 4) == [], "one token is not enough"


def test_a_guess_goes_on_through_itself():
    assert PromptLookup(7).guess([5, 8, 9, 8, 9], 7) == [8, 9, 8, 9, 8, 9, 8]
    assert PromptLookup(3).guess([4, 4, 4], 3) == [4, 4, 4]


def test_it_is_not_longer_than_there_is_room_or_the_last_guess_was_good_for():
    text = [*range(20), *range(3)]
    lookup = PromptLookup(8)
    assert lookup.guess(text, 5) == [3, 4, 5, 6, 7]
    for right, longest in ((0, 1), (1, 3), (3, 7), (7, 8), (2, 5)):
        lookup.note(right)
        assert lookup.guess(text, 9) == list(range(3, 3 + longest))


def test_texts_that_grow_give_what_a_search_finds():
    rng = random.Random(0)
    for _ in range(30):
        lookup, tokens = PromptLookup(5), []
        while len(tokens) < 60:
            tokens += rng.choices(range(4), k=rng.randint(1, 9))
            assert lookup.guess(tokens, 5) == by_search(tokens, 5)
