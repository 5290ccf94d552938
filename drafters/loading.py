"""Loading: causal LMs, their configs and tokenizers, from a folder or the hub.

Safetensors only. Whatever is wrong is one line that names the model's role and place. A folder with
an adapter (adapter.py) stands for its base with the adapter merged in.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from drafters.adapter import Adapter, base_in, is_adapter
from drafters.errors import UserError
from drafters.int8 import quantisation
from drafters.selftest import check_kind
from drafters.spread import Spread
from drafters.untrusted import refuse_devices

_GIVE = (
    "give a folder in Hugging Face format (config.json, safetensors, tokenizer) or the id of one "
    "on the hub"
)


def load_config(path: str | Path, role: str, *, trust_remote_code: bool = False) -> Any:
    """Return a text config.

    Raises:
        UserError: if there is none.
    """
    if is_adapter(path):
        path, role = base_in(path), f"{role} {path}: its base"
    with _said(role, path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        return config.get_text_config()


def load_tokenizer(path: str | Path, role: str, *, trust_remote_code: bool = False) -> Any:
    """Return a tokenizer.

    Raises:
        UserError: if there is none.
    """
    if is_adapter(path) and not (Path(path) / "tokenizer_config.json").exists():
        path, role = base_in(path), f"{role} {path}: its base"
    with _said(role, path):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def load_model(
    path: str | Path,
    role: str,
    dtype: torch.dtype,
    *,
    trust_remote_code: bool = False,
    spread: Spread | None = None,
) -> Any:
    """Return a causal LM with its head, in eval mode.

    Args:
        path: a folder in Hugging Face format, an adapter's among them, or a hub id.
        role: what an error calls it, such as "target".
        dtype: of its weights.
        trust_remote_code: whether the folder's own Python may run.
        spread: over which devices; None: all of it is on the CPU.

    Raises:
        UserError: if it is not there, or of a kind that cannot be served; before any weight is
            read.
    """
    if is_adapter(path):
        if spread is not None:
            raise UserError(
                f"{role} {path} is an adapter, which is merged on one device: leave device_map "
                "out, or merge it first (merge_and_unload) and give the folder of the merged model"
            )
        return _adapted(path, role, dtype, trust_remote_code=trust_remote_code)
    if trust_remote_code:
        warnings.warn(f"{role} {path}: trust_remote_code lets its own Python run", stacklevel=3)
    config = load_config(path, role, trust_remote_code=trust_remote_code)
    check_kind(config)
    loader: Any = AutoModelForCausalLM
    places = {} if spread is None else spread.arguments()
    for device in [] if spread is None else spread.devices:
        chosen_device(device)
    with _said(role, path), _quantised(role, path, quantisation(config)):
        if not trust_remote_code:
            _check_size(Path(path), config, role)
        model = loader.from_pretrained(
            path,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            **places,
        )
    return model.eval()


def chosen_device(name: str | int | None) -> torch.device:
    """Return the device of this name, or accelerator of this number; None: the first, else the CPU.

    Raises:
        UserError: if there is none of this name here.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        return torch.device("cpu") if found is None else found
    here = ["cpu"]
    if found is not None:
        here += [f"{found.type}:{n}" for n in range(torch.accelerator.device_count())]
    wanted = name if isinstance(name, str) or found is None else f"{found.type}:{name}"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        device = None
    # a number says nothing of CPUs: accelerate gives each of several processes another
    if device is None or (
        device.type != "cpu" and f"{device.type}:{device.index or 0}" not in here
    ):
        raise UserError(f"device {name!r} is not on this machine: give {' or '.join(here)}")
    return device


def _adapted(path: str | Path, role: str, dtype: torch.dtype, *, trust_remote_code: bool) -> Any:
    """Return the base of an adapter's folder with the adapter merged in, then rounded."""
    adapter = Adapter.read(path)
    its = f"{role} {path}: its base"
    model = load_model(adapter.base, its, torch.float32, trust_remote_code=trust_remote_code)
    method = quantisation(model.config)
    if method:
        raise UserError(
            f"{its} {adapter.base} is quantised with {method}: give the unquantised model there"
        )
    adapter.merge_into(model)
    model.config.name_or_path = str(path)
    for parameter in model.parameters():  # tables of positions stay in float32
        parameter.data = parameter.data.to(dtype)
    return model.eval()


def _check_size(folder: Path, config: Any, role: str) -> None:
    """Refuse a config of a larger model than its weights could fill, before memory is taken."""
    held = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not held or quantisation(config):
        return
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    values = sum(parameter.numel() for parameter in model.parameters())
    if values > held:  # a byte a value at least
        raise UserError(
            f"{role} {folder}: config.json describes a model of {values:,} values and the weights "
            f"beside it have {held:,} bytes: give the config that belongs to them"
        )


@contextmanager
def _quantised(role: str, path: str | Path, method: str) -> Iterator[None]:
    """Name the method where transformers cannot load a quantised model here."""
    try:
        yield
    except (ImportError, RuntimeError, ValueError, AttributeError) as error:
        if not method:
            raise
        reason = " ".join(str(error).split())
        raise UserError(
            f"{role} {path} is quantised with {method}, which transformers cannot load here: "
            f"{reason}. Install what it names, or give the model in float32 or bfloat16"
        ) from error


@contextmanager
def _said(role: str, path: str | Path) -> Iterator[None]:
    place = Path(path)
    named_place = place.is_absolute() or str(path).startswith(".") or len(place.parts) > 2
    if not str(path) or (not place.is_dir() and (place.exists() or named_place)):
        raise UserError(f"{role} {str(path)!r}: no such folder; {_GIVE}")
    if place.is_dir():
        refuse_devices(place)
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # whatever transformers makes of somebody's files
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if "offload_folder" in reason:
            raise UserError(
                f"{role} {path} stores its layers otherwise than they are computed with, so what "
                "stays on the disk is a copy: give offload_folder, with room for it"
            ) from error
        raise UserError(f"{role} {path}: {reason}; {_GIVE}") from error
