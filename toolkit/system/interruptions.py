"""Exceptions that end a run early, and the exit code that says so."""


class Interrupted(BaseException):
    """A signal ended the run after a durable checkpoint; the message is the command that continues.

    Not an `Exception`: a sweep with `except Exception: continue` must end as well.
    """

    exit_code = 75


class InterruptedByKeyboard(Interrupted, KeyboardInterrupt):
    """The same by Ctrl-C or a notebook's stop button, where no command line runs the recipe: also what Python raises."""


class OutOfTime(Exception):
    """The deadline after a stop signal is near and the step is not done."""
