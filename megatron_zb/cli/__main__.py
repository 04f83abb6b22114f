"""`python -m megatron_zb.cli` is `megatron-zb`."""

import _signal  # type: ignore[import-not-found]  # `signal` builds enumerations first, a millisecond
import sys

if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    # Ctrl-C ends the process without a traceback while a command is imported, and after its end.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

from megatron_zb.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
