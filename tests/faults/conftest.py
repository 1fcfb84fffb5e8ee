"""Faults caused on purpose. How often each is tried, and the tally of what survived, are in tests/tally.py.

    make chaos                 all of it in the long form, with its table in docs/reliability.md
    make chaos TRIALS=10       a tenth of the trials
"""
