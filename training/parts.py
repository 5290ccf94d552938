"""Parts: everything a training run needs, made in the order in which mistakes are cheap to find.

Settings and files first, then the target, then the data in its terms. Nothing is written and
nothing is trained here.
"""

import dataclasses
import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from drafters.base import NeuralDrafter
from drafters.errors import UserError
from drafters.fingerprint import Fingerprint
from drafters.registry import build_drafter
from drafters.target import Target
from drafters.vocab import DraftVocabulary, choose, coverage
from drafters.warmstart import WarmStart
from training import acceptance, tracking
from training.adapters import add_adapters
from training.batches import compose, documents
from training.examples import Example, first_tokens, make_examples, pack, split
from training.feature_store import FeatureStore, Kind
from training.features import Lessons, check_batch_fits, decide, stored_bytes
from training.joint import Joint
from training.lesson_settings import DataSettings
from training.objective import Objective
from training.options import TrainSettings
from training.preview import answer_counts, kept_always
from training.records import Record, read_records, template_options_of, writer_of
from training.served_target import check_served, load_target, served_states


@dataclass
class Parts:
    """Everything a run needs.

    Args:
        settings: as given, with the drafter's options resolved.
        accelerator: device, processes and trackers.
        objective: target, drafter (its vocabulary chosen, its weights started) and loss.
        lessons, held_out: to learn from, to measure on.
        prompts: held-out prompts for the engine.
        identity: what a resumed run must share.
        notes: lines about the data, for a person.
    """

    settings: TrainSettings
    accelerator: Accelerator
    objective: Objective
    lessons: Lessons
    held_out: Lessons
    prompts: list[list[int]]
    identity: dict[str, object]
    notes: list[str]


def prepare(method: str, settings: TrainSettings) -> Parts:
    """Make all parts of a run; nothing is written and nothing is trained.

    Raises:
        UserError: whatever the user can mend.
    """
    growth = acceptance.growth_of(settings.evaluate.shape)
    settings = dataclasses.replace(settings, data=with_stored_options(settings.data))
    records = read_records(settings.data.path, settings.data.split)
    accelerator = _accelerator(settings)
    _set_threads(settings.threads, accelerator)
    target = load_target(settings, str(accelerator.device))
    torch.manual_seed(settings.seed)
    drafter = build_drafter(method, settings.drafter, target.shape)
    if not isinstance(drafter, NeuralDrafter):
        raise UserError(f"drafter {method} has no weights to train")
    drafter.start(target, growth, rows=1, capacity=2)  # refuses a growth it cannot serve
    examples, report = make_examples(records, target, settings.data)
    available, measured = split(examples, settings.data.held_out)
    training = first_tokens(available, settings.data.tokens)
    notes = [str(report), f"{len(training)} chats to learn from, {len(measured)} held out"]
    if settings.data.pack:
        training = pack(training, min(settings.data.max_length, target.shape.max_positions))
        notes.append(f"packed into {len(training)} rows")
    notes += _writer_note(settings.data.path, target)
    warm = WarmStart.read(settings.warm_start) if settings.warm_start else None
    # counting costs nothing: all chats say which ids are worth keeping, however few are learned
    notes += _choose_vocabulary(drafter, target, available, measured, warm)
    drafter.init_from(target)
    if warm is not None:
        notes.append(warm.apply(drafter, target))
    drafter.to(accelerator.device)
    if settings.optim.lora_rank:
        add_adapters(drafter, settings.optim)
    if settings.adapter.rank:
        drafter = Joint(drafter, target, settings.adapter)
    lessons, held_out = _lessons(training, measured, drafter, target, settings)
    notes += check_served(settings, (lessons, held_out), accelerator.num_processes)
    notes.append(_size_note(drafter, lessons))
    deciding = [] if settings.features.engine else measured  # takes all of the target
    return Parts(
        dataclasses.replace(settings, drafter=drafter.options()),
        accelerator,
        Objective(drafter, target, settings.loss, _drafting(settings)),
        lessons,
        held_out,
        acceptance.prompts_of(deciding, settings.evaluate, target.shape.max_positions),
        _identity(method, drafter, target, settings, records),
        notes,
    )


def with_stored_options(data: DataSettings) -> DataSettings:
    """Return data settings with the template's options that the chats were written with.

    Raises:
        UserError: if others were given: answers would be learned in a form that they never had.
    """
    stored = template_options_of(data.path)
    if stored is None or stored == data.template_options:
        return data
    if data.template_options:
        raise UserError(
            f"data.template_options is {data.template_options}, but {data.path} was written with "
            f"{stored}: give the same or none"
        )
    return dataclasses.replace(data, template_options=stored)


def _accelerator(settings: TrainSettings) -> Accelerator:
    output = Path(settings.output)
    # left to itself, accelerate would make each of several CPU processes a run of its own
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    # or under FSDP transformers would leave the target to be sent by the first process: it never is
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    return Accelerator(
        cpu=several and not torch.accelerator.is_available(),
        mixed_precision=settings.precision,
        log_with=tracking.trackers_of(settings.tracking, output),
        project_config=ProjectConfiguration(str(output), str(output)),
    )


def _set_threads(threads: int, accelerator: Accelerator) -> None:
    """Set the CPU threads; `accelerate launch` alone would leave a CPU process with one."""
    if accelerator.device.type == "cpu":
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        torch.set_num_threads(threads or max(1, cores // local))


def _writer_note(path: str, target: Target) -> list[str]:
    """Warn of chats that another target wrote: what it says is not what this one would say."""
    writer = writer_of(path)
    if writer is None or Fingerprint(**writer).difference(Fingerprint.of(target)) is None:
        return []
    return [f"warning: {writer['name']} wrote these chats, and {target.name} is another target"]


def _choose_vocabulary(
    drafter: NeuralDrafter,
    target: Target,
    available: Sequence[Example],
    measured: Sequence[Example],
    warm: WarmStart | None,
) -> list[str]:
    """Set the drafter's reduced vocabulary, that of a warm start if it fits; say what it covers."""
    if drafter.ids is None:
        return []
    always = kept_always(target.tokenizer, set(target.eos_ids), available)
    counts = answer_counts(available, target.shape.vocab_size)
    known = None if warm is None else warm.ids(len(drafter.ids))
    ids = choose(counts, len(drafter.ids), always) if known is None else known
    for module in drafter.modules():
        if isinstance(module, DraftVocabulary):
            module.keep(ids)
    held_out = answer_counts(measured, target.shape.vocab_size)
    return [
        f"draft vocabulary of {len(ids)} ids: {coverage(counts, ids):.2%} of the chats' tokens, "
        f"{coverage(held_out, ids):.2%} of the held-out ones (a ceiling on alpha)"
    ]


def _lessons(
    training: Sequence[Example],
    measured: Sequence[Example],
    drafter: NeuralDrafter,
    target: Target,
    settings: TrainSettings,
) -> tuple[Lessons, Lessons]:
    """Compose the batches of both sides and decide where their features are kept.

    Raises:
        UserError: if they do not fit there, or the store is of another kind.
    """
    sides = [list(training), first_tokens(measured, settings.evaluate.tokens)]
    lengths = [[len(example) for example in side] for side in sides]
    batch_tokens, seed = settings.data.batch_tokens, settings.seed
    groups = [compose(side, batch_tokens, seed) for side in lengths]
    width = (len(drafter.features.layers) + 1) * target.shape.hidden_size
    needed = 0
    for side, composed in zip(lengths, groups, strict=True):
        if not settings.features.engine:
            check_batch_fits(side, composed, target, settings.loss)
        needed += stored_bytes(side, composed, width, settings.features)
    kept = decide(settings.features, needed)
    store = None
    if settings.features.store:
        kind = Kind.of(target, drafter.features.layers, settings.features.stored_dtype)
        store = FeatureStore(settings.features.store, kind)
        store.check_room(store.missing_bytes(documents([*sides[0], *sides[1]])))
    layers = drafter.features.layers if store is None else store.kind.layers
    served = served_states(settings, target, layers, sides, groups)
    made = [
        Lessons(
            side,
            composed,
            target=target,
            features=drafter.features,
            settings=kept,
            loss=settings.loss,
            store=store,
            served=served,
        )
        for side, composed in zip(sides, groups, strict=True)
    ]
    return made[0], made[1]


def _identity(
    method: str,
    drafter: NeuralDrafter,
    target: Target,
    settings: TrainSettings,
    records: Sequence[Record],
) -> dict[str, object]:
    digest = hashlib.sha256()
    for record in records:
        digest.update(record.id.encode())
        digest.update(b"" if record.ids is None else record.ids.tobytes())
        said = record.messages, record.tools, record.text
        digest.update(b"" if said == (None, None, None) else repr(said).encode())
    fingerprint = Fingerprint.of(target).to_dict()
    plain = dataclasses.asdict(settings)
    sections = ("data", "loss", "optim", "seed", "precision", "target_dtype")
    sections += ("warm_start", "on_policy", *(["adapter"] if settings.adapter.rank else []))
    return {
        "drafter": method,
        "options": drafter.options(),
        "target": fingerprint["weights"],
        "chats": digest.hexdigest()[:16],
        "features": {"dtype": settings.features.stored_dtype},  # where they lie changes nothing
        **{section: plain[section] for section in sections},
    }


def _drafting(settings: TrainSettings) -> float | None:
    """Return the weight of the drafter's loss beside its target's, None if that does not learn."""
    return settings.adapter.drafting if settings.adapter.rank else None


def _size_note(drafter: NeuralDrafter, lessons: Lessons) -> str:
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    stored = ""
    if lessons.store is not None:
        count = sum(lessons.is_stored(index) for index in range(len(lessons)))
        to_come = lessons.missing_bytes / 2**30
        stored = f"; {count} of them in {lessons.store.folder} already, {to_come:.2f} GiB to come"
    return (
        f"{trained / 1e6:.2f} M trainable parameters; {len(lessons)} batches{stored}; features "
        f"kept: {lessons.settings.keep}"
    )
