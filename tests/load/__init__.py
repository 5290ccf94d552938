"""Load: requests of random arrival and length through the engine.

python -m tests.load --seconds 600 --rows 64              # a tiny random target
python -m tests.load --seconds 600 --rows 16 --target T   # a real one
python -m tests.load --tokens 8000 --target T              # one long generation, and plain
"""
