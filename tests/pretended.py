"""Pretended devices: tensors that claim to lie on devices which this machine lacks.

Their numbers are real and on the CPU, so that everything runs as it would there; an operation over
tensors of two devices raises, as it would there. What only the machine itself could tell (that
kernels exist, that memory is enough, how long a copy takes) is not told.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_HERE = torch.device("cpu")
_ACROSS = {"copy_", "__set__", "_has_compatible_shallow_copy_type"}  # may see two devices


class Pretended(TorchFunctionMode):
    """While it is entered, tensors go where they are sent, as far as anybody can tell."""

    def __init__(self) -> None:
        """Know of no device yet; storages are held so that none takes another's address."""
        super().__init__()
        self._places: dict[int, tuple[torch.UntypedStorage, torch.device]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function, and say of what it returns where it would lie."""
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        of = getattr(getattr(func, "__self__", None), "__name__", "")  # a property's
        if name == "__get__" and of in ("device", "is_cuda", "is_cpu"):
            place = self.place_of(args[0])
            return place if of == "device" else place.type == of.removeprefix("is_")
        if name in ("to", "cpu", "cuda"):
            return self._moved(name, args, given)
        if name == "numpy" and self.place_of(args[0]) != _HERE:
            raise TypeError(f"a tensor on {self.place_of(args[0])} has no numpy array")
        asked = given.pop("device", None)
        if asked is None and name not in _ACROSS:
            self._refuse_two(name, args, given)
        out = func(*args, **given)
        tensors = sorted(_tensors((args, given)), key=lambda x: x.dim(), reverse=True)
        place = self.place_of(tensors[0]) if tensors else _HERE
        if name == "copy_":
            place = self.place_of(args[0])
        self._lay(out, place if asked is None else torch.device(asked))
        return out

    def place_of(self, tensor: torch.Tensor) -> torch.device:
        """Return where a tensor claims to lie."""
        with torch._C.DisableTorchFunction():
            return self._places.get(tensor.untyped_storage()._cdata, (None, _HERE))[1]

    def _lay(self, out: Any, place: torch.device) -> None:
        for tensor in _tensors(out):
            with torch._C.DisableTorchFunction():
                storage = tensor.untyped_storage()
            self._places[storage._cdata] = storage, place

    def _moved(self, name: str, args: tuple[Any, ...], given: dict[str, Any]) -> torch.Tensor:
        tensor, *more = args
        more += given.values()
        like = [(self.place_of(x), x.dtype) for x in more if isinstance(x, torch.Tensor)]
        places = [torch.device(x) for x in more if isinstance(x, str | torch.device)]
        dtypes = [x for x in more if isinstance(x, torch.dtype)]
        here = self.place_of(tensor)
        place, dtype = like[0] if like else ((places or [here])[0], (dtypes or [tensor.dtype])[0])
        if name != "to":
            place = torch.device(name)
        with torch._C.DisableTorchFunction():
            out = tensor.to(dtype)
            if out is tensor and (place != here or given.get("copy")):
                out = tensor.clone()
        if out is not tensor:
            self._lay(out, place)
        return out

    def _refuse_two(self, name: str, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """Raise unless all tensors lie together; scalars and indices may come from the CPU."""
        taking: Any = (args, given)
        if name in ("__getitem__", "__setitem__"):
            index = list(_tensors(args[1]))
            if not {self.place_of(x) for x in index} <= {self.place_of(args[0]), _HERE}:
                raise RuntimeError(f"{name}: an index on another device")
            # without an index of tensors a value is copied
            taking = (args[0], args[2:] if index else ())
        found = [(x.dim(), self.place_of(x)) for x in _tensors(taking)]
        places = {place for axes, place in found if axes or place != _HERE}
        if len(places) > 1:
            raise RuntimeError(f"{name}: tensors on {' and '.join(sorted(map(str, places)))}")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a function is given or returns."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
