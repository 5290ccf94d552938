r"""Answer one prompt with a target and a drafter; the text streams as it is decoded.

    T=$(python scripts/fetch_target.py)
    python scripts/generate.py --target $T --prompt "What is a tree?"
    python scripts/generate.py --target $T --drafter ngram --prompt "Count to twenty." --color
    python scripts/generate.py --target $T --drafter runs/demo/eagle/best:growth=chain,gamma=3 \
        --prompt "What is a prime number?" --temperature 0.7 --seed 1 --json

The answer goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from console import (
    DEVICE_HELP,
    ENGINE_HELP,
    WEIGHTS_HELP,
    Dtype,
    Engine,
    Plugins,
    Weights,
    app,
    note,
    run,
)
from drafters.base import Commit
from drafters.errors import UserError
from drafters.rules import Rules
from drafters.sampling import Warp
from drafters.shipped import shipped_for
from drafters.target import Target
from inference.detokenize import TextStream
from inference.generate import Generation, Output
from inference.machine import versions
from inference.modes import LOSSY, shown
from inference.prompts import chat_ids, has_template, text_ids
from inference.sampling import Sampling
from inference.spec import Spec
from training.commandline import MARKED, Screen, spelt

SHIPPED = "ngram+{}:growth=dynamic,nodes=8,width=2,depth=4"

cli = app(__doc__ or "")


@cli.command()
def generate(
    target: Annotated[str, typer.Option(help="Folder or hub id of the target.")],
    prompt: Annotated[str, typer.Option(help="The user's message, or raw text.")],
    drafter: Annotated[
        str | None,
        typer.Option(
            help="D or D:growth=chain,gamma=4; D: a folder, a name or A+B. verify=typical is "
            "LOSSY. Default: what ships for this target beside prompt lookup, else none."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="At most this many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the smallest set of this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Of prompt and output; 1: off.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Of tokens in the output.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, each time again.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Equal seeds draw equal texts.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the answer.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Chat template or bare text; default: what there is."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="The chat's system message.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="What the target computes in.")] = Dtype.float32,
    engine: Annotated[Engine | None, typer.Option(help=ENGINE_HELP)] = None,
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    weights: Annotated[Weights | None, typer.Option(help=WEIGHTS_HELP)] = None,
    color: Annotated[
        bool,
        typer.Option(
            "--color", help="Mark accepted drafts: green, or {+so+} where no colours are."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    _plugin: Plugins = None,
) -> None:
    """Answer one prompt with a target and a drafter; the text streams as it is decoded."""
    if as_json and color:
        raise UserError("--json and --color exclude each other: give one")
    spec = None if drafter is None else Spec.parse(drafter)
    rules = Rules(
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )
    warp = Warp(temperature, top_k, top_p, min_p, rules if rules.report() else None)
    sampling = Sampling(max_new_tokens, warp, seed, tuple(stop or ()))
    decider = Target.load(target, dtype=dtype.value, engine=engine, device=device, weights=weights)
    spec = spec or _usual(decider)
    generation = Generation(
        decider,
        spec.load(decider),
        [_ids(decider, prompt, system, chat)],
        growth=spec.growth,
        sampling=sampling,
        verify=spec.verify,
    )
    if as_json:
        print(json.dumps(_result(generation, spec) | {"engine": decider.engine}))
        return
    _stream(generation, TextStream(decider.tokenizer), color=color)
    output = generation.outputs[0]
    note(
        f"drafter {spec.drafter}: {len(output.ids)} tokens, {output.rounds} rounds, "
        f"tau {output.tau:.2f}, {_speed(generation, output):.1f} tokens/s on the "
        f"{decider.engine} engine, ended by {output.finish_reason}"
        f"{', ' + shown(spec.verify) if spec.verify in LOSSY else ''}"
    )


def _usual(target: Target) -> Spec:
    """Return what drafts for a target where nobody says: what ships for it, or nothing."""
    folder = shipped_for(target)
    return Spec.parse("none" if folder is None else SHIPPED.format(folder))


def _ids(target: Target, prompt: str, system: str | None, chat: bool | None) -> list[int]:
    """Return the prompt's ids: a chat if asked for, or if the target reads chats."""
    if chat is False or (chat is None and not has_template(target)):
        if system is not None:
            raise UserError("--system needs a chat: leave out --raw, or --system")
        return text_ids(target, prompt)
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return chat_ids(target, messages)


def _result(generation: Generation, spec: Spec) -> dict[str, object]:
    output = generation.run()[0]
    return {
        "ids": output.ids,
        "text": output.text,
        "tau": output.tau,
        "rounds": output.rounds,
        "finish_reason": output.finish_reason,
        "drafter": spec.text,
        "draft_mode": " and ".join(sorted(output.draft_modes)) or None,
        "verify_mode": shown(spec.verify),
        "tokens_per_second": _speed(generation, output),
        "seed": generation.sampling.seed,
        "versions": versions(),
    }


def _speed(generation: Generation, output: Output) -> float:
    """Return tokens a second of decoding, the prefill and its token apart."""
    return (len(output.ids) - 1) / generation.clock.decode if output.rounds else 0.0


def _stream(generation: Generation, text: TextStream, *, color: bool) -> None:
    """Write the text as it becomes final; a piece is marked if its last token was drafted."""
    console = Screen(force_terminal=True, highlight=False, soft_wrap=True) if color else None

    def show(piece: str, *, drafted: bool = False) -> None:
        if console is None:
            sys.stdout.write(spelt(piece) if sys.stdout.isatty() else piece)
            sys.stdout.flush()
        elif drafted and console.color_system is None:  # NO_COLOR
            console.print(MARKED.format(piece), end="")
        else:
            console.print(piece, end="", style="green" if drafted else None)

    for _, commit in generation:
        for piece, drafted in _pieces(text, commit):
            show(piece, drafted=drafted)
    show(text.flush() + "\n")


def _pieces(text: TextStream, commit: Commit) -> list[tuple[str, bool]]:
    return [
        (text.push([token]), place < commit.accepted) for place, token in enumerate(commit.emitted)
    ]


if __name__ == "__main__":
    run(cli)
