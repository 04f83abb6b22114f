#!/usr/bin/env python3
r"""Draw docs/pictures/pages: what the pages of show, trace and plan look like in a browser.

Needs Chromium. The measured step is in docs/results/step.cpu.yaml and step.cpu.trace.json, of

  python scripts/prepare_text.py --output-prefix data/text README.md docs/*.md
  torchrun --nproc-per-node 4 -m megatron_zb.train --cpu --data-path data/text \
      --pipeline-schedule v-half --pipeline-model-parallel-size 4 --num-layers 8 \
      --hidden-size 256 --num-attention-heads 8 --seq-length 128 --micro-batch-size 2 \
      --global-batch-size 16 --lr 3e-3 --train-iters 10 --eval-iters 1 \
      --pipeline-profile docs/results/step.cpu.yaml

  python docs/make_pages.py                 all of them, in some minutes
  python docs/make_pages.py --kinds plan
"""

from __future__ import annotations

import argparse
import base64
import io
import sys
import tempfile
from itertools import product
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "tests" / "support"))

from browser import MISSING, Browser, find_browser  # noqa: E402

from megatron_zb.cli import main as cli  # noqa: E402

PICTURES = DOCS / "pictures" / "pages"
COMMANDS = {
    "schedule": "show v-half --pipeline-size 4 --num-microbatches 8 --p2p 0.05 --output",
    "step": f"trace {DOCS / 'results' / 'step.cpu.yaml'} --output",
    "plan": "plan --config gpt_28b --gpus 64 --html",
}
SIZES = {1280: 1400, 400: 1800}
"""Heights of the pictures by their widths."""
SCHEMES = ("light", "dark")
COLOURS = 160


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    kinds = parser.parse_args().kinds
    command = find_browser()
    if command is None:
        raise SystemExit(MISSING)
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, Browser(command, Path(name)) as browser:
        for kind in kinds:
            page = Path(name) / f"{kind}.html"
            if cli.main([*COMMANDS[kind].split(), str(page)]) != 0:
                raise SystemExit(f"the page of {kind} was not written")
            for width, scheme in product(SIZES, SCHEMES):
                _draw(browser, page, width, scheme)


def path_of(kind: str, width: int, scheme: str) -> Path:
    return PICTURES / f"{kind}-{width}-{scheme}.png"


def _draw(browser: Browser, page: Path, width: int, scheme: str) -> None:
    """The top of a page, with few colours and no metadata: small."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.call("Emulation.setEmulatedMedia", features=[feature])
    browser.open(page, width, SIZES[width])
    shot = browser.call("Page.captureScreenshot", format="png")
    with Image.open(io.BytesIO(base64.b64decode(shot["data"]))) as image:
        few = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    path = path_of(page.stem, width, scheme)
    few.save(path, optimize=True)
    print(path)


if __name__ == "__main__":
    main()
