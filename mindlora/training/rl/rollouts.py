"""Rollouts: policies' answers to the prompts of a step, as rows for their trainer."""

import dataclasses
import itertools
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from mindspore import nn

from mindlora.core.fields import ignore_token_id, pad_token_id
from mindlora.network.tree import lora_cells
from mindlora.serving.answer import Piece, Stream
from mindlora.serving.in_training import TrainedEngine
from mindlora.serving.packed_adapter import rank_needed
from mindlora.serving.request import Sampling
from mindlora.serving.settings import EngineSettings
from mindlora.training.rl.prompts import MESSAGES, Prompt
from mindlora.training.rl.settings import RlSettings
from mindlora.training.rl.teacher import ServedTeacher
from mindlora.training.rl.tools import Tools, Turn

# The name by which requests select a teacher that is an adapter.
TEACHER = "teacher"


@dataclasses.dataclass(frozen=True)
class Answers:
    """The answers to the prompts of a step; answers to one prompt are adjacent.

    Position i of a row predicts token i + 1, so that arrays of log-probabilities are [rows, N] for rows of N + 1.

    Attributes:
        prompts (list of Prompt): The prompt of each row.
        texts (list of str): The answers' texts, without special tokens.
        tokens (array): int32 [rows, N + 1], prompt and answer, filled up.
        labels (array): int32 [rows, N + 1]: the tokens of the answers, and elsewhere the ignored id.
        log_probabilities (array): float64 [rows, N], the sampler's; 0 elsewhere.
        mask (array): bool [rows, N], the positions that predict a token of the answer.
        truncated (array): bool [rows], the answers cut at max_completion_length.
        messages (list of list of dict or None): With tools, the messages of each answer: turns of the assistant, which
            may have tool_calls, and the tools' results. The texts are those of the last turns.
        failures (int): Number of failed calls.
    """

    prompts: List[Prompt]
    texts: List[str]
    tokens: np.ndarray
    labels: np.ndarray
    log_probabilities: np.ndarray
    mask: np.ndarray
    truncated: np.ndarray
    messages: Optional[List[List[Dict[str, Any]]]] = None
    failures: int = 0

    def columns(self) -> Dict[str, List[Any]]:
        """Returns the fields of the prompts' rows, with a value for each answer."""
        columns: Dict[str, List[Any]] = {name: [] for name in self.prompts[0].columns}
        for prompt in self.prompts:
            for name, value in prompt.columns.items():
                columns[name].append(value)
        if self.messages is not None:
            columns[MESSAGES] = self.messages
        return columns

    def tool_measures(self) -> Dict[str, float]:
        """Returns tools/call_frequency, the calls per answer, and tools/failure_frequency, the share of failed calls.

        Without tools, the result is empty.
        """
        if self.messages is None:
            return {}
        calls = sum(message["role"] == "tool" for answer in self.messages for message in answer)
        failed = self.failures / max(calls, 1)
        return {"tools/call_frequency": calls / len(self.messages), "tools/failure_frequency": failed}


class Question(NamedTuple):
    """A request for answers to be sampled together.

    Attributes:
        adapter (str or None): The name of the adapter that answers; None for the base.
        settings (RlSettings): The settings of sampling.
        prompts (sequence of Prompt): The prompts to answer.
        seed (sequence of int): Determines each row's random stream, with the row's number.
        generations (int or None): Answers to each prompt; None for num_generations.
    """

    adapter: Optional[str]
    settings: RlSettings
    prompts: Sequence[Prompt]
    seed: Sequence[int]
    generations: Optional[int] = None


class _Draft:
    """An answer in progress: turns of the model, and the tokens between them.

    Attributes:
        settings (RlSettings): The settings of its question.
        tokens, own (list): The tokens after the prompt, and whether the model sampled each of them.
        log_probabilities (list of float): The log-probabilities of its own tokens.
        text, said (str): The text of the last turn, complete and without calls.
        messages (list of dict): The earlier turns, and the results of their calls.
    """

    def __init__(self, prompt: Prompt, settings: RlSettings):
        self.prompt = prompt
        self.settings = settings
        self.tokens: List[int] = []
        self.own: List[bool] = []
        self.log_probabilities: List[float] = []
        self.text = self.said = ""
        self.messages: List[Dict[str, Any]] = []
        self.truncated = False
        self.failures = 0

    @property
    def context(self) -> List[int]:
        """The tokens of the prompt and of the answer so far."""
        return self.prompt.tokens + self.tokens

    def add(self, piece: Piece) -> None:
        """Adds sampled tokens of the model."""
        self.put(piece.tokens, own=True)
        self.log_probabilities += [sampled.logprob for sampled in piece.logprobs or ()]
        self.text += piece.text
        self.truncated = piece.finish_reason == "length"

    def put(self, tokens: Sequence[int], own: bool = False) -> None:
        """Adds tokens."""
        self.tokens += tokens
        self.own += [own] * len(tokens)

    def say(self, turn: Turn) -> None:
        """Adds the message of a turn."""
        self.said = turn.text
        message: Dict[str, Any] = {"role": "assistant", "content": turn.text}
        if turn.calls:
            functions = [{"name": name, "arguments": arguments} for name, arguments in turn.calls]
            message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        self.messages.append(message)


def joined(parts: Sequence[Answers]) -> Answers:
    """Concatenates the rows of all parts, none of which calls tools."""
    values: Dict[str, Any] = {}
    for field in dataclasses.fields(Answers):
        of_parts = [getattr(part, field.name) for part in parts]
        if isinstance(of_parts[0], list):
            values[field.name] = list(itertools.chain(*of_parts))
        elif isinstance(of_parts[0], np.ndarray):
            values[field.name] = np.concatenate(of_parts)
    return Answers(**values)


class Rollouts:
    """A sampler from networks that train on one base, by mindlora's engine on the base's weights.

    Args:
        networks (mapping): Name -> MindFormers' model in training with this adapter, as for TrainedEngine.
        model (mapping): The node ``model`` of the YAML.
        tokenizer: As load_tokenizer returns it.
        settings (sequence of RlSettings): Each network's settings, with one teacher.
        longest (int): Number of tokens of the longest prompt.
        product_dtype (str): The dtype to which the training networks' linear cells round their operands.
        tools (Tools): Tools that answers may call. Default: None.

    Raises:
        ConfigError, UnsupportedCellError: As TrainedEngine.
        AdapterError: The teacher is an adapter that cannot be used.
        TeacherError: The teacher is served, and reads other tokens or does not answer.
    """

    def __init__(
        self,
        networks: Mapping[str, nn.Cell],
        model: Dict[str, Any],
        tokenizer: Any,
        settings: Sequence[RlSettings],
        longest: int,
        product_dtype: str,
        tools: Optional[Tools] = None,
    ):
        self._length = model["model_config"]["seq_length"]
        self._tools = tools
        self._tokenizer = tokenizer
        config = next(iter(networks.values())).config
        self._pad, self._ignored = pad_token_id(config), ignore_token_id(config)
        rank = max(cell.lora_rank for network in networks.values() for _, cell in lora_cells(network))
        adapters: Dict[str, str] = {}
        self._teacher_of_run = settings[0].teacher
        if settings[0].teacher_adapter is not None:
            adapters[TEACHER] = settings[0].teacher_adapter
            # A legacy model joins q, k and v if its YAML says so.
            joins_cells = not model["model_config"].get("type") or bool(model["model_config"].get("qkv_concat"))
            rank = max(rank, rank_needed(settings[0].teacher_adapter, joins_cells))
        running = min(sum(each.rows for each in settings), _MOST_RUNNING)
        # The cache has room for these prompts and answers at full length.
        answer = max(each.max_completion_length for each in settings)
        blocks = -(-min(self._length, longest + answer) // EngineSettings.block_size)
        sizes = EngineSettings(
            self._length,
            num_blocks=running * blocks,
            max_running=running,
            max_tokens_per_step=max(512, running),
            max_waiting=_MOST_WAITING,
            slots=len(networks) + len(adapters),
            max_rank=rank,
            product_dtype=product_dtype,
        )
        self._trained = TrainedEngine(networks, model, tokenizer, sizes, adapters)
        self._teacher = TEACHER if adapters else None
        self.engine = self._trained.engine
        self.publish = self._trained.publish

    def answers(self, questions: Sequence[Question]) -> List[Answers]:
        """Returns the answers to each question; all are sampled together."""
        if not self.engine.alive:
            self.engine.start(scores=False)
        drafts: List[List[_Draft]] = []
        for question in questions:
            count = question.generations or question.settings.num_generations
            asked = [prompt for prompt in question.prompts for _ in range(count)]
            drafts.append([_Draft(prompt, question.settings) for prompt in asked])
        with self.engine.turns.turn():
            # Cached values of earlier steps would change the last bits, and a resumed run has none.
            self.engine.forget_texts()
        turns, going = 0, drafts
        while any(going):
            self._take_turn(questions, going, [turns] if turns else [])
            turns += 1
            going = [self._going_on(each, turns) for each in going]
        return [self._rows(each) for each in drafts]

    def completions(self, prompts: Sequence[Prompt], settings: RlSettings) -> Answers:
        """Returns the data's completions of prompts; their log-probabilities are unknown and set to 0."""
        drafts = [_Draft(prompt, settings) for prompt in prompts]
        for draft in drafts:
            draft.put(draft.prompt.completion, own=True)
            draft.log_probabilities = [0.0] * len(draft.tokens)
        return self._rows(drafts)

    def _take_turn(
        self, questions: Sequence[Question], going: Sequence[Sequence["_Draft"]], turns: Sequence[int]
    ) -> None:
        """Samples the next turn of each unfinished answer; ``turns`` is the number of earlier turns, if any."""
        requests: List[Tuple[Sequence[int], Sampling, Optional[str]]] = []
        for question, drafts in zip(questions, going):
            seeds = np.random.SeedSequence([*question.seed, *turns]).generate_state(len(drafts), np.uint64)
            requests += [
                (draft.context, self._sampling(draft, int(number)), question.adapter)
                for draft, number in zip(drafts, seeds)
            ]
        for draft, stream in zip(itertools.chain(*going), self._submit(requests)):
            draft.text = ""
            for piece in stream:
                draft.add(piece)

    def _going_on(self, drafts: Sequence["_Draft"], turns: int) -> List["_Draft"]:
        """Returns the answers that have another turn."""
        return [draft for draft in drafts if self._goes_on(draft, turns)]

    def _goes_on(self, draft: "_Draft", turns: int) -> bool:
        """Executes the calls of an answer's last turn and appends the results; returns whether there were any.

        ``turns`` is the answer's number of turns.
        """
        if self._tools is None:
            return False
        turn = self._tools.read(draft.text)
        draft.say(turn)
        limit = draft.settings.max_tool_calling_iterations
        if draft.truncated or not turn.complete or (limit is not None and turns > limit):
            return False
        results, failures = self._tools.results(turn)
        behind = self._tools.continuation(draft.tokens, results)
        if len(draft.tokens) + len(behind) >= draft.settings.max_completion_length:
            # The next turn has no room and is cut before it begins.
            draft.truncated = True
            return False
        draft.put(behind)
        draft.messages += results
        draft.failures += failures
        return True

    def _rows(self, drafts: Sequence["_Draft"]) -> Answers:
        tokens = np.full((len(drafts), self._length + 1), self._pad, np.int32)
        labels = np.full(tokens.shape, self._ignored, np.int32)
        log_probabilities = np.zeros((len(drafts), self._length))
        for row, draft in enumerate(drafts):
            begin, end = len(draft.prompt.tokens), len(draft.context)
            own = np.flatnonzero(draft.own) + begin
            tokens[row, :end] = draft.context
            labels[row, own] = tokens[row, own]
            log_probabilities[row, own - 1] = draft.log_probabilities
        mask = labels[:, 1:] != self._ignored
        if self._tools is not None:
            texts = [draft.said for draft in drafts]
        else:
            texts = [self._tokenizer.decode(draft.tokens, skip_special_tokens=True) for draft in drafts]
        return Answers(
            [draft.prompt for draft in drafts],
            texts,
            tokens,
            labels,
            log_probabilities,
            mask,
            np.array([draft.truncated for draft in drafts]),
            None if self._tools is None else [draft.messages for draft in drafts],
            sum(draft.failures for draft in drafts),
        )

    def teacher_log_probabilities(self, answers: Answers) -> np.ndarray:
        """Returns the log-probabilities of the answers' tokens under the teacher, float64 [rows, N]; 0 elsewhere.

        Raises TeacherError if the teacher is served and does not score them.
        """
        counts = answers.mask.sum(1)
        answered = np.flatnonzero(counts)
        begins = answers.mask[answered].argmax(1) + 1
        rows = [answers.tokens[row, : begin + counts[row]].tolist() for row, begin in zip(answered, begins.tolist())]
        if isinstance(self._teacher_of_run, ServedTeacher):
            scores = self._teacher_of_run.scores(rows, begins.tolist())
        else:
            scores = self._scores(rows, begins.tolist())
        found = np.zeros(answers.mask.shape)
        for row, begin, values in zip(answered, begins, scores):
            found[row, begin - 1 : begin - 1 + len(values)] = values
        return found

    def _scores(self, rows: Sequence[List[int]], begins: Sequence[int]) -> List[np.ndarray]:
        """Returns the engine's log-probabilities of each row's tokens from ``begins`` on."""
        streams = self._submit(
            [
                (row, Sampling(max_tokens=0, prompt_logprobs=0, scored_from=begin), self._teacher)
                for row, begin in zip(rows, begins)
            ]
        )
        found = []
        for stream, begin in zip(streams, begins):
            scored = [one.logprob for piece in stream for one in piece.prompt_logprobs or ()]
            found.append(np.array(scored[begin:], np.float64))
        return found

    def close(self) -> None:
        """Ends the engine."""
        if self.engine.alive:
            self.engine.stop()

    def _submit(self, requests: Sequence[Tuple[Sequence[int], Sampling, Optional[str]]]) -> List[Stream]:
        """Submits prompts, samplings and adapters to the engine together, before its first step.

        So the last bits of log-probabilities, which depend on the batch, are the same in a resumed run.
        """
        with self.engine.turns.turn():
            return [self.engine.submit(*request) for request in requests]

    def _sampling(self, draft: _Draft, seed: int) -> Sampling:
        settings = draft.settings
        # A row in training is padded with the pad token, which the model does not see there.
        padding = () if self._pad == self._tokenizer.eos_token_id else ((self._pad,),)
        return Sampling(
            max_tokens=settings.max_completion_length - len(draft.tokens),
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop=settings.stop,
            bad_words=padding,
            seed=seed,
            logprobs=0,
            tempered_logprobs=True,
            grammar=draft.prompt.grammar,
            stop_tokens=() if self._tools is None else tuple(self._tools.prompt.ends),
        )


# Further requests wait: the cache has room for this many at a time.
_MOST_RUNNING = 64
# All answers of a step are requested at once.
_MOST_WAITING = 2**20
