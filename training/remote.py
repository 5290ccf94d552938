"""Remote: a sampler whose target lies in a server.

Prompts are sent as ids, so the template stays ours, and every setting of sampling is sent, so the
server's own defaults play no part. A sample ends by our rules, whatever the server cut it by. Ids
are those that the server returns, in the fields of vLLM and SGLang or among llama.cpp's log
probabilities; a server that returns text alone has it encoded again, and what does not have the
number of tokens that it counted is marked as misread.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from drafters.errors import UserError
from inference.endpoint import Answer, Endpoint, asking, choice_of, drawing, ids_of, usage_of
from inference.engine import Request
from inference.stop import Stop
from training.reader import ChatReader
from training.sampler import ABANDONED, Law, Sample, Tick

RETURNED, LOGPROBS, ENCODED = "returned", "returned with log probabilities", "encoded again"
_PROBE = "Hello"
_SEEDS = 2**31  # what every server takes


class RemoteSampler:
    """Samples from one model of a server.

    Args:
        endpoint: the server.
        model: as the server calls it.
        reader: the model's tokenizer, ending tokens and sizes, read here.
        in_flight: requests that the server has at a time.

    Raises:
        UserError: if there is no such server or model, or the model is not the reader's.
    """

    def __init__(
        self, endpoint: Endpoint, model: str | None, reader: ChatReader, in_flight: int
    ) -> None:
        """Ask what is served, and for a few tokens."""
        self.endpoint, self.reader, self.in_flight = endpoint, reader, in_flight
        served = {str(found["id"]): found for found in endpoint.models()}
        if model not in served:
            names = ", ".join(sorted(served)) or "nothing"
            raise UserError(f"{endpoint.url} serves {names}: give --model as one of these")
        self.model = model
        self.context = min(reader.shape.max_positions, _limit(served[model]))
        self.ids = RETURNED
        self.ids = self._probe()

    def run(self, requests: Sequence[Request], law: Law, tick: Tick) -> list[Sample]:
        """Have all requests decoded to their ends; samples in their order."""
        samples = [Sample() for _ in requests]
        bodies = [self._body(request, law) for request in requests]
        for number, answer in self.endpoint.complete_all(bodies, self.in_flight):
            samples[number] = self._sample(answer, requests[number], law)
            tick(len(samples[number].ids))
        return samples

    def _body(self, request: Request, law: Law) -> dict[str, Any]:
        """Return a request with nothing left to the server's defaults."""
        warp, stop = law.warp, law.stop
        body: dict[str, Any] = {
            **self._asking(request.prompt, self._room(request)),
            **drawing(warp, stop.eos_ids),
        }
        if not warp.greedy:
            body["seed"] = request.random.verify.generator.initial_seed() % _SEEDS
        if stop.strings:
            body["stop"] = list(stop.strings)
        return body

    def _asking(self, prompt: Sequence[int], count: int) -> dict[str, Any]:
        body = asking(self.model, prompt, count)
        if self.ids == LOGPROBS:
            body["logprobs"] = 1
        return body

    def _room(self, request: Request) -> int:
        return min(request.max_new_tokens, self.context - len(request.prompt))

    def _sample(self, answer: Answer, request: Request, law: Law) -> Sample:
        """Return what an answer holds, cut by our own rules."""
        choice, misread = choice_of(answer), False
        ids = ids_of(choice)
        if self.ids == ENCODED or ids is None:
            ids, misread = self._encoded(answer, choice)
        elif ids and not 0 <= min(ids) <= max(ids) < self.reader.shape.vocab_size:
            raise UserError(self._foreign(f"it returns ids up to {max(ids)}"))
        ended = choice.get("finish_reason")
        if ended not in ("stop", "length"):
            raise UserError(f"{self.endpoint.url} ended an answer for reason {ended!r}")
        if ended == "stop" and law.stop.cut(request.prompt, ids, len(ids) + 1)[1] is None:
            ids = [*ids, self._end(choice, law.stop)]  # left out by the server, or never in a text
        count, reason = law.stop.cut(request.prompt, ids, self._room(request))
        ids = ids[:count]
        hopeless = any(law.gives_up(ids[:n]) for n in range(1, len(ids)))
        return Sample(ids, ABANDONED if hopeless else reason or "length", misread)

    def _encoded(self, answer: Answer, choice: Mapping[str, Any]) -> tuple[list[int], bool]:
        """Return the ids of an answer's text, and whether they may be others than were sampled."""
        tokenizer, text = self.reader.tokenizer, str(choice.get("text", ""))
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        counted = usage_of(answer, "completion_tokens")
        stopped = choice.get("finish_reason") == "stop"
        # servers count the ending token or do not
        right = counted is None or counted == len(ids) or (stopped and counted == len(ids) + 1)
        return ids, not right or tokenizer.decode(ids, skip_special_tokens=False) != text

    def _end(self, choice: Mapping[str, Any], stop: Stop) -> int:
        """Return the ending token of an answer that does not hold it."""
        named = choice.get("stop_reason", choice.get("matched_stop"))
        known = (named, self.reader.tokenizer.eos_token_id, *sorted(stop.eos_ids))
        found = next((token for token in known if token in stop.eos_ids), None)
        if found is None:
            raise UserError(
                f"{self.endpoint.url} ended an answer, and {self.reader.name} names no ending "
                "token: give one in its generation_config.json"
            )
        return cast("int", found)

    def _probe(self) -> str:
        """Find out how ids are returned, and that the tokenizer is the reader's.

        Raises:
            UserError: if it is another one.
        """
        prompt: list[int] = self.reader.tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
        for how in (RETURNED, LOGPROBS):
            self.ids = how
            answer = self.endpoint.complete(self._asking(prompt, 4))
            read = usage_of(answer, "prompt_tokens")
            if read not in (None, len(prompt)):
                raise UserError(self._foreign(f"it reads {len(prompt)} ids as {read}"))
            choice = choice_of(answer)
            ids = ids_of(choice)
            if ids:
                self._check_tokenizer(ids, str(choice.get("text", "")))
                return how
        return ENCODED

    def _check_tokenizer(self, ids: Sequence[int], text: str) -> None:
        """Compare a text with what the ids say here; spaces and cut characters apart."""
        decode: Callable[..., str] = self.reader.tokenizer.decode
        size = self.reader.shape.vocab_size
        ours = [decode(ids, skip_special_tokens=skip) for skip in (False, True)]
        if max(ids) >= size or not any(_bare(text) in _bare(mine) for mine in ours):
            raise UserError(self._foreign(f"ids {list(ids)} are {text!r} there, {ours[0]!r} here"))

    def _foreign(self, reason: str) -> str:
        return (
            f"{self.model} at {self.endpoint.url} has another tokenizer than {self.reader.name}: "
            f"{reason}; give the --target that is served"
        )


def _limit(served: Mapping[str, Any]) -> int:
    """Return how many tokens a server says a context may have; a large number if it does not."""
    meta = served.get("meta")
    values = [served.get("max_model_len")]
    if isinstance(meta, dict):
        values.append(cast("dict[str, Any]", meta).get("n_ctx"))
    return next((value for value in values if isinstance(value, int) and value > 0), 2**62)


def _bare(text: str) -> str:
    return "".join(text.split()).strip("\ufffd")
