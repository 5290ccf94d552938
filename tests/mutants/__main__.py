"""Change one expression after the other; see the package."""

import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.changes import Mutant, mutants_of
from tests.mutants.judge import Judge

# What must be right, and the tests that prove it: exact, quick, and none starts a process.
PROOFS: dict[str, tuple[str, ...]] = {
    "inference/verify.py": (
        *("property/exact_laws", "property/classic_errors"),
        *("unit/bigram_example", "unit/typical"),
    ),
    "drafters/laws.py": ("property/exact_laws", "unit/laws"),
    "drafters/tree.py": ("unit/tree", "unit/growth"),
    "drafters/cache.py": ("unit/attention", "unit/cache"),
    "drafters/masks.py": ("unit/attention", "unit/cache", "unit/frontier", "unit/placement"),
    "drafters/placement.py": ("unit/attention", "unit/cache", "unit/frontier", "unit/placement"),
    "drafters/sampling.py": ("unit/growth", "unit/rules", "unit/sampling"),
}
_GROWTH = ("best_first", "cost_aware", "costs", "growth", "ledger", "ranks")
for _path in sorted(Path("drafters/growth").glob("*.py")):
    PROOFS[str(_path)] = tuple(f"unit/{name}" for name in _GROWTH)


def main(named: list[str]) -> int:
    """Judge the mutants of some files, or of functions as FILE::NAME; of all by default."""
    named = named or [*PROOFS]
    tests = dict.fromkeys(test for name in named for test in PROOFS[_file(name)])
    files = [f"tests/{folder}/test_{test}.py" for folder, test in (x.split("/") for x in tests)]
    mutants = [mutant for name in named for mutant in _mutants(name)]
    expected = Counter(mutant.file for mutant in mutants)
    judged, survived = Counter[str](), Counter[str]()

    def told(mutant: Mutant, killer: str | None) -> None:
        file = mutant.file
        judged[file] += 1
        survived[file] += killer is None
        if killer is None or "::" not in killer:  # no test, or what ended the process
            print(f"{killer or 'survived'}: {mutant}", flush=True)
        if judged[file] == expected[file]:
            share = 1 - survived[file] / judged[file]
            print(f"{file}: {judged[file]} mutants, {survived[file]} survived, {share:.1%} killed")

    with tempfile.TemporaryDirectory() as folder:
        options = ["-qq", "-s", "-p", "no:cacheprovider", f"--basetemp={folder}/tests"]
        # nobody reads why a test fails, or where a process ended
        options += ["--tb=native", "--assert=plain", "-p", "no:faulthandler"]
        pytest.main([*options, *files], plugins=[Judge(mutants, told)])
    return int(judged != expected or survived.total() > 0)


def _file(name: str) -> str:
    return name.partition("::")[0]


def _mutants(name: str) -> list[Mutant]:
    function = name.partition("::")[2]
    return [x for x in mutants_of(_file(name)) if function in ("", x.function)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
