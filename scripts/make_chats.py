r"""Let a target write the chats that drafters learn from: Parquet with the very ids it generated.

    T=$(python scripts/fetch_target.py)
    python scripts/make_chats.py --target $T --out runs/chats --tokens 300000 \
        --openings configs/openings/general.txt
    python scripts/make_chats.py --target $T --out runs/answers --prompts questions.jsonl
    python scripts/make_chats.py --target BASE --out runs/texts --texts lines.txt
    python scripts/make_chats.py --target $T --out /tmp/chats --chats 8 --max-new-tokens 32
    python scripts/make_chats.py --target $T --out runs/chats --tokens 300000 --features 1,14,28
    python scripts/make_chats.py --target $T --out runs/served --prompts questions.jsonl \
        --endpoint http://127.0.0.1:8000 --model NAME --rows 256

The same command goes on where a killed one stopped. What is dropped, and why, is counted in
manifest.json. With --features the states that the target went through are kept in OUT/features:
training with features.store=OUT/features then never runs it again. With --endpoint a server writes
(vLLM, SGLang, llama.cpp or another with OpenAI's completions): of the target only its tokenizer,
template and config are read here, and the server is given ids.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress, TaskID

from console import DEVICE_HELP, Dtype, app, note, progress, run
from drafters.errors import UserError
from drafters.whole import check_place
from inference.endpoint import Endpoint
from inference.machine import machine, versions
from training.batches import documents
from training.chat_settings import ChatSettings
from training.chats import RULES, ChatMaker, Keep
from training.feature_store import FeatureStore, Kind
from training.ranges import check_threads
from training.shards import CHATS, Goal, ShardFolder
from training.sources import Source, given_prompts, given_texts, self_chat
from training.writers import own_writer, served_writer

FEATURES = "features"  # folder beside the chats

cli = app(__doc__ or "")


@cli.command(epilog=" ".join(f"{name}: {rule}." for name, rule in RULES.items()))
def make_chats(
    target: Annotated[str, typer.Option(help="Folder or hub id of the target.")],
    out: Annotated[Path, typer.Option(help="Folder of the data set; a killed run goes on there.")],
    tokens: Annotated[int | None, typer.Option(help="Enough: this many answer tokens.")] = None,
    chats: Annotated[int | None, typer.Option(help="Enough: this many chats.")] = None,
    openings: Annotated[
        Path | None, typer.Option(help="First words of the user's messages, one a line.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Messages to answer. JSONL, Parquet: turns, prompt, messages."),
    ] = None,
    texts: Annotated[
        Path | None, typer.Option(help="Lines to continue, for targets without a chat template.")
    ] = None,
    turns: Annotated[int, typer.Option(help="Turns of a self-chat.")] = 1,
    temperatures: Annotated[
        str, typer.Option(help="Of the answers, by turns; 0 is greedy.")
    ] = "0,0.7",
    top_k: Annotated[int, typer.Option(help="Of sampled answers; 0: all tokens.")] = 0,
    top_p: Annotated[float, typer.Option(help="Of sampled answers; 1: all tokens.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Of sampled answers; 0: all tokens.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 256,
    user_temperature: Annotated[float, typer.Option(help="Of the user's messages.")] = 1.0,
    user_top_p: Annotated[float, typer.Option(help="Of the user's messages; 1: off.")] = 1.0,
    user_min_p: Annotated[float, typer.Option(help="Of the user's messages; 0: off.")] = 0.0,
    user_tokens: Annotated[int, typer.Option(help="Of a user's message; longer: dropped.")] = 96,
    max_looped: Annotated[
        float, typer.Option(help="Largest share of an answer inside repeated 4-grams; 1: any.")
    ] = ChatSettings.max_looped,
    template_option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for the chat template; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Chat i depends on the seed and i alone.")] = 0,
    rows: Annotated[
        int, typer.Option(help="Chats decoded together; with --endpoint, requests in flight.")
    ] = 64,
    shard: Annotated[int, typer.Option(help="Chats that a kill can cost at most.")] = 256,
    features: Annotated[
        str | None,
        typer.Option(
            help="Keep the target's states in OUT/features, in bfloat16: layers such as 1,14,28, "
            "or last; the last state is always kept."
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help="Address of a server that writes, such as http://127.0.0.1:8000."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The target, as the server calls it.")] = None,
    key_from: Annotated[
        str | None,
        typer.Option(help="Environment variable with the server's key; it is stored nowhere."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="What the target computes in.")] = Dtype.float32,
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    threads: Annotated[int | None, typer.Option(help="Of the CPU; default: torch's own.")] = None,
) -> None:
    """Let a target write the chats that drafters learn from."""
    if threads is not None:
        check_threads("--threads", threads)
        torch.set_num_threads(threads)
    check_place(out, folder=True)
    source = _source(openings, prompts, texts, seed)
    goal = Goal(tokens, chats, source.size)
    settings = ChatSettings(
        seed=seed,
        temperatures=_temperatures(temperatures),
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        max_new_tokens=max_new_tokens,
        user_temperature=user_temperature,
        user_top_p=user_top_p,
        user_min_p=user_min_p,
        user_tokens=user_tokens,
        turns=turns,
        max_looped=max_looped,
        template_options=_options(template_option or []),
    )
    rows, most = _positive("rows", rows), _positive("shard", shard)
    if endpoint is None:
        if model is not None or key_from is not None:
            raise UserError("--model and --key-from belong to a server: give --endpoint too")
        writer = own_writer(target, dtype.value, device, rows, features)
    else:
        if features is not None or device is not None or dtype is not Dtype.float32:
            raise UserError(
                "--features, --device and --dtype are of a target in this process: leave them out "
                "with --endpoint (scripts/store_features.py makes features afterwards)"
            )
        writer = served_writer(target, Endpoint(endpoint, _key(key_from)), model, rows)
    store = None if writer.keep is None else _store(out, writer.keep, goal)
    with progress() as bars:
        meter = Meter(bars, goal)
        maker = ChatMaker(
            writer.reader, writer.sampler, source, settings, tick=meter.tick, keep=writer.keep
        )
        made_by = {
            **writer.identity,
            "source": {"kind": source.kind, "digest": source.digest},
            "sampling": settings.to_dict(),
            "goal": {"tokens": tokens, "chats": chats},
            "shard": most,
        }
        folder = ShardFolder(out, made_by)
        if not folder.done:
            _fill(folder, maker, goal, most, meter, store)
    if folder.done:
        note(f"{out / CHATS} is there already, made by these settings")
    else:
        found = folder.finish(goal, _about())
        note(_summary(found))
    print(out / CHATS)


def _store(out: Path, keep: Keep, goal: Goal) -> FeatureStore:
    """Return where states are kept; refuse what the disk cannot hold."""
    store = FeatureStore(out / FEATURES, Kind.of(keep.target, keep.layers, "bfloat16"))
    store.check_room((goal.tokens or 0) * store.kind.token_bytes)  # prompts are not known yet
    return store


class Meter:
    """The bar, and tokens a second over the last few seconds."""

    def __init__(self, bars: Progress, goal: Goal) -> None:
        """Make a bar whose unit is that of the goal."""
        self.bars, self.by_tokens = bars, goal.tokens is not None
        self.task: TaskID = bars.add_task("chats", total=goal.tokens or goal.chats or goal.size)
        self.phase, self.tokens, self.start = "", 0, perf_counter()

    def tick(self, phase: str, tokens: int) -> None:
        """Show the rate; start it afresh with every phase."""
        if phase != self.phase:
            self.phase, self.tokens, self.start = phase, 0, perf_counter()
        self.tokens += tokens
        rate = self.tokens / max(1e-9, perf_counter() - self.start)
        self.bars.update(self.task, description=f"{phase} {rate:4.0f} tokens/s")

    def reach(self, supervised: int, chats: int) -> None:
        """Show what is stored."""
        self.bars.update(self.task, completed=supervised if self.by_tokens else chats)


def _fill(
    folder: ShardFolder,
    maker: ChatMaker,
    goal: Goal,
    most: int,
    meter: Meter,
    store: FeatureStore | None,
) -> None:
    """Make and store shards until there is enough."""
    tally = folder.tally()
    if tally.made:
        note(f"going on after {tally.made} chats, {tally.kept} of them kept")
    while size := tally.next_size(goal, most, maker.longest_answers):
        meter.reach(tally.supervised, tally.kept)
        shard = maker.make(tally.made, size, tally.keys)
        if store is not None:
            # before the chats: a kill in between leaves states that are found when they come again
            for example, states in shard.states:
                store.add(next(documents([example])), states)
            store.flush()
        tally.add(folder.add(shard))
        _speak(shard.seconds, shard.tokens, tally.kept, tally.supervised)
        if not tally.kept:
            raise UserError(
                f"all of {tally.made} chats were dropped ({_reasons(tally.drops)}): raise the "
                "limits that dropped them"
            )


def _speak(seconds: dict[str, float], tokens: dict[str, int], kept: int, supervised: int) -> None:
    rates = ", ".join(f"{name} {tokens[name] / seconds[name]:.0f}" for name in tokens)
    note(f"{kept} chats, {supervised} answer tokens so far; tokens/s: {rates}")


def _summary(found: dict[str, Any]) -> str:
    return (
        f"{found['chats']} chats, {found['supervised_tokens']} answer tokens; "
        f"{found['cut_by_length']} answers cut by --max-new-tokens; "
        f"dropped: {_reasons(found['dropped'])}"
    )


def _reasons(drops: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in drops.items()) or "none"


def _about() -> dict[str, Any]:
    """Return how this run was started and where."""
    command = shlex.join(["python", "scripts/make_chats.py", *sys.argv[1:]])
    return {"command": command, "rules": RULES, "versions": versions(), "machine": machine()}


def _source(openings: Path | None, prompts: Path | None, texts: Path | None, seed: int) -> Source:
    if sum(file is not None for file in (openings, prompts, texts)) > 1:
        raise UserError("--openings, --prompts and --texts exclude each other: give one at most")
    if prompts is not None:
        return given_prompts(prompts)
    return given_texts(texts) if texts is not None else self_chat(openings, seed)


def _key(variable: str | None) -> str | None:
    """Return the key that an environment variable holds."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"--key-from: the environment has no {variable}: set it to the key")
    return key


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--temperatures is {text!r}: give numbers such as 0,0.7") from None


def _options(pairs: list[str]) -> dict[str, Any]:
    """Read KEY=VALUE; a value that is JSON is taken as such, any other as text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise UserError(f"--template-option is {pair!r}: give KEY=VALUE")
        try:
            options[key] = json.loads(value)
        except (ValueError, RecursionError):
            options[key] = value
    return options


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise UserError(f"--{name} is {value}: give 1 or more")
    return value


if __name__ == "__main__":
    run(cli)
