"""`python -m woq_triton` and the script `woq-triton`."""

import sys


def main() -> None:
    """Run the command line, or say which extra it needs."""
    try:
        from woq_triton.cli import app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("woq_triton"):
            raise
        sys.exit(f"woq-triton needs the package {error.name!r}: pip install 'woq_triton[autotp]'")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
