"""``python -m hvd_compress.bench COMMAND``."""

from __future__ import annotations

import argparse

from hvd_compress.bench import cluster, codecs, exchange, keras, plot, step


def main() -> None:
    """Parses the command line and runs one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m hvd_compress.bench", description="Benchmarks of hvd_compress.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in {
        "codecs": codecs,
        "exchange": exchange,
        "step": step,
        "keras": keras,
        "cluster": cluster,
        "plot": plot,
    }.items():
        command = commands.add_parser(name, help=str(module.__doc__).splitlines()[0], description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
