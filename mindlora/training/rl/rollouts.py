"""What a policy answers to the prompts of a step, as rows for its trainer."""

import dataclasses
from typing import Any, Dict, List, Optional, Sequence

import numpy as np
from mindspore import nn

from mindlora.core.fields import ignore_token_id, pad_token_id
from mindlora.network.tree import lora_cells
from mindlora.serving.in_training import TRAINED, TrainedEngine
from mindlora.serving.packed_adapter import rank_needed
from mindlora.serving.request import Sampling
from mindlora.serving.settings import EngineSettings
from mindlora.training.rl.prompts import Prompt
from mindlora.training.rl.settings import RlSettings
from mindlora.training.rl.teacher import ServedTeacher

# By which requests ask for a teacher that is an adapter.
_TEACHER = "teacher"


@dataclasses.dataclass(frozen=True)
class Answers:
    """The answers to the prompts of a step, those to one prompt behind each other.

    Position i of a row predicts token i + 1, so that arrays of log-probabilities are [rows, N] for rows of N + 1.

    Attributes:
        prompts (list of Prompt): That of each row.
        texts (list of str): Without special tokens.
        tokens (array): int32 [rows, N + 1], prompt and answer, filled up.
        labels (array): int32 [rows, N + 1]: the tokens of the answers, elsewhere the id that is ignored.
        log_probabilities (array): float64 [rows, N], the sampler's; 0 elsewhere.
        mask (array): bool [rows, N], where a row has a token of its answer to predict.
        truncated (array): bool [rows], which answers max_completion_length has cut.
    """

    prompts: List[Prompt]
    texts: List[str]
    tokens: np.ndarray
    labels: np.ndarray
    log_probabilities: np.ndarray
    mask: np.ndarray
    truncated: np.ndarray

    def columns(self) -> Dict[str, List[Any]]:
        """Returns the fields of the prompts' rows, a value for each answer."""
        columns: Dict[str, List[Any]] = {name: [] for name in self.prompts[0].columns}
        for prompt in self.prompts:
            for name, value in prompt.columns.items():
                columns[name].append(value)
        return columns


class Rollouts:
    """Samples from the network that trains, by mindlora's engine over its weights.

    Args:
        network (Cell): MindFormers' model in training. Its weights have been loaded.
        model (mapping): The node ``model`` of its YAML.
        tokenizer: As load_tokenizer returns it.
        settings (RlSettings): The run's.
        longest (int): Tokens of the longest prompt.
        product_dtype (str): What the network in training rounds what its linear cells multiply to.

    Raises:
        ConfigError, UnsupportedCellError: As TrainedEngine.
        AdapterError: The teacher is an adapter that cannot be used.
        TeacherError: The teacher is served, and reads other tokens or does not answer.
    """

    def __init__(
        self,
        network: nn.Cell,
        model: Dict[str, Any],
        tokenizer: Any,
        settings: RlSettings,
        longest: int,
        product_dtype: str,
    ):
        self._length = model["model_config"]["seq_length"]
        self._settings = settings
        self._tokenizer = tokenizer
        self._pad, self._ignored = pad_token_id(network.config), ignore_token_id(network.config)
        rank = max(cell.lora_rank for _, cell in lora_cells(network))
        adapters: Dict[str, str] = {}
        if settings.teacher_adapter is not None:
            adapters[_TEACHER] = settings.teacher_adapter
            # Among legacy models, one joins q, k and v if its YAML says so.
            joins_cells = not model["model_config"].get("type") or bool(model["model_config"].get("qkv_concat"))
            rank = max(rank, rank_needed(settings.teacher_adapter, joins_cells))
        running = min(settings.rows, _MOST_RUNNING)
        # The cache has room for what these prompts and answers can take.
        blocks = -(-min(self._length, longest + settings.max_completion_length) // EngineSettings.block_size)
        sizes = EngineSettings(
            self._length,
            num_blocks=running * blocks,
            max_running=running,
            max_tokens_per_step=max(512, running),
            max_waiting=_MOST_WAITING,
            slots=1 + len(adapters),
            max_rank=rank,
            product_dtype=product_dtype,
        )
        self._trained = TrainedEngine(network, model, tokenizer, sizes, adapters)
        self._teacher = _TEACHER if adapters else None
        self.engine = self._trained.engine
        self.publish = self._trained.publish

    def answers(self, prompts: Sequence[Prompt], seed: Sequence[int], generations: Optional[int] = None) -> Answers:
        """Returns answers to each prompt: ``generations``, or num_generations if it is None.

        ``seed`` and the number of a row make its random stream.
        """
        if not self.engine.alive:
            self.engine.start(scores=False)
        asked = [prompt for prompt in prompts for _ in range(generations or self._settings.num_generations)]
        seeds = np.random.SeedSequence(list(seed)).generate_state(len(asked), np.uint64)
        streams = [
            self.engine.submit(prompt.tokens, self._sampling(prompt, int(number)), TRAINED)
            for prompt, number in zip(asked, seeds)
        ]
        tokens = np.full((len(asked), self._length + 1), self._pad, np.int32)
        labels = np.full(tokens.shape, self._ignored, np.int32)
        log_probabilities = np.zeros((len(asked), self._length))
        truncated = np.zeros(len(asked), bool)
        texts = []
        for row, (prompt, stream) in enumerate(zip(asked, streams)):
            begin = len(prompt.tokens)
            answered: List[int] = []
            likely: List[float] = []
            for piece in stream:
                answered += piece.tokens
                likely += [sampled.logprob for sampled in piece.logprobs or ()]
                truncated[row] = piece.finish_reason == "length"
            tokens[row, :begin] = prompt.tokens
            tokens[row, begin : begin + len(answered)] = answered
            labels[row, begin : begin + len(answered)] = answered
            log_probabilities[row, begin - 1 : begin - 1 + len(answered)] = likely
            texts.append(self._tokenizer.decode(answered, skip_special_tokens=True))
        mask = labels[:, 1:] != self._ignored
        return Answers(asked, texts, tokens, labels, log_probabilities, mask, truncated)

    def teacher_log_probabilities(self, answers: Answers) -> np.ndarray:
        """Returns the log-probabilities of the answers' tokens under the teacher, float64 [rows, N]; 0 elsewhere.

        Raises TeacherError if the teacher is served and does not score them.
        """
        counts = answers.mask.sum(1)
        answered = np.flatnonzero(counts)
        begins = answers.mask[answered].argmax(1) + 1
        rows = [answers.tokens[row, : begin + counts[row]].tolist() for row, begin in zip(answered, begins.tolist())]
        if isinstance(self._settings.teacher, ServedTeacher):
            scores = self._settings.teacher.scores(rows, begins.tolist())
        else:
            scores = self._scores(rows, begins.tolist())
        found = np.zeros(answers.mask.shape)
        for row, begin, values in zip(answered, begins, scores):
            found[row, begin - 1 : begin - 1 + len(values)] = values
        return found

    def _scores(self, rows: Sequence[List[int]], begins: Sequence[int]) -> List[np.ndarray]:
        """Returns the log-probabilities of the tokens of each row from a token on, by the engine."""
        streams = [
            self.engine.submit(row, Sampling(max_tokens=0, prompt_logprobs=0, scored_from=begin), self._teacher)
            for row, begin in zip(rows, begins)
        ]
        found = []
        for stream, begin in zip(streams, begins):
            scored = [one.logprob for piece in stream for one in piece.prompt_logprobs or ()]
            found.append(np.array(scored[begin:], np.float64))
        return found

    def close(self) -> None:
        """Ends the engine."""
        if self.engine.alive:
            self.engine.stop()

    def _sampling(self, prompt: Prompt, seed: int) -> Sampling:
        settings = self._settings
        # A row in training is filled up with the pad token, which the model does not see there.
        padding = () if self._pad == self._tokenizer.eos_token_id else ((self._pad,),)
        return Sampling(
            max_tokens=settings.max_completion_length,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop=settings.stop,
            bad_words=padding,
            seed=seed,
            logprobs=0,
            tempered_logprobs=True,
            grammar=prompt.grammar,
        )


# Further requests wait: the cache has room for so many at a time.
_MOST_RUNNING = 64
# All answers of a step are asked for at once.
_MOST_WAITING = 2**20
