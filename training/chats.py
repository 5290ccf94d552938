"""Chats: what the target writes itself, and the rules by which some of it is dropped.

The target is asked exactly as it will be served: every prompt is the template's own rendering of
the messages so far, and the ids of a chat are those that the target read and wrote. Chat number i
depends on (seed, i) alone.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch

from drafters.base import Features
from drafters.sampling import RowRandom
from drafters.target import Target
from inference.engine import Request
from inference.stats import looped
from inference.stop import Stop
from training.chat_settings import MOST_TURNS, ChatSettings
from training.conversation import Conversation
from training.examples import Example
from training.forms import ChatForm, PlainText
from training.keys import digest, question_key
from training.reader import ChatReader
from training.sampler import ABANDONED, Law, Sample, Sampler
from training.sources import TEXTS, Source
from training.states import States, with_summary

_STREAMS = 2 * MOST_TURNS  # of random numbers a chat owns

RULES = {
    "duplicate": "asks what an earlier chat asks (case and marks apart), or has the same ids",
    "empty question": "the target wrote no words as the user",
    "question cut by its length limit": "the target wrote more than --user-tokens as the user",
    "question with markup in it": "it holds special tokens",
    "empty answer": "the target ended at once",
    "looping answer": (
        "more than --max-looped of its tokens lie in 4-grams that occurred before in it; looked at "
        "when it ends, and from 64 tokens on every 32 tokens"
    ),
    "answer with markup in it": "it holds special tokens before its end",
    "prompt longer than the context": "no room is left for an answer",
    "answer whose ids are not certain": (
        "the server returned text alone, which has another number of tokens than it counted"
    ),
}
"""Why chats are dropped."""

Tick = Callable[[str, int], None]
"""Told the phase ("questions" or "answers") and how many tokens came."""


@dataclass
class Shard:
    """What some consecutive chats became.

    Args:
        rows: one a kept chat, as SCHEMA has them (training/shards.py).
        keys: of the kept chats, so that later ones can be told to be the same.
        drops: numbers of dropped chats by reason.
        tokens, seconds: sampled and spent, by phase; dropped chats included.
        states: of the rows, by the example that each row is; none unless they are kept.
    """

    made: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    drops: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    states: list[tuple[Example, States]] = field(default_factory=list)


@dataclass(frozen=True)
class Keep:
    """What is kept of a target's states.

    Args:
        target: that the sampler runs.
        layers: whose outputs are kept beside the last state.
        dtype: what they are rounded to.
    """

    target: Target
    layers: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16


class ChatMaker:
    """Make chats with one target.

    Args:
        target: asks and answers; its weights are the sampler's.
        sampler: decodes.
        source: how chats begin.
        settings: how they go on.
        tick: told of progress.
        keep: what is kept of the states of every chat; None: nothing is.

    Raises:
        UserError: if the target cannot read what the source gives.
    """

    def __init__(
        self,
        target: ChatReader,
        sampler: Sampler,
        source: Source,
        settings: ChatSettings,
        *,
        tick: Tick,
        keep: Keep | None = None,
    ) -> None:
        """Look at the target's template."""
        self.target, self.sampler, self.keep = target, sampler, keep
        self.source, self.settings = source, settings
        self.chat = None if source.kind == TEXTS else ChatForm(target, settings.template_options)
        self.form = self.chat or PlainText(target)
        self.tick = tick
        self._phase, self._shard = "", Shard(0)

    @property
    def longest_answers(self) -> int:
        """Return how many tokens the answers of one chat can have."""
        given = max(len(start.given) for start in self.source.starts)
        return max(1, given or self.settings.turns) * self.settings.max_new_tokens

    def make(self, first: int, count: int, seen: set[str]) -> Shard:
        """Make chats first..first+count-1.

        Args:
            first: number of the first chat.
            count: how many.
            seen: keys of chats that are kept already; not changed.
        """
        temperatures = self.settings.temperatures
        chats = [
            Conversation(
                i, self.source.start(i, len(temperatures)), temperatures[i % len(temperatures)]
            )
            for i in range(first, first + count)
        ]
        self._shard = Shard(count)
        seen = set(seen)
        turn = 0
        while going := [chat for chat in chats if chat.going]:
            self._time("questions", self._ask, going, turn)
            if turn == 0:
                _drop_known(going, seen)
            self._time("answers", self._answer, [chat for chat in going if chat.going], turn)
            turn += 1
        for chat in chats:
            self._keep(chat, seen)
        return self._shard

    def _ask(self, chats: Sequence[Conversation], turn: int) -> None:
        """Append the user's next message to every chat."""
        written: list[Conversation] = []
        for chat in chats:
            given = chat.start.given
            if given:
                chat.say("user", given[turn])
            else:
                written.append(chat)
        if not written or self.chat is None:
            return
        law = Law(self.settings.user_warp(), self.chat.user_stop)
        requests: list[Request] = []
        for chat in written:
            text = self.chat.opening(chat.messages) + (chat.start.opening if turn == 0 else "")
            prompt, coins = chat.context(self.form, text), self._random(chat, 2 * turn)
            requests.append(Request(prompt, self.settings.user_tokens, coins))
        for chat, sample in self._sample(written, requests, law):
            words = chat.start.opening if turn == 0 else ""
            self._take_message(self.chat, chat, words, sample)

    def _take_message(self, form: ChatForm, chat: Conversation, words: str, sample: Sample) -> None:
        """Append what the target wrote as the user, if it is a message."""
        ids = sample.ids
        if sample.finish_reason != "stop":
            chat.dropped = "question cut by its length limit"
            return
        if ids[-1] in form.user_stop.eos_ids:
            ids = ids[:-1]
        content = words + form.decode(ids)
        for string in form.user_stop.strings:
            content = content.partition(string)[0]
        if form.special_ids & set(ids):
            chat.dropped = "question with markup in it"
        elif not content.strip():
            chat.dropped = "empty question"
        chat.say("user", content.strip())

    def _answer(self, chats: Sequence[Conversation], turn: int) -> None:
        """Let the target answer every chat, temperature by temperature."""
        for temperature in dict.fromkeys(self.settings.temperatures):
            mine = [chat for chat in chats if chat.temperature == temperature]
            most = self.settings.max_new_tokens
            requests = [
                Request(chat.open_answer(self.form), most, self._random(chat, 2 * turn + 1))
                for chat in mine
            ]
            law = Law(self.settings.warp(temperature), Stop(self.target.eos_ids), self._looping)
            if self.keep is not None:
                features = Features(self.keep.layers, last=True)
                law = replace(law, features=features, dtype=self.keep.dtype)
            for chat, sample in self._sample(mine, requests, law):
                self._take_answer(chat, sample, turn)

    def _take_answer(self, chat: Conversation, sample: Sample, turn: int) -> None:
        """Append an answer, if it is one."""
        ids, stopped = sample.ids, sample.finish_reason == "stop"
        said = ids[:-1] if stopped else ids
        special = self.target.eos_ids if self.chat is None else self.chat.special_ids
        if not said:
            chat.dropped = "empty answer"
        elif sample.finish_reason == ABANDONED or self._looping(said):
            chat.dropped = "looping answer"
        elif special & set(said):
            chat.dropped = "answer with markup in it"
        elif sample.misread:
            chat.dropped = "answer whose ids are not certain"
        decode = self.target.tokenizer.decode
        chat.answer(ids, decode(ids), decode(said), sample.finish_reason or "")
        if sample.last:
            taps = torch.cat(sample.taps) if sample.taps else None
            chat.states = taps, torch.cat(sample.last)
        last = len(chat.start.given) or self.settings.turns
        chat.ended = not stopped or turn + 1 == last

    def _sample(
        self, chats: Sequence[Conversation], requests: Sequence[Request], law: Law
    ) -> list[tuple[Conversation, Sample]]:
        """Run requests; chats whose prompt leaves no room are dropped."""
        fitting: list[tuple[Conversation, Request]] = []
        for chat, request in zip(chats, requests, strict=True):
            if len(request.prompt) >= self.sampler.context:
                chat.dropped = "prompt longer than the context"
            else:
                fitting.append((chat, request))
        samples = self.sampler.run([request for _, request in fitting], law, self._count)
        return [(chat, sample) for (chat, _), sample in zip(fitting, samples, strict=True)]

    def _keep(self, chat: Conversation, seen: set[str]) -> None:
        """Add a chat's rows to the shard, or count why there is none."""
        key = digest(chat.ids)
        if chat.dropped is None and key in seen:
            chat.dropped = "duplicate"
        if chat.dropped is not None:
            self._shard.drops[chat.dropped] += 1
            return
        seen.add(key)
        self._shard.keys += [question_key(chat), key]
        self._shard.rows += chat.rows()
        for part in chat.all_parts():
            if part.states is not None and self.keep is not None:
                example = Example("", torch.tensor(part.ids), torch.tensor(part.mask))
                states = with_summary(example, *part.states, self.keep.target)
                self._shard.states.append((example, states))

    def _random(self, chat: Conversation, stream: int) -> RowRandom:
        return RowRandom(self.settings.seed, chat.number * _STREAMS + stream)

    def _looping(self, ids: Sequence[int]) -> bool:
        return sum(looped(ids)) > self.settings.max_looped * len(ids)

    def _time(
        self,
        phase: str,
        step: Callable[[Sequence[Conversation], int], None],
        chats: list[Conversation],
        turn: int,
    ) -> None:
        start, self._phase = perf_counter(), phase
        step(chats, turn)
        seconds = self._shard.seconds
        seconds[phase] = seconds.get(phase, 0.0) + perf_counter() - start

    def _count(self, tokens: int) -> None:
        self._shard.tokens[self._phase] += tokens
        self.tick(self._phase, tokens)


def _drop_known(chats: Sequence[Conversation], seen: set[str]) -> None:
    """Drop chats that begin as an earlier one does."""
    for chat in chats:
        if chat.dropped is not None:
            continue
        key = question_key(chat)
        if key in seen:
            chat.dropped = "duplicate"
        seen.add(key)
