"""The driver's program inside a machine: one JSON request on stdin, one result in a file, output as it comes.

Usage: `python3 helper.py < request`. `helper.py child` is how it starts the process that runs task code.
Secrets come only with the request, never in arguments. Must never import task code in the first process.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# With -I or PYTHONSAFEPATH Python leaves this directory out.
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from provisioner_request import BadRequestError, Request, parse_request  # noqa: E402


def read_request() -> Request:
    """Read stdin to its end as the request."""
    return parse_request(sys.stdin.buffer.read())


def main(arguments: list[str]) -> int:
    """Run one operation and give the exit code.

    Args:
        arguments: none for the driver's call, ["child"] in the process that does the work.

    Returns:
        0 when a result was written, whatever it says; 2 when the request was not one.
    """
    try:
        request = read_request()
        # Each process imports its own half: on an emulated CPU an unused module costs a tenth of a second.
        if arguments == ["child"]:
            import provisioner_child

            provisioner_child.main(request, program_directory=HERE)
        else:
            import provisioner_parent

            provisioner_parent.run(request, program=os.path.join(HERE, "helper.py"))
    except BadRequestError as error:
        print(f"provisioner helper: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
