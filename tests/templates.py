"""Chat templates with the habits of real ones, over the tiny tokenizer."""

from collections.abc import Sequence

from tests.folders import TEMPLATE, tiny_tokenizer
from training.template import Renderer

_HEAD = "{{ '<|im_start|>' + message['role'] + '\n' }}"
_OPENING = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TAGGED = (
    "{% for message in messages %}" + _HEAD + "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}" + _OPENING
)
# Qwen-like: answers of earlier turns lose what they thought.
FORGETFUL = (
    "{% for message in messages %}" + _HEAD + "{% if loop.last %}{{ message['content'] }}"
    "{% else %}{{ message['content'].split('</think>')[-1] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}" + _OPENING
)
# The empty thought is part of the opening when thinking is off.
THINKING = TEMPLATE.replace(
    "{{ '<|im_start|>assistant\n' }}",
    "{{ '<|im_start|>assistant\n' }}{% if not enable_thinking %}{{ '<think></think>' }}{% endif %}",
)
# Shows tools, calls and thoughts.
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{{ tools | tojson }}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}" + _HEAD + "{% if message.reasoning_content %}"
    "{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}" + _OPENING
)


def renderer(template: str = TEMPLATE, **options: object) -> Renderer:
    """Make a renderer of this template; <|im_end|> ends answers."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return Renderer(tokenizer, frozenset({2}), options)


def answers(ids: Sequence[int], mask: Sequence[bool]) -> list[str]:
    """Decode every unbroken run of supervised tokens."""
    texts: list[str] = []
    run: list[int] = []
    for token, inside in zip([*ids, 0], [*mask, False], strict=True):
        if inside:
            run.append(token)
        elif run:
            texts.append(tiny_tokenizer().decode(run))
            run = []
    return texts
