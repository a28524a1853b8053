"""``python -m hvd_compress.bench COMMAND``."""

from __future__ import annotations

import argparse

from hvd_compress.bench import codecs


def main() -> None:
    """Parses the command line and runs one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m hvd_compress.bench", description="Benchmarks of hvd_compress.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("codecs", help=codecs.__doc__.splitlines()[0], description=codecs.__doc__)
    codecs.add_arguments(command)
    command.set_defaults(run=codecs.run)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
