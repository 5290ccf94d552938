"""From messages to ids and the mask of the answers' tokens, by the target's own chat template.

The mask follows from rendering, never from searching what was said: the chat is rendered up to
where each answer opens and up to where it is given, and what the second text adds is the answer, to
its first ending token. A template that marks answers itself (generation tags) narrows that down and
must agree with it. Where a template shows the past otherwise than it was answered, every answer
gets a rendering of its own: the context it was given in.
"""

import re
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from drafters.errors import UserError
from training.messages import Message, Refused, Unstable, checked, essential, whole

__all__ = ["Refused", "Rendered", "Renderer", "Unstable"]

_TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Rendered(NamedTuple):
    """Ids as the target reads and writes them, and which of them are an answer's."""

    ids: list[int]
    mask: list[bool]


class _Text(NamedTuple):
    """One rendering, the characters at which its answers begin and end, and its messages."""

    text: str
    answers: list[tuple[int, int]]
    messages: int


class Renderer:
    """Render chats for one target.

    Args:
        tokenizer: with a chat template, unless only texts are rendered.
        ends: ids that end an answer.
        options: passed to the template, as they were when the answers were generated.
    """

    def __init__(self, tokenizer: Any, ends: Set[int], options: Mapping[str, Any]) -> None:
        """Look at the template."""
        self.tokenizer, self.ends, self.options = tokenizer, ends, dict(options)
        self.template = None if tokenizer is None else tokenizer.chat_template
        self.tagged = bool(_TAGS.search(str(self.template)))

    def render(self, messages: object, tools: object = None) -> list[Rendered]:
        """Return a chat, once for every context that its answers were given in.

        Raises:
            UserError: there is no chat template.
            Refused: the template cannot show the chat, or leaves something of it out.
            Unstable: an answer's own rendering does not go on from where it was opened, or the
                template's tags mark something else than the answers.
        """
        if not self.template:
            raise UserError(
                "the target has no chat template, and the chats hold messages without ids: give "
                "chats with ids, or a target with a template"
            )
        chat = checked(messages)
        self._check_shown(chat, tools)
        texts = self._contexts(chat, tools)
        made = [self._tokens(text) for text in texts]
        if self.tagged:
            pairs = zip(made, texts, strict=True)
            made = [self._narrowed(x, chat[: t.messages], tools, len(made) == 1) for x, t in pairs]
        return made

    def render_text(self, text: str) -> Rendered:
        """Return a text that is in the template's form already.

        Its answers are what follows the template's own opening of an answer. Without a template
        all of the text is what the target would write.

        Raises:
            UserError: there is no tokenizer.
            Refused: no answer is opened, or one does not end before the next is opened.
        """
        if self.tokenizer is None:
            raise UserError("the target has no tokenizer, and the chats hold text: give ids")
        if not self.template:
            ids = list(self.tokenizer(whole(text))["input_ids"])
            return Rendered(ids, [True] * len(ids))
        asked: list[Message] = [{"role": "user", "content": "x"}]
        before = self._text(asked, None)
        opening = self._text(asked, None, opened=True).removeprefix(before)
        pieces = text.split(opening) if opening else [text]
        if len(pieces) == 1:
            raise Refused(f"whose text does not hold the template's opening of answers {opening!r}")
        answers: list[tuple[int, int]] = []
        place = len(pieces[0])
        for piece in pieces[1:]:
            start = place + len(opening)
            place = start + len(piece)
            answers.append((start, place))
        if any(self.ends.isdisjoint(self._encode(piece)) for piece in pieces[1:-1]):
            raise Refused("whose text opens an answer before the last one has ended")
        return self._tokens(_Text(text, answers, 0))

    def _contexts(self, chat: list[Message], tools: object) -> list[_Text]:
        """Return renderings, each going on for as many turns as the template leaves it as it is."""
        texts: list[_Text] = []
        for turn, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            if turn == 0:
                # templates look at the first message, so such an answer has no prompt
                raise Refused("that opens with an answer")
            prompt = self._text(chat[:turn], tools, opened=True)
            given = self._text(chat[: turn + 1], tools)
            if not given.startswith(prompt):
                raise Unstable(f"the template's opening of answer {turn + 1} is not in the answer")
            answers = [(len(prompt), len(given))]
            if texts and self._goes_on(texts[-1], prompt):
                answers = texts.pop().answers + answers
            texts.append(_Text(given, answers, turn + 1))
        if not texts:
            raise Refused("without an answer")
        return texts

    def _goes_on(self, text: _Text, prompt: str) -> bool:
        """Tell whether a later prompt holds a rendering up to the end of its last answer."""
        if prompt.startswith(text.text):
            return True
        written = self._tokens(text).ids
        return self._encode(prompt)[: len(written)] == written

    def _tokens(self, text: _Text) -> Rendered:
        """Encode a rendering up to the end of its last answer.

        A token that would lie across the opening of an answer is cut there: the target reads its
        prompt alone. An answer without anything before its ending token teaches nothing.
        """
        fixed: list[int] = []
        place = 0
        ids = self._encode(text.text)
        spans: list[tuple[int, int]] = []
        for start, end in text.answers:
            before = fixed + self._encode(text.text[place:start])
            if ids[: len(before)] != before:
                fixed, place = before, start
                ids = before + self._encode(text.text[start:])
                self._check_same(ids[len(before) :], text.text[start:])
            upto = fixed + self._encode(text.text[place:end])
            first = len(before)
            stop = next((i + 1 for i in range(first, len(upto)) if upto[i] in self.ends), len(upto))
            while ids[first:stop] != upto[first:stop]:  # a token across the end is nobody's
                stop -= 1
            spans.append((first, stop))
        mask = [False] * len(ids)
        for first, stop in spans:
            if first < stop and ids[first] not in self.ends:
                mask[first:stop] = [True] * (stop - first)
        return Rendered(ids[: spans[-1][1]], mask[: spans[-1][1]])

    def _check_same(self, ids: list[int], text: str) -> None:
        shown = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if shown != text:
            raise Refused("whose answer begins inside a token")

    def _narrowed(
        self, made: Rendered, chat: list[Message], tools: object, alone: bool
    ) -> Rendered:
        """Return the answers' tokens that the template's tags mark, and each one's ending token.

        Args:
            made: by prefixes.
            chat: what is rendered.
            tools: see render.
            alone: whether no answer of the chat is left out of this rendering.
        """
        found = self._call(
            chat, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids: list[int] = list(found["input_ids"])
        if ids[: len(made.ids)] != made.ids:
            raise Refused("whose answer begins inside a token")
        inside = self._until_the_end(ids, found["assistant_masks"])[: len(made.ids)]
        if alone and any(tag and not answer for tag, answer in zip(inside, made.mask, strict=True)):
            raise Unstable("the template's generation tags mark more than the answers")
        mask = [tag and answer for tag, answer in zip(inside, made.mask, strict=True)]
        for place in range(1, len(mask)):
            if mask[place - 1] and made.mask[place] and made.ids[place] in self.ends:
                mask[place] = True
        return Rendered(made.ids, mask)

    def _until_the_end(self, ids: Sequence[int], tags: Sequence[int]) -> list[bool]:
        """Return the tags without what follows an ending token in the same answer."""
        mask: list[bool] = []
        ended = False
        for token, tag in zip(ids, tags, strict=True):
            ended = bool(tag) and ended
            mask.append(bool(tag) and not ended)
            ended = ended or (bool(tag) and token in self.ends)
        return mask

    def _check_shown(self, chat: list[Message], tools: object) -> None:
        """Refuse a chat of which the template leaves out tools, calls, thoughts or whole turns."""
        if tools is not None and self._shown(chat[:1], tools) == self._shown(chat[:1], None):
            raise Refused("with tools that the template does not show")
        for turn, message in enumerate(chat):
            names = list(essential(message))
            alone = turn > 0 and message["role"] in ("tool", "system")
            shown = self._shown(chat[: turn + 1], tools) if names or alone else None
            if shown is None:
                continue
            for name in names:
                bare = {key: value for key, value in message.items() if key != name}
                if self._shown([*chat[:turn], bare], tools) == shown:
                    raise Refused(f"with {name} that the template does not show")
            if alone and self._shown(chat[:turn], tools) == shown:
                role = message["role"]
                raise Refused(f"with a message of the role {role!r} that is not shown")

    def _shown(self, chat: list[Message], tools: object) -> str | None:
        """Return a rendering; None where the template refuses it, which `render` will tell."""
        try:
            return self._text(chat, tools)
        except Refused:
            return None

    def _text(self, chat: list[Message], tools: object, *, opened: bool = False) -> str:
        return self._call(chat, tools, tokenize=False, add_generation_prompt=opened)

    def _call(self, chat: list[Message], tools: object, **how: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(chat, tools=tools, **how, **self.options)
        except Exception as error:  # a template is somebody's program
            reason = str(error).strip().splitlines()
            raise Refused(
                f"that the template refuses ({reason[0] if reason else error!r})"
            ) from None

    def _encode(self, text: str) -> list[int]:
        """Return ids without anything added: the template writes its own special tokens."""
        return list(self.tokenizer(whole(text), add_special_tokens=False)["input_ids"])
