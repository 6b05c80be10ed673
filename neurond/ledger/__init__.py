"""The rules: who may hold which chip, and what follows from it.

Pure: no file, clock, lock, log or await, and no third-party import. Whatever happens is an event, and the
state is the fold of its events, so the same events serve the journal, the watchers and the log.
"""
