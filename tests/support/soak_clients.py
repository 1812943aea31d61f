"""Clients of a soak: those of this process, which leave in the middle of answers, and processes that are killed."""

import asyncio
import collections
import json
import os
import random
import signal
import sys
import time

import httpx

from tests.support import soak_killed
from tests.support.soak_answers import ANSWERED, FAILED, LOST, WRONG, Answer, judge

CUT, KILLED = "cut by its client", "client killed"
CLOSED = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)


class Tally:
    """What all clients have seen.

    Attributes:
        outcomes (Counter): By (kind, outcome).
        tokens (int): Of answers that came whole.
        first (list of float): Seconds until the first text of streamed answers.
        again (int): Requests that were sent again, as their connection was closed before an answer began.
        defects (list of str): What should not have come, a thousand at most.
    """

    def __init__(self):
        self.outcomes, self.tokens, self.first, self.again = collections.Counter(), 0, [], 0
        self.defects = []

    def take(self, kind, outcome, tokens, shown):
        """Counts a request that has ended."""
        self.outcomes[kind, outcome] += 1
        self.tokens += tokens
        if outcome in (WRONG, FAILED, LOST) and len(self.defects) < 1000:
            self.defects.append(f"{outcome}: {shown}")


class Client:
    """One client in this process, which asks one request after the other.

    It sends a request once more if the connection was closed before an answer began, as openai's client does (which
    does so after any error of the connection, twice at most); others do not.

    Args:
        url (str): The server's.
        questions (list of Question): What can be answered.
        errors (list of Question): What is refused: a twentieth of the requests.
        tally (Tally): Where to count.
        rng (random.Random): Of all that is random.
    """

    def __init__(self, url, questions, errors, tally, rng):
        self._url, self._questions, self._errors, self._tally, self._rng = url, questions, errors, tally, rng

    async def run(self, end):
        """Asks until time.monotonic() is ``end``."""
        async with httpx.AsyncClient(base_url=self._url, timeout=120, verify=False, trust_env=False) as client:
            while time.monotonic() < end:
                await self._ask(client)
                # Some pauses are as long as httpx keeps a connection that is idle: 5 s.
                pause = self._rng.uniform(4.5, 5.5) if self._rng.random() < 0.01 else self._rng.uniform(0, 0.1)
                await asyncio.sleep(max(0.0, min(pause, end - time.monotonic())))

    async def _ask(self, client):
        fails = self._rng.random() < 0.05
        question = self._rng.choice(self._errors if fails else self._questions)
        stream = not fails and question.streams and self._rng.random() < 0.6
        leaves = not fails and self._rng.random() < 0.2
        kind, found = question.shown(stream), None
        try:
            if stream or not leaves:
                found = await self._answer(client, question, stream, self._rng.randrange(8) if leaves else None)
            else:
                seconds = self._rng.uniform(0, 0.2)
                found = await asyncio.wait_for(self._answer(client, question, stream, None), seconds)
            outcome = CUT if found is None else judge(question, found)
        except asyncio.TimeoutError:
            outcome = CUT
        except (httpx.HTTPError, ValueError) as error:
            outcome, found = LOST, error
        tokens = found.tokens if outcome == ANSWERED else 0
        self._tally.take(kind, outcome, tokens, f"{question}: {found!r}")
        if outcome == "queue_full":
            await asyncio.sleep(self._rng.uniform(0.2, 1))

    async def _answer(self, client, question, stream, parts):
        """Returns the answer to a question, or None where the client left after so many parts of it."""
        begin = time.monotonic()
        response = await self._send(client, question, stream)
        try:
            answer, seen = Answer(response.status_code), 0
            if not stream or response.status_code != 200:
                answer.take_whole(await response.aread())
                return answer
            async for line in response.aiter_lines():
                if answer.take_line(line):
                    seen += 1
                    if seen == 1:
                        self._tally.first.append(time.monotonic() - begin)
                    if parts is not None and seen > parts:
                        return None
            return answer
        finally:
            await response.aclose()

    async def _send(self, client, question, stream):
        headers = {"Content-Type": "application/json"}
        for again in (False, True):
            request = client.build_request("POST", question.path, content=question.body(stream), headers=headers)
            try:
                return await client.send(request, stream=True)
            except CLOSED:
                if again:
                    raise
                self._tally.again += 1


async def kill_and_spawn(url, path, tally, rng, end, seconds):
    """Runs soak_killed.py over and over until ``end``, and kills it ``seconds`` (least, most) after it first asked."""
    address = httpx.URL(url)
    words = [os.path.abspath(soak_killed.__file__), address.host, str(address.port), path]
    while time.monotonic() < end:
        # -S and -E: it starts in a fraction of the time.
        command = [sys.executable, "-S", "-E", *words, str(rng.random())]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, limit=1 << 20)
        first = await process.stdout.readline()
        reader = asyncio.ensure_future(_read(process.stdout, tally, first.decode().rstrip("\n")))
        await asyncio.sleep(max(0.0, min(rng.uniform(*seconds), end - time.monotonic())))
        process.kill()
        code = await process.wait()
        if code != -signal.SIGKILL:
            tally.defects.append(f"a client ended with exit code {code} before it was killed")
        open_request = await reader
        if open_request is not None:
            tally.outcomes[open_request, KILLED] += 1


async def _read(lines, tally, kind):
    """Counts what a process prints after its first ``kind``; returns that of the request it was killed in, if any."""
    async for line in lines:
        if line.startswith(b"["):
            tally.take(*json.loads(line))
            kind = None
        elif line.endswith(b"\n"):
            kind = line.decode().rstrip("\n")
    return kind


def clients(url, questions, errors, tally, count, seed):
    """Returns clients with seeds of their own."""
    return [Client(url, questions, errors, tally, random.Random(f"{seed} {number}")) for number in range(count)]
