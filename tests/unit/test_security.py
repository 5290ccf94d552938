"""No code of ours can run what a file says: no unpickling, no evaluation, no shell."""

import ast
from pathlib import Path

import pytest

from drafters.target import Target
from tests.folders import save_tiny_target

ROOT = Path(__file__).parents[2]
FOLDERS = ("drafters", "inference", "training", "scripts")
FILES = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
MODULES = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "os.system", "os.popen"}


def forbidden(text: str) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [x.name for x in node.names if x.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            shell = [k for k in node.keywords if k.arg == "shell"]
            allow = [k for k in node.keywords if k.arg == "allow_pickle"]
            if name in CALLS or shell or allow:
                found.append(name)
    return found


def test_code_of_a_folder_is_announced_before_it_runs(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "target", num_hidden_layers=1)
    with pytest.warns(UserWarning, match="trust_remote_code lets its own Python run"):
        Target.load(folder, trust_remote_code=True)


@pytest.mark.slow
def test_nothing_is_unpickled_evaluated_or_given_to_a_shell() -> None:
    assert FILES
    found = {str(file): forbidden(file.read_text(encoding="utf-8")) for file in FILES}
    assert not {file: names for file, names in found.items() if names}


@pytest.mark.parametrize(
    "text", ["import pickle", "from dill import x", "torch.load(x)", "run('ls', shell=True)"]
)
def test_the_search_finds(text: str) -> None:
    assert forbidden(text)
