"""Hub: drafters' folders from and to the Hugging Face hub, and only when one is named.

A client of huggingface_hub: the endpoint (HF_ENDPOINT), the cache and the token come from its usual
places; the token is never shown. Pickles and code are not downloaded.
"""

import re
from pathlib import Path
from typing import Any

from drafters.errors import UserError

_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_READ = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]


def is_hub_id(spec: str | Path) -> bool:
    """Tell whether a text names a repository, as OWNER/NAME or OWNER/NAME@REVISION.

    A path whose first folder exists here is a path, whatever it leads to.

    >>> is_hub_id("owner/name@main"), is_hub_id("name"), is_hub_id("/a/b"), is_hub_id("a/b/c")
    (True, False, False, False)
    """
    text = str(spec)
    return _ID.fullmatch(text) is not None and not Path(text.partition("/")[0]).exists()


def fetch(spec: str) -> Path:
    """Download a drafter's folder, or find it in the cache, and return where it lies.

    Args:
        spec: OWNER/NAME or OWNER/NAME@REVISION.

    Raises:
        UserError: if it cannot be had; says why.
    """
    from huggingface_hub import snapshot_download  # seconds of imports that most runs never need

    found = _ID.fullmatch(spec)
    assert found is not None
    try:
        folder = snapshot_download(
            found["repo"], revision=found["revision"], allow_patterns=_READ, tqdm_class=_no_bar()
        )
    except Exception as error:  # whatever a client of a network may raise
        raise UserError(
            f"drafter {spec}: no such folder, and the hub does not give it ({_reason(error)}); "
            "give a folder, OWNER/NAME of a repository that can be read, or log in with "
            "`hf auth login`"
        ) from error
    return Path(folder)


def push(folder: Path, repo: str, *, private: bool = True) -> str:
    """Upload a folder as one commit; the repository is made if there is none.

    Args:
        folder: from publication.write.
        repo: OWNER/NAME.
        private: who may read it. A repository that exists keeps its visibility, so one that is
            open to all is refused unless that was asked for.

    Returns:
        The address of the repository.

    Raises:
        UserError: if the hub refuses; says why.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.repo_info(repo).private:
            raise UserError(
                f"{repo} exists and is open to all: give --public to publish there, or another name"
            )
        api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Publish a drafter and its card"
        )
    except UserError:
        raise
    except Exception as error:  # whatever a client of a network may raise
        raise UserError(
            f"hub {repo}: {_reason(error)}; log in with `hf auth login` (or set HF_TOKEN) as one "
            "who may write there"
        ) from error
    return f"{api.endpoint}/{repo}"


def _reason(error: Exception) -> str:
    """Return an error's first line, without what a client may have put into an address."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return re.sub(r"hf_\w+", "hf_...", text)


def _no_bar() -> Any:
    """Return a bar that shows nothing: the files are few and the caller may be a library."""
    from huggingface_hub.utils.tqdm import tqdm

    class Quiet(tqdm):
        """A bar that is never drawn."""

        def __init__(self, *given: Any, **named: Any) -> None:
            """Switch it off."""
            super().__init__(*given, **{**named, "disable": True})

    return Quiet
