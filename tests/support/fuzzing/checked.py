"""Run megatron-zb as the script of a forked process, whose questions forks of it answer.

What Megatron-LM is asked would else import it again, which takes as long as a training here.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path

from megatron_zb.cli.main import main
from megatron_zb.megatron_lm import own_process


def run_apart(
    question: str, root: str, given: str, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Answer in a fork of this process, in place of a new interpreter."""
    assert root == str(Path(os.environ["MEGATRON_LM_PATH"]).resolve())  # which is imported here
    sys.stdout.flush()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if not (child := os.fork()):
            code = 1
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                os.environ |= environment
                sys.stdin = io.StringIO(given)
                own_process.main(question, root)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        printed = [(f.seek(0), f.read().decode())[1] for f in (out, err)]
    return subprocess.CompletedProcess([], os.waitstatus_to_exitcode(status), *printed)


if __name__ == "__main__":
    own_process.run_apart = run_apart
    sys.exit(main())
