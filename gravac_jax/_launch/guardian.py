"""Ends the processes of a launcher that died without a word.

`Job` runs this file as a program, as the first member of the process group that its
processes join. Standard input is a pipe that the launcher holds open and never writes
to: its end is the launcher's death, in whatever way. It works for every command, also
for one that is stuck or no Python, and needs neither jax nor the package.
"""

import os
import signal
import sys


def main(launcher: str) -> None:
    """Wait for the launcher to die, then kill the own group, oneself included."""
    # What ends the others, or comes from the keyboard, must not end the last one out.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    try:
        sys.stderr.write(f"the launcher (pid {launcher}) is gone; its processes end\n")
    finally:
        os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
