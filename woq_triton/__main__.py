"""`python -m woq_triton` and the script `woq-triton`."""

import signal
import sys


def main() -> None:
    """Run the command line, or say which extra it needs."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises:
        # A Ctrl-C in the middle of an import can surface as any error: let it end the process instead.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from woq_triton.cli import app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("woq_triton"):
            raise
        sys.exit(f"woq-triton needs the package {error.name!r}: pip install 'woq_triton[autotp]'")
    if raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
