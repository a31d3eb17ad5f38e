"""Kills, damage and signals, for every kernel: what ends or harms a run never passes in silence.

    python -m tests.faults --kills 200 --damage 500 --signals 60

prints a table of what happened, and exits with 1 where something did pass. A short part of this is
in the slow tests.
"""
