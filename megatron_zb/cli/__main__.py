"""`python -m megatron_zb.cli` is `megatron-zb`."""

import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C ends the process without a traceback while a command is imported, and after its end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from megatron_zb.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
