"""Deliberate errors: `python -m tests.mutants` changes one expression after the other, and tests.

mutmut's operators make the changes; each is put into the running functions of a fork of one
process that has imported and collected everything, and meets the tests that run its line.
"""
