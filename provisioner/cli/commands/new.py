"""The command `new`: writes a family, to begin with."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from provisioner.cli.options import parse_path
from provisioner.cli.output import Result


def main(
    family: Annotated[
        Path,
        typer.Argument(
            metavar="FAMILY", help="Directory to write; its last part is the family's name.", parser=parse_path
        ),
    ],
    aux: Annotated[bool, typer.Option("--aux", help="Give the tasks an aux VM.")] = False,
    intermediate: Annotated[bool, typer.Option("--intermediate", help="Score in between as well.")] = False,
) -> Result:
    """Writes a family that works, to begin with."""
    from provisioner.family.new_family import write_family  # Jinja takes a while to import

    files = write_family(family, aux=aux, intermediate=intermediate)
    name = shlex.quote(str(family))
    text = "\n".join(
        [
            *(str(family / file) for file in files),
            "",
            f"  provisioner check {name}",
            f"  provisioner test {name} small                                 its own tests, in a machine",
            f"  echo 42 | provisioner run {name} small --submission -         score: 1",
        ]
    )
    return Result({"family": family.absolute().name, "directory": str(family.absolute()), "files": files}, text)
