"""Runs one operation in a machine: reads a JSON request on stdin, writes the result to a file and streams the output.

The exec server runs it with the request on stdin. It starts `helper.py child` in the family's `python3` if task code is
to run; what needs none, it does in a fork. Secrets come in the request, never in arguments. The first process never
imports task code.
"""

from __future__ import annotations

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# With -I or PYTHONSAFEPATH, Python's path does not include this directory.
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from provisioner_guest.family.request import BadRequestError, parse_request  # noqa: E402


def main(arguments: list[str]) -> int:
    """Runs one operation and returns the exit code.

    Args:
        arguments: [] when the driver calls it, ["child"] in the process that runs task code.

    Returns:
        0 if a result was written, even that of a failure; 2 if the request is not valid.
    """
    try:
        request = parse_request(sys.stdin.buffer.read())
        # Each process imports only its own modules: on an emulated CPU each one costs a tenth of a second.
        if arguments == ["child"]:
            from provisioner_guest.family import child

            child.main(request, program_directory=HERE)
        else:
            from provisioner_guest.family import parent

            parent.run(request, program=os.path.join(HERE, "helper.py"))
    except BadRequestError as error:
        print(f"provisioner helper: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
