"""What Python does with its arguments, in a process that was forked: `-m module`, `-c code` or a script.

Run with the path of the script in place of Python, and then that Python's arguments.
"""

import os
import runpy
import sys

if __name__ == "__main__":
    sys.executable, target, *words = sys.argv[1:]
    if target == "-c":
        sys.argv = ["-c", *words[1:]]
        sys.path.insert(0, "")
        exec(compile(words[0], "<string>", "exec"), globals())
    elif target == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
        sys.argv = [target, *words]
        runpy.run_path(target, run_name="__main__")
