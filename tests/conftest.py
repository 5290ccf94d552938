"""What holds for every test: no hub, no tracker, one thread, one seed, repeatable examples."""

import os

# Before anything imports a library that reads them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Of commands that tests start, too: two threads beside another worker wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

import gc
import random

import pytest

# Whatever takes seconds to import is imported where it is used: with -n, the process that only
# hands the tests out starts its workers at once.


def pytest_collection(session: pytest.Session) -> None:
    if session.config.getoption("dist", "no") != "no":
        return
    from hypothesis import settings

    settings.register_profile("ci", derandomize=True, max_examples=50, deadline=None)
    settings.load_profile("ci")
    gc.disable()  # what is imported stays: looking through it again and again takes seconds


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


# One without drafts, one that copies, one that is trained; of the others the parametrised tests are
# slow ones, their own are not.
SLOW_FOLDERS = {"smoke", "golden"}
QUICK_FAMILIES = {"none", "ngram", "medusa"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    from drafters.registry import methods

    families = set(methods())
    for item in items:
        if item.path.parent.name in SLOW_FOLDERS:
            item.add_marker(pytest.mark.slow)
        given = getattr(item, "callspec", None)
        named = {x for x in given.params.values() if isinstance(x, str)} if given else set()
        if named & families and not named & QUICK_FAMILIES:
            item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    import torch

    # Tiny tensors lose time to threads, and sums in one order are equal bit for bit. Before every
    # test: a training run inside the one before takes as many as there are cores, and keeps them.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
