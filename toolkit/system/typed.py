"""Commands as they are typed: what a message tells people to type must be one they can paste."""

import shlex


def as_typed(*words: object) -> str:
    """The words as one line for a shell, each in quotes where it needs them: a space in a path, a bracket, a `$`."""
    return shlex.join(map(str, words))
