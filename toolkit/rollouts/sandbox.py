"""Runs code of a model with its tests, with limits. `python_reward` starts this file as a script, in a process of its own.

    python -I sandbox.py DESCRIPTOR CPU_SECONDS MEMORY_MIB FILE_MIB

Standard input holds a line of JSON, the code and the tests, and a line with a word. DESCRIPTOR gets a line of JSON with the
limits that could not be had, and after each test that passed a line with the word and its number. The word is read when the
code has run, so that ending early, or writing what looks like success, is none.

On Linux: no network (a network namespace, and a system call filter against sockets), no further processes (the filter), nothing
written outside of the temporary directory (Landlock). Everywhere: limits of CPU time, memory and file sizes. What a machine
does not allow is reported. It is no prison for malice: who runs such code should not do it where secrets can be read.
"""

import ctypes
import json
import os
import platform
import resource
import struct
import sys

# linux/seccomp.h, linux/filter.h
ALLOW, ERROR = 0x7FFF0000, 0x00050000
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
EPERM, ENOSYS = 1, 38
CLONE_THREAD, CLONE_NEWUSER, CLONE_NEWNET = 0x00010000, 0x10000000, 0x40000000
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2
SYSTEMS = {  # audit architecture, and numbers of the system calls
    "x86_64": (0xC000003E, {"clone": 56, "clone3": 435, "fork": 57, "vfork": 58, "socket": 41, "kill": 62, "ptrace": 101,
                            "io_uring_setup": 425, "tkill": 200, "tgkill": 234, "pidfd_send_signal": 424}),
    "aarch64": (0xC00000B7, {"clone": 220, "clone3": 435, "socket": 198, "kill": 129, "ptrace": 117, "io_uring_setup": 425,
                             "tkill": 130, "tgkill": 131, "pidfd_send_signal": 424}),
}  # fmt: skip
# linux/landlock.h: all that changes files, and what later versions added
LANDLOCK_WRITES = {1: 0x1FF2, 2: 0x2000, 3: 0x4000}  # write, remove and make of every kind; refer; truncate
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446


def confine(cpu_seconds: int, memory_mib: int, file_mib: int) -> list[str]:
    """Take away from this process what tests of code do not need; what could not be taken away."""
    libc, missing = ctypes.CDLL(None, use_errno=True), []
    for name, kind, limit in (
        ("time", resource.RLIMIT_CPU, cpu_seconds), ("memory", resource.RLIMIT_AS, memory_mib << 20),
        ("sizes", resource.RLIMIT_FSIZE, file_mib << 20), ("cores", resource.RLIMIT_CORE, 0),
        ("open", resource.RLIMIT_NOFILE, 64),
    ):  # fmt: skip
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        try:
            resource.setrlimit(kind, (limit, limit))
        except (ValueError, OSError):  # macOS has no limit of address space
            missing.append(name)
    if sys.platform != "linux":
        return [*missing, "network", "processes", "files"]
    has_namespace = libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if not _landlock(libc):
        missing.append("files")
    if not _filter_calls(libc):
        missing.append("processes")
        if not has_namespace:
            missing.append("network")
    return missing


def _landlock(libc: ctypes.CDLL) -> bool:
    """Writing only below the working directory."""
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    rights = sum(bits for since, bits in LANDLOCK_WRITES.items() if version >= since)
    handled = struct.pack("Q", rights)
    rules = libc.syscall(LANDLOCK_CREATE, handled, ctypes.c_size_t(len(handled)), 0)
    if rules < 0:
        return False
    here, null = os.open(".", os.O_PATH), os.open("/dev/null", os.O_PATH)
    for descriptor, allowed in ((here, rights), (null, rights & 0x4002)):
        libc.syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, descriptor), 0)
    restricted = libc.syscall(LANDLOCK_RESTRICT, rules, 0) == 0
    for descriptor in (here, null, rules):
        os.close(descriptor)
    return bool(restricted)


def _filter_calls(libc: ctypes.CDLL) -> bool:
    """No new process (threads may be), no socket, no signal to others."""
    if platform.machine() not in SYSTEMS:
        return False
    architecture, numbers = SYSTEMS[platform.machine()]
    program = [
        (LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, ERROR | EPERM), (LOAD, 0, 0, NUMBER),
        # clone3 keeps its flags in memory, where a filter can't read them: glibc falls back to clone
        (EQUAL, 0, 1, numbers["clone3"]), (RETURN, 0, 0, ERROR | ENOSYS),
        (EQUAL, 0, 4, numbers["clone"]), (LOAD, 0, 0, FIRST_ARGUMENT), (ANY_BIT, 1, 0, CLONE_THREAD),
        (RETURN, 0, 0, ERROR | EPERM), (RETURN, 0, 0, ALLOW),
    ]  # fmt: skip
    for name, number in numbers.items():
        if name not in ("clone", "clone3"):
            program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ERROR | EPERM)]
    if platform.machine() == "x86_64":
        program += [(0x35, 0, 1, 0x40000000), (RETURN, 0, 0, ERROR | EPERM)]  # the x32 numbers of the same calls
    program.append((RETURN, 0, 0, ALLOW))
    code = b"".join(struct.pack("HBBI", *each) for each in program)
    held = ctypes.create_string_buffer(code)
    described = struct.pack("HxxxxxxP", len(program), ctypes.addressof(held))
    return libc.prctl(SECCOMP, FILTER, ctypes.c_char_p(described), 0, 0) == 0


def main(descriptor: int, cpu_seconds: int, memory_mib: int, file_mib: int) -> None:
    pipe = os.fdopen(os.dup(0))
    task = json.loads(pipe.readline())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # for the code there is no input
    missing = confine(cpu_seconds, memory_mib, file_mib)
    os.write(descriptor, (json.dumps(missing) + "\n").encode())
    names = {"__name__": "__main__"}
    try:
        exec(compile(task["code"], "completion", "exec"), names)
    except BaseException:  # what the code raises, also SystemExit, is its own fault; some tests may not need what is missing
        if not task["tests"]:
            os._exit(1)
    word = pipe.readline().strip()
    for number, test in enumerate(task["tests"]):
        try:
            exec(compile(test, "test", "exec"), dict(names))
        except BaseException:
            continue
        os.write(descriptor, f"{word} {number}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
