"""The exit status of a program that has saved its state because it was told to stop."""

from __future__ import annotations

# Slurm has requeued the job: nothing else must start the program again.
DONE = 0
# The launching script may start the program again: it resumes from its saved state.
RESTART = 42
# The program must not be started again: it got SIGTERM (15). A shell reports the same status for that signal.
STAY_AWAY = 128 + 15
# The program made no progress since its last start, so a new start would not help.
NO_PROGRESS = 1
