"""`drafters`, or `python -m drafters`: the scripts as one command, from a checkout or a wheel."""

import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path


def main() -> None:
    """Hand over to scripts/commands.py, which lies beside this package or in it."""
    packaged = Path(__file__).parent / "_scripts"
    scripts = packaged if packaged.is_dir() else Path(__file__).parents[1] / "scripts"
    sys.path.insert(0, str(scripts))
    run_script(scripts / "commands.py", "drafters", sys.argv[1:])


def run_script(file: Path, shown: str, arguments: list[str]) -> None:
    """Run a script as the program, under the name that its help and its records show.

    runpy would put the script's path in that name's place.
    """
    sys.argv = [shown, *arguments]
    loader = SourceFileLoader("__main__", str(file))
    program = module_from_spec(ModuleSpec("__main__", loader, origin=str(file)))
    program.__file__ = str(file)
    before, sys.modules["__main__"] = sys.modules["__main__"], program
    try:
        loader.exec_module(program)
    finally:
        sys.modules["__main__"] = before


if __name__ == "__main__":
    main()
