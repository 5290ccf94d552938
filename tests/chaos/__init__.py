"""Chaos: commands are stopped at random moments, and must go on to the same result.

    python -m tests.chaos --kills 30 --faults 170 --seed 0    # make chaos
    python -m tests.chaos --seed 0 --case 17                  # that case alone, again

Every command runs in a forked process, so that a kill is a real one and costs no imports.
"""
