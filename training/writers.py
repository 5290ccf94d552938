"""Writers: who writes chats, a target in this process or one in a server."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drafters.errors import UserError
from drafters.fingerprint import Fingerprint
from drafters.target import Target
from inference.endpoint import Endpoint
from training.chats import Keep
from training.reader import ChatReader, WeightlessReader
from training.remote import RemoteSampler
from training.sampler import EngineSampler, Sampler


@dataclass(frozen=True)
class Writer:
    """Who writes.

    Args:
        reader: tokenizer, template and sizes of the target.
        sampler: decodes.
        identity: what the manifest says of it; a run goes on only where this is equal.
        keep: what is kept of the states.
    """

    reader: ChatReader
    sampler: Sampler
    identity: Mapping[str, Any]
    keep: Keep | None = None


def own_writer(
    path: str, dtype: str, device: str | None, rows: int, features: str | None
) -> Writer:
    """Load a target that writes in this process.

    Args:
        path: folder or hub id.
        dtype: what it computes in.
        device: where; None: the machine's accelerator, else the CPU.
        rows: chats decoded together.
        features: layers whose outputs are kept, such as "1,14", or "last"; None: nothing is.

    Raises:
        UserError: if there is none, or it has no such layers.
    """
    target = Target.load(path, dtype=dtype, device=device)
    identity: dict[str, Any] = {"target": Fingerprint.of(target).to_dict(), "dtype": dtype}
    keep = None
    if features is not None:
        keep = Keep(target, _layers(features, target.shape.num_layers))
        identity["features"] = keep.layers
    return Writer(target, EngineSampler(target, rows), identity, keep)


def served_writer(path: str, endpoint: Endpoint, model: str | None, in_flight: int) -> Writer:
    """Let a server write; nothing but the target's texts is read here.

    Args:
        path: folder or hub id of the target that is served.
        endpoint: the server.
        model: how it calls the target.
        in_flight: requests that it has at a time.

    Raises:
        UserError: if the server is not there, or serves another target.
    """
    reader = WeightlessReader.load(path)
    if reader.tokenizer is None:
        raise UserError(f"{path} has no tokenizer: give a target that reads text")
    sampler = RemoteSampler(endpoint, model, reader, in_flight)
    server = {"model": sampler.model, "ids": sampler.ids}
    return Writer(reader, sampler, {"target": reader.fingerprint.to_dict(), "server": server})


def _layers(text: str, count: int) -> tuple[int, ...]:
    """Read the layers whose outputs are kept."""
    try:
        layers = () if text == "last" else tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        layers = (-1,)
    if layers and not 0 <= layers[0] <= layers[-1] < count:
        raise UserError(
            f"--features is {text!r}: give layers from 0 to {count - 1} such as 1,4, or last"
        )
    return layers
