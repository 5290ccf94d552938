"""`drafters`, or `python -m drafters`: the scripts as one command, from a checkout or a wheel."""

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Hand over to scripts/commands.py, which lies beside this package or in it."""
    packaged = Path(__file__).parent / "_scripts"
    scripts = packaged if packaged.is_dir() else Path(__file__).parents[1] / "scripts"
    sys.path.insert(0, str(scripts))
    sys.argv[0] = "drafters"
    runpy.run_path(str(scripts / "commands.py"), run_name="__main__")


if __name__ == "__main__":
    main()
