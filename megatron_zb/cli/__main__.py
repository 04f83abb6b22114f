"""`python -m megatron_zb.cli` is `megatron-zb`."""

from megatron_zb.cli.main import main

raise SystemExit(main())
