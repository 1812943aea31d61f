"""A client of a soak that asks and reads as fast as it can, until it is killed.

    python soak_killed.py HOST PORT QUESTIONS SEED

QUESTIONS is a file of soak_answers.Question's fields. A line is printed when a request is sent, its kind, and when it
has come to an end, a JSON list: kind, outcome, tokens, and what is wrong.
"""

import http.client
import json
import os
import random
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from tests.support.soak_answers import ANSWERED, LOST, Answer, Question, judge  # noqa: E402

PATIENCE = 120  # Seconds without a byte.


def ask(connection, question, stream):
    """Returns the answer to a question."""
    connection.request("POST", question.path, question.body(stream).encode(), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = Answer(response.status)
    if stream and response.status == 200:
        for line in response:
            answer.take_line(line.decode().rstrip("\n"))
    else:
        answer.take_whole(response.read())
    return answer


def main(host, port, path, seed):
    rng = random.Random(seed)
    with open(path, encoding="utf-8") as file:
        questions = [Question(**row) for row in json.load(file)]
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
    while True:
        question = rng.choice(questions)
        stream = question.streams and rng.random() < 0.7
        kind = question.shown(stream)
        print(kind, flush=True)
        try:
            answer = ask(connection, question, stream)
            outcome, found = judge(question, answer), answer
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            outcome, found = LOST, error
        tokens = found.tokens if outcome == ANSWERED else 0
        print(json.dumps([kind, outcome, tokens, f"{question}: {found!r}"]), flush=True)
        if outcome in ("queue_full", LOST):
            time.sleep(rng.uniform(0.2, 1))


if __name__ == "__main__":
    main(*sys.argv[1:])
